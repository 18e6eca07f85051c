"""Calls a function on workers of this machine: ``gs.launch``."""
