"""Public helpers for tests, of graphsplit and of its users."""
