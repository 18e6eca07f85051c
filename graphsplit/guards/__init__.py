"""What a captured graph depends on besides its inputs: the Python values that its code has read."""
