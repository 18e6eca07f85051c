"""Capture a network and its loss as one graph."""
