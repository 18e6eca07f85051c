"""Batches: their signatures, and how they become microbatches."""
