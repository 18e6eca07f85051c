"""Marks of users: placements on modules and operations, rules in mappings and files, opt-outs."""
