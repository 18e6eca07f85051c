"""A worker's part in a job, and its stream to the scheduler."""
