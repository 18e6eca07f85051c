"""Snapshots: taken, brought to their holders, written to disk, put back."""
