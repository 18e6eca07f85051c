"""The Python side of a step as workers compare it: values, swapped losses, writes to tensors."""
