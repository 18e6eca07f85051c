"""Numbers beside the tensors: sizes that change, numbers that Python code reads."""
