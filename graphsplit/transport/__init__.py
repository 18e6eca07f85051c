"""Moves tensors between workers: one interface, several ways, each loaded only when needed."""
