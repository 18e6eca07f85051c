"""Effects of single operations besides their value, and calls that have no torch operation."""
