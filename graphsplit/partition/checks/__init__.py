"""Checks of a plan: that it is sound, and what it may not share, draw or return."""
