"""The state of a job, for people and for monitoring."""
