"""The Python values that a graph depends on, for a person: what was read first, then the rest.

A name is watched as well where it is *not* there: an instance that gets a ``forward`` of its own
calls that. Such names, and torch's, are many and seldom asked for: they stand at the end, in rows.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from types import CodeType

from graphsplit.guards.check import Watched
from graphsplit.guards.places import Place, PlaceKind
from graphsplit.guards.values import MISSING, Frozen, shown
from graphsplit.partition.explain.folding import Row, fold_repetitions
from graphsplit.partition.plan import PartitionPlan

_WIDTH = 100
_OF_TORCH = "torch."
_OF_MODULES = ("training", "forward")  # they count of every module, whether somebody reads them


def state_sections(plan: PartitionPlan) -> list[tuple[str, list[str]]]:
    """Places that were read, numbers that are operands, changes that are left."""
    state = plan.placed.graph.state
    modules = [w for w in state.guards.watched if _is_table(w)]
    places = [w for w in state.guards.watched if not w.is_structure and not _is_of_module(w)]
    torchs = [w for w in places if _is_of_torch(w)]
    others = [w for w in places if not _is_of_torch(w)]
    missing = [w.place for w in others if w.value is MISSING]
    there = [w for w in others if w.value is not MISSING]
    values = sorted((w for w in there if not _is_code(w)), key=_is_of_network)
    code = [w.place for w in there if _is_code(w)]
    return [
        (
            f"Python values that were read (of {len(state.guards)} comparisons before each step)",
            _table((w.place, shown(w.value)) for w in values),
        ),
        ("Numbers that are operands", _table((p, shown(p.read())) for p in state.lifted.places)),
        ("Left by network and loss at each call", list(map(str, state.changes))),
        ("Functions and classes that run", _row(place.label for place in code)),
        (
            "Modules whose class, children, parameters, buffers, hooks, forward and training count",
            _row(w.place.label.rpartition(".")[0] for w in modules),
        ),
        ("Names that are not there, and would count", _row(p.label for p in missing)),
        ("Names of torch", _row(w.place.label.removeprefix(_OF_TORCH) for w in torchs)),
    ]


def _is_table(watched: Watched) -> bool:
    """Whether it is a module's table: of its parameters, children, hooks."""
    return watched.is_structure and str(watched.place.key).startswith("_")


def _is_of_module(watched: Watched) -> bool:
    """Whether it counts because the module is used, and nobody's line has read it."""
    return watched.place.key in _OF_MODULES and not watched.place.source


def _is_of_torch(watched: Watched) -> bool:
    return watched.place.label.startswith(_OF_TORCH) and not watched.place.source


def _is_code(watched: Watched) -> bool:
    place, value = watched.place, watched.value
    if place.kind is PlaceKind.FIELD or isinstance(value, CodeType):
        return True
    return callable(value) and not isinstance(value, Frozen)


def _is_of_network(watched: Watched) -> bool:
    """Whether it comes after the few values that the user keeps elsewhere."""
    return watched.place.label.startswith("net.")


def _table(found: Iterable[tuple[Place, str]]) -> list[str]:
    """Places with their values and the lines that read them; what a long model repeats, once."""
    rows = [Row(place.label, (value, place.source)) for place, value in found]
    folded = fold_repetitions(list(dict.fromkeys(rows)))
    texts = [f"{row.path} = {row.cells[0]}" for row in folded]
    width = max((len(text) for text in texts if len(text) < _WIDTH // 2), default=0)
    return [
        f"{text.ljust(width)}  # {row.cells[1]}" if row.cells[1] else text
        for text, row in zip(texts, folded, strict=True)
    ]


def _row(labels: Iterable[str]) -> list[str]:
    """Names one after the other, each once."""
    rows = fold_repetitions([Row(label, ()) for label in sorted(set(labels))])
    return textwrap.wrap(
        ", ".join(row.path for row in rows),
        _WIDTH - 2,
        break_long_words=False,
        break_on_hyphens=False,
    )
