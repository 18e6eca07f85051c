"""The Python state that a piece of code can reach: found, noted, put back."""
