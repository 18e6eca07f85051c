"""Where graphsplit steps between PyTorch and its callers."""
