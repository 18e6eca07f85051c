"""A plan explained to a person."""
