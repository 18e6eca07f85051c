"""A process's part in a job: joined, going on, ending."""
