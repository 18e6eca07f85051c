"""Passes over the recorded program that keep eager's bits: in-place writes, casts, identities."""
