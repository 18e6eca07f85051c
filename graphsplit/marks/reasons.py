"""The kinds of reasons for which something is where it is."""

from __future__ import annotations

PLACED, BLOCK, RULE, UNPLACED = "placed", "gs.place", "rule", "not placed"


def kind_of(reason: str) -> str:
    """The kind of a reason that ``placement.resolve`` gave for an operation."""
    if reason.startswith(("module ", "the network is placed")):
        return PLACED
    if reason.startswith("gs.place at "):
        return BLOCK
    return RULE if reason.startswith("rule ") else UNPLACED


def placing_module(reason: str) -> str | None:
    """Path of the module whose placement a reason names; ``""`` for the network."""
    if reason.startswith("the network is placed"):
        return ""
    return reason.split()[1] if reason.startswith("module ") else None
