"""One segment of a plan as code, forward and backward."""
