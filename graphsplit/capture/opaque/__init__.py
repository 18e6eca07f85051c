"""Calls that are kept whole: found, recorded, and run as ordinary eager code."""
