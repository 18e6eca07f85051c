"""Trainers that people have, over the workers of a job. Each is imported by its own name only."""
