"""Exchanges of scripts between steps: of numbers, tensors and plain values, in order of ranks."""
