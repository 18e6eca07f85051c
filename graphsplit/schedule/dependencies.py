"""The order between segments' forwards and backwards, whatever that of microbatches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from graphsplit.capture.graph import NodeKind
from graphsplit.partition.plan import PartitionPlan, SumTerm


@dataclass(frozen=True)
class Dependencies:
    """Which segments' computations come before which, within a microbatch and between two.

    Attributes:
        forward: For each segment, those whose forward its own forward waits for.
        backward: For each segment, those whose backward its own backward waits for; None where it
            has no backward. Its own forward comes before it in any case.
        accumulate: For each parameter whose gradient is summed, the segments whose backward makes
            its terms. Its worker adds them up.
        next_microbatch: Pairs of segments: the first one's forward must be done for a microbatch
            before the second one's begins for the next, as both touch memory that is modified in
            place.
    """

    forward: tuple[frozenset[int], ...]
    backward: tuple[frozenset[int] | None, ...]
    accumulate: dict[int, frozenset[int]]
    next_microbatch: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, plan: PartitionPlan) -> Dependencies:
        """The dependencies of a plan's segments."""
        return cls(_forward(plan), _backward(plan), _accumulate(plan), _next_microbatch(plan))


def _forward(plan: PartitionPlan) -> tuple[frozenset[int], ...]:
    segment_of = plan.segmentation.segment_of
    found: list[set[int]] = []
    for io in plan.io:
        reads = (*io.values, *(plan.contributions[c].value for c in io.leaves))
        found.append({segment_of[value] for value in reads})
    nodes = plan.placed.graph.nodes
    for segment in plan.segments:
        for position in segment.nodes:
            found[segment.index].update(segment_of[p] for p in nodes[position].runs_after)
    for users in _users_of_modified(plan).values():
        worker = plan.segments[users[-1]].worker
        here = [index for index in users if plan.segments[index].worker == worker]
        found[here[-1]].update(here)
    for before, after in plan.random_hops:
        found[segment_of[after]].add(segment_of[before])
    return tuple(frozenset(before - {-1, index}) for index, before in enumerate(found))


def _backward(plan: PartitionPlan) -> tuple[frozenset[int] | None, ...]:
    found: list[frozenset[int] | None] = []
    for index, io in enumerate(plan.io):
        if not plan.placed.graph.has_gradients or not (io.roots or io.leaves):
            found.append(None)
            continue
        sums = [plan.gradient_sums.get(root, ()) for root in io.roots]
        sums += [plan.seeds.get(leaf, ()) for leaf in io.leaves]
        before = _contributing(plan, itertools.chain.from_iterable(sums))
        found.append(frozenset(before - {index}))
    return tuple(found)


def _contributing(plan: PartitionPlan, terms: Iterable[SumTerm]) -> set[int]:
    """The segments whose backward makes the terms of a sum."""
    contributions: set[int] = set()
    for term in terms:
        if term.edge is not None:
            contributions.update(plan.edges[term.edge].contributions)
        elif term.contribution is not None:
            contributions.add(term.contribution)
    return {plan.contributions[c].segment for c in contributions}


def _accumulate(plan: PartitionPlan) -> dict[int, frozenset[int]]:
    nodes = plan.placed.graph.nodes
    return {
        value: frozenset(_contributing(plan, terms))
        for value, terms in plan.gradient_sums.items()
        if nodes[value].kind is not NodeKind.OPERATION
    }


def _next_microbatch(plan: PartitionPlan) -> tuple[tuple[int, int], ...]:
    pairs: dict[tuple[int, int], None] = {}
    for users in _users_of_modified(plan).values():
        *others, last = users
        pairs.update(dict.fromkeys((last, other) for other in others))
    return tuple(pairs)


def _users_of_modified(plan: PartitionPlan) -> dict[int, list[int]]:
    """For each value that is modified in place, the segments that read or write its memory.

    The last one is the last that modifies it, if another one does not run after it there.
    """
    workers, segment_of = plan.placed.workers, plan.segmentation.segment_of
    users = {  # segments are numbered by rising level
        value: sorted({segment_of[position] for position in positions})
        for value, positions in plan.placed.graph.touching.items()
    }
    for value, found in users.items():
        # Readers elsewhere get a copy of the microbatch's own; only the owner changes the memory.
        found.sort(key=lambda index: plan.segments[index].worker == workers[value])
    return users
