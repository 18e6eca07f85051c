"""What single operations do besides returning a value, and calls that have no torch operation."""
