"""The Python values that a graph depends on, for a person."""

from __future__ import annotations

from graphsplit.guards.values import shown
from graphsplit.partition.plan import PartitionPlan


def state_sections(plan: PartitionPlan) -> list[tuple[str, list[str]]]:
    """Places that were read, numbers that are operands, changes that are left."""
    state = plan.placed.graph.state
    tables = [w for w in state.guards.watched if w.is_structure and str(w.place.key)[:1] == "_"]
    read = [
        f"{w.place.label} = {shown(w.value)}{_where(w.place.source)}"
        for w in state.guards.watched
        if not w.is_structure
    ]
    of_modules = sorted({w.place.label.rpartition(".")[0] for w in tables})
    return [
        (f"Python values that it depends on ({len(state.guards)} comparisons)", read),
        ("Modules whose class, children, parameters, buffers and hooks count", of_modules),
        (
            "Numbers that are operands",
            [f"{p.label} = {shown(p.read())}{_where(p.source)}" for p in state.lifted.places],
        ),
        ("Left by network and loss at each call", list(map(str, state.changes))),
    ]


def _where(source: str) -> str:
    return f"  # {source}" if source else ""
