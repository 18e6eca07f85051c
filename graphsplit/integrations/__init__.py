"""Trainers that people have, over the workers of a job. Each is imported by its own name only."""

# The function first: the package of its name would take its place in graphsplit.
from graphsplit import distribute as distribute
