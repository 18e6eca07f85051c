"""What scripts exchange between steps: numbers, tensors and plain values, in the order of ranks."""
