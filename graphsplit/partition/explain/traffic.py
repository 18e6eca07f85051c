"""Values that cross between workers: the largest first, there and back in one line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graphsplit.partition.dump import human_bytes
from graphsplit.partition.explain.operations import ROOT, values_read, what_crosses
from graphsplit.partition.plan import EdgeKind, Exchange, PartitionPlan
from graphsplit.partition.replicas.blocks import sent_per_step
from graphsplit.text import align

_MAX_VALUES = 12
_MAX_PAIRS = 16
_MAX_BORROWED = 8
_MAX_ROUTES = 6
_OF_ALL = (EdgeKind.REDUCTION, EdgeKind.BUFFERS)  # the node is one of many
_GRADIENTS = (EdgeKind.GRADIENT, EdgeKind.BLOCK)
_NUMBER = re.compile(r"\d+")


@dataclass
class _Crossing:
    """A value, borrowed tensor or generator state that goes from one worker to another.

    Attributes:
        what: In words.
        source: Sending worker.
        destination: Receiving worker.
        there: Bytes of the value.
        back: Bytes of its gradients.
    """

    what: str
    source: int
    destination: int
    there: int
    back: int = 0


def traffic_lines(plan: PartitionPlan) -> list[str]:
    """Values that cross, like ones together, the largest first."""
    alike: dict[tuple[object, ...], list[_Crossing]] = {}
    for crossing in _crossings(plan, is_state=False):
        pattern = _NUMBER.sub("#", crossing.what)
        if crossing.what.startswith(("output", "generator")):
            pair: tuple[object, ...] = (crossing.source,)
        else:
            pair = (crossing.source, crossing.destination)
        alike.setdefault((pattern, *pair, crossing.there, crossing.back), []).append(crossing)
    groups = sorted(alike.values(), key=lambda g: -sum(c.there + c.back for c in g))
    if not groups:
        return []
    rows = [("what", "from", "to", "forward", "backward"), *map(_row, groups[:_MAX_VALUES])]
    lines = align(rows, right=frozenset({3, 4}))
    rest = [crossing for group in groups[_MAX_VALUES:] for crossing in group]
    if rest:
        size = human_bytes(sum(c.there + c.back for c in rest))
        lines.append(f"... and {len(rest)} smaller ones, {size}; detail='operations' shows all")
    return lines


def _row(group: Sequence[_Crossing]) -> tuple[str, ...]:
    first = group[0]
    destinations = sorted({c.destination for c in group})
    to = str(first.destination) if len(destinations) == 1 else f"{len(destinations)} workers"
    what = first.what
    if len(group) > len(destinations):
        what += f" and {len(group) - 1} more like it"
    there, back = sum(c.there for c in group), sum(c.back for c in group)
    return what, str(first.source), to, human_bytes(there), human_bytes(back) if back else ""


def _crossings(plan: PartitionPlan, *, is_state: bool) -> list[_Crossing]:
    """One crossing for each value edge, its gradients put to it."""
    nodes, read = plan.placed.graph.nodes, values_read(plan)
    found: dict[tuple[int, int, int], _Crossing] = {}
    others: list[_Crossing] = []
    for edge in plan.edges:
        about_state = nodes[edge.value].is_state and edge.kind not in _OF_ALL
        if about_state != is_state or edge.kind in _GRADIENTS:
            continue
        for value in edge.values:
            meta = (nodes[value].meta or edge.meta) if edge.members else edge.meta
            what = what_crosses(plan, replace(edge, value=value, members=()), read)
            crossing = _Crossing(what, edge.source, edge.destination, meta.size_bytes)
            if edge.kind is EdgeKind.VALUE:
                found[value, edge.source, edge.destination] = crossing
            else:
                others.append(crossing)
    for edge in plan.edges:
        if nodes[edge.value].is_state != is_state or edge.kind not in _GRADIENTS:
            continue
        members = plan.members_of(edge.value)
        for value in members:
            meta = plan.block_meta(value) if len(members) > 1 else edge.meta
            one = replace(edge, value=value, meta=meta)
            key = (value, edge.destination, edge.source)
            if key in found:
                found[key].back += one.meta.size_bytes
            else:
                what, size = what_crosses(plan, one, read), one.meta.size_bytes
                others.append(_Crossing(what, edge.destination, edge.source, 0, size))
    return [*found.values(), *others]


def pair_lines(plan: PartitionPlan) -> list[str]:
    """Totals for each pair of workers between which something crosses."""
    pairs: dict[tuple[int, int], list[int]] = {}
    for edge in plan.edges:
        low, high = sorted((edge.source, edge.destination))
        totals = pairs.setdefault((low, high), [0, 0, 0, 0])
        is_up = edge.source == low
        totals[0 if is_up else 2] += 1
        totals[1 if is_up else 3] += edge.meta.size_bytes
    if not pairs:
        return []
    largest = sorted(pairs, key=lambda pair: -pairs[pair][1] - pairs[pair][3])
    rows: list[tuple[str, ...]] = [("workers", "->", "bytes", "<-", "bytes")]
    for pair in sorted(largest[:_MAX_PAIRS]):
        there, there_bytes, back, back_bytes = pairs[pair]
        rows.append(
            (
                f"{pair[0]} and {pair[1]}",
                f"{there} edge{'' if there == 1 else 's'}",
                human_bytes(there_bytes),
                f"{back} edge{'' if back == 1 else 's'}",
                human_bytes(back_bytes),
            )
        )
    lines = align(rows, right=frozenset({1, 2, 3, 4}))
    if len(largest) > _MAX_PAIRS:
        size = sum(pairs[pair][1] + pairs[pair][3] for pair in largest[_MAX_PAIRS:])
        lines.append(f"... and {len(largest) - _MAX_PAIRS} more pairs, {human_bytes(size)}")
    return lines


def route_lines(routes: Mapping[tuple[int, int], tuple[str, str]]) -> list[str]:
    """Which transport connects which pairs, and why; pairs with the same answer in one line."""
    alike: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for pair, route in sorted(routes.items()):
        alike.setdefault(route, []).append(pair)
    if not alike:
        return []
    rows = [("transport", "workers", "why")]
    for (transport, reason), pairs in alike.items():
        shown = [f"{low} and {high}" for low, high in pairs[:_MAX_ROUTES]]
        if len(pairs) > _MAX_ROUTES:
            shown.append(f"{len(pairs) - _MAX_ROUTES} more pairs")
        rows.append((transport, ", ".join(shown), reason))
    return align(rows)


def borrowed_lines(plan: PartitionPlan) -> list[str]:
    """Parameters and buffers that a worker reads though another one owns them."""
    crossings = sorted(_crossings(plan, is_state=True), key=lambda c: -c.there - c.back)
    if not crossings:
        return []
    rows = [("what", "owner", "borrower", "forward", "backward")]
    rows += [
        (
            c.what.removeprefix("borrowed ") or ROOT,
            str(c.source),
            str(c.destination),
            human_bytes(c.there),
            human_bytes(c.back) if c.back else "",
        )
        for c in crossings[:_MAX_BORROWED]
    ]
    lines = align(rows, right=frozenset({3, 4}))
    if len(crossings) > _MAX_BORROWED:
        size = human_bytes(sum(c.there + c.back for c in crossings[_MAX_BORROWED:]))
        lines.append(f"... and {len(crossings) - _MAX_BORROWED} more, {size}")
    return lines


def gradient_lines(plan: PartitionPlan) -> list[str]:
    """The bytes of gradients that each replica sends, by both orders of sums."""
    if plan.exchange is Exchange.LATER and plan.blocks:
        return ["nothing with this batch: they are kept, and sent once after the step's last one"]
    rows = [("worker", 'gradient_order="left"', '"pairs"')]
    for worker, (left, pairs) in sorted(sent_per_step(plan).items()):
        rows.append((str(worker), human_bytes(left), human_bytes(pairs)))
    return align(rows, right=frozenset({1, 2})) if len(rows) > 1 else []
