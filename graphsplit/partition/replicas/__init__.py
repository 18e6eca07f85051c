"""Replicas in a plan: lanes, blocks of gradients, chains of buffers, one exchange."""
