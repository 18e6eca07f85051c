"""Explain a plan to a person: who holds and computes what, why, and what crosses."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType
from typing import Literal

from torch import nn

from graphsplit.capture.graph import NodeKind
from graphsplit.guards.check import Watched
from graphsplit.guards.places import Place, PlaceKind
from graphsplit.guards.values import MISSING, Frozen, shown
from graphsplit.partition.dump import human_bytes
from graphsplit.partition.explain.folding import Row, fold_repetitions
from graphsplit.partition.explain.modules import module_lines, size_of, unplaced_lines
from graphsplit.partition.explain.operations import crossing_lines, operation_lines, state_lines
from graphsplit.partition.explain.traffic import (
    borrowed_lines,
    gradient_lines,
    pair_lines,
    route_lines,
    traffic_lines,
)
from graphsplit.partition.plan import PartitionPlan
from graphsplit.placement.resolve import EVERYWHERE
from graphsplit.text import align

Detail = Literal["modules", "operations", "state"]
WIDTH = 120
_MAX_STOPS = 12


def explain_plan(
    plan: PartitionPlan,
    *,
    detail: Detail = "modules",
    optimizer_copies: float | None = None,
    routes: Mapping[tuple[int, int], tuple[str, str]] | None = None,
    compute: Sequence[str] = (),
    messages: Sequence[str] = (),
    step_times: Sequence[str] = (),
    reading: str = "",
) -> str:
    """Describe a plan to a person, in lines of at most 120 characters.

    Sizes are those of one microbatch, and said to be. Modules that repeat are shown once, as
    ``layers.{3..17}``.

    Args:
        plan: The plan.
        detail: ``"modules"``: totals of each worker, the modules as a tree down to where everything
            inside is on one worker, and what crosses, the largest first. ``"operations"``: every
            parameter, operation and edge. ``"state"``: every Python value that the graph depends
            on, and what network and loss leave of them.
        optimizer_copies: How many numbers the optimizer keeps for each number that it trains.
        routes: How each pair of workers is connected, and why; of a running job only.
        compute: What is known of the seconds that each worker computes.
        messages: What is known of the seconds that messages take.
        step_times: What is known of the time that a step takes.
        reading: What is known of who reads which rows of a loader's batches.
    """
    per = _unit(plan)
    sections: list[tuple[str, list[str]]] = [(f"Workers, {per}", _totals(plan, optimizer_copies))]
    if detail == "operations":
        sections += [
            ("Parameters and buffers", state_lines(plan)),
            ("Operations, in program order", operation_lines(plan)),
            (f"What crosses between workers, {per}", crossing_lines(plan)),
        ]
    elif detail == "state":
        sections += state_sections(plan)
    else:
        sections += [
            ("Modules", module_lines(plan)),
            ("Placed by nobody", unplaced_lines(plan)),
            (f"What crosses between workers, {per}", traffic_lines(plan)),
            (f"Between each pair of workers, {per}", pair_lines(plan)),
            ("Borrowed parameters and buffers", borrowed_lines(plan)),
            ("Gradients that replicas send to owners, per step", gradient_lines(plan)),
        ]
    sections += [
        ("How workers are connected", route_lines(routes or {})),
        ("Reading of the loader", textwrap.wrap(reading, WIDTH - 2)),
        ("Longest chain of workers that wait for each other", _longest_chain(plan)),
        ("Compute, per step", list(compute)),
        ("Messages, per step", list(messages)),
        ("Step time", list(step_times)),
        ("Notes", [line for note in plan.placed.notes for line in note.splitlines()]),
    ]
    parts = [_headline(plan)]
    parts += ["\n".join([title, *(_indent(line) for line in ls)]) for title, ls in sections if ls]
    return "\n\n".join(parts)


def _indent(line: str) -> str:
    line = f"  {line}".rstrip()
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _unit(plan: PartitionPlan) -> str:
    """The unit of the sizes: a step, or a microbatch where a batch is split."""
    if plan.lanes:
        return f"per microbatch, {len(plan.lanes)} lanes together"
    return "per microbatch" if plan.is_microbatched else "per step"


def _headline(plan: PartitionPlan) -> str:
    nodes = plan.placed.graph.nodes
    operations = sum(node.kind is NodeKind.OPERATION for node in nodes)
    operations //= max(1, len(plan.lanes))
    return (
        f"{plan.placed.graph.mode.value} graph on {plan.num_workers} worker(s): "
        f"{operations} operations in {len(plan.segments)} segment(s), {len(plan.edges)} edge(s), "
        f"{human_bytes(sum(edge.meta.size_bytes for edge in plan.edges))} cross {_unit(plan)}"
    )


def _totals(plan: PartitionPlan, optimizer_copies: float | None) -> list[str]:
    """One line per worker; columns that are empty everywhere are left out."""
    header = (
        *("worker", "parameters", "bytes", "gradients", "optimizer", "buffers"),
        *("operations", "activations", "segments", "receives", "sends"),
    )
    rows = [_totals_of(plan, worker, optimizer_copies or 0.0) for worker in range(plan.num_workers)]
    kept = [
        i
        for i, name in enumerate(header)
        if name not in ("gradients", "optimizer", "buffers") or any(r[i] != "0 B" for r in rows)
    ]
    table = [[row[i] for i in kept] for row in (header, *rows)]
    return align(table, right=frozenset(range(len(kept))))


def _totals_of(plan: PartitionPlan, worker: int, optimizer_copies: float) -> tuple[str, ...]:
    workers, graph = plan.placed.workers, plan.placed.graph
    nodes = [graph.nodes[p] for p in plan.counted() if workers[p] == worker]
    parameters = [n for n in nodes if n.kind is NodeKind.PARAMETER]
    trained = [n for n in parameters if n.requires_grad and graph.has_gradients]
    operations = [n for n in nodes if n.kind is NodeKind.OPERATION]
    return (
        str(worker),
        f"{sum(n.meta.num_elements for n in parameters if n.meta is not None):,}",
        human_bytes(size_of(parameters)),
        human_bytes(size_of(trained)),
        human_bytes(size_of(trained) * optimizer_copies),
        human_bytes(size_of(n for n in nodes if n.kind is NodeKind.BUFFER)),
        str(len(operations)),
        human_bytes(size_of(operations)),
        str(len(plan.segments_of(worker))),
        human_bytes(sum(e.meta.size_bytes for e in plan.edges if e.destination == worker)),
        human_bytes(sum(e.meta.size_bytes for e in plan.edges if e.source == worker)),
    )


def _longest_chain(plan: PartitionPlan) -> list[str]:
    """The path through the graph that changes worker most often."""
    workers, nodes = plan.placed.workers, plan.placed.graph.nodes
    changes = [0] * len(nodes)
    before = [-1] * len(nodes)
    for position, node in enumerate(nodes):
        for operand in (*node.reads, *node.runs_after):
            if EVERYWHERE in (workers[operand], workers[position]):
                continue
            found = changes[operand] + (workers[operand] != workers[position])
            if found > changes[position]:
                changes[position], before[position] = found, operand
    if not any(changes):
        return []
    stops: list[int] = []
    position = changes.index(max(changes))
    while position >= 0:
        if not stops or stops[-1] != workers[position]:
            stops.append(workers[position])
        position = before[position]
    noun = "change" if max(changes) == 1 else "changes"
    return [f"{max(changes)} {noun}: worker {_chain(stops[::-1])}"]


def _chain(stops: Sequence[int]) -> str:
    shown = [str(stop) for stop in stops]
    if len(shown) > _MAX_STOPS:
        shown = [*shown[: _MAX_STOPS - 3], "...", *shown[-2:]]
    return " -> ".join(shown)


# The Python values that a graph depends on, for a person: what was read first, then the rest.
#
# A name is watched as well where it is *not* there: an instance that gets a ``forward`` of its own
# calls that. Such names, and torch's, are many and seldom asked for: they stand at the end, in
# rows.

_WIDTH = 100
_OF_TORCH = "torch."
_TABLES = frozenset(name for name in vars(nn.Module()) if name.startswith("_"))
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
    code = [w.place for w in there if _is_code(w) and w.place.key != "__bases__"]
    return [
        (
            f"Python values that were read (of {len(state.guards)} comparisons before each step)",
            _table((w.place, shown(w.value)) for w in values),
        ),
        ("Numbers that are operands", _table((p, shown(p.read())) for p in state.lifted.places)),
        (
            "Left by network and loss at each call",
            [change.named(state.lifted.places) for change in state.changes],
        ),
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
    place = watched.place
    return place.key in _TABLES or (place.key in _OF_MODULES and not place.source)


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
