"""One Python state, one truth: calls kept whole that share it must run on one worker, in order.

Every worker is a process, with Python objects of its own. A counter that two calls keep would be two
counters; and where several microbatches are under way, two calls in different segments would not
find it as the plain loop leaves it. What was seen to change when a plan was made is refused here;
what changes only later is refused when it does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from graphsplit.capture.opaque import ONE_STATE, OpaqueCall
from graphsplit.capture.python_state import NUMPYS, PYTHONS, Holder
from graphsplit.errors import PlacementError
from graphsplit.partition.plan import PartitionPlan

_OF_THE_PROCESS = (id(PYTHONS), id(NUMPYS))


def refuse_shared_state(plan: PartitionPlan) -> None:
    """Refuse calls kept whole that share changing Python state, but do not run in one order.

    Raises:
        PlacementError: Names both lines, and the state.
    """
    calls = _calls(plan)
    for (first, one), (second, two) in itertools.combinations(calls, 2):
        if _is_in_order(plan, first, second):
            continue
        for key in one.reached.holders.keys() & two.reached.holders.keys():
            holder = one.reached.holders[key]
            changes = key in one.reached.changed or key in two.reached.changed
            is_own = holder.is_generator and key not in _OF_THE_PROCESS
            if (changes or is_own) and not _travels(plan, key):
                raise _refusal(plan, holder, one, two)
    _refuse_drawing_in_microbatches(plan, calls)


def shared_elsewhere(plan: PartitionPlan, position: int) -> Iterator[tuple[Holder, str]]:
    """Python state of a call that calls in another order, or elsewhere, can reach as well."""
    calls = dict(_calls(plan))
    mine = calls.pop(position).reached.holders
    found: dict[Any, str] = {}
    for other, call in calls.items():
        if not _is_in_order(plan, *sorted((position, other))):
            for key in mine.keys() & call.reached.holders.keys():
                found.setdefault(key, call.source)
    if plan.is_microbatched and plan.num_workers > 1:
        found.update({k: "(its state on the other workers)" for k in _OF_THE_PROCESS if k in mine})
    for key, source in found.items():
        if not _travels(plan, key):
            yield mine[key], source


def _calls(plan: PartitionPlan) -> list[tuple[int, OpaqueCall]]:
    graph = plan.placed.graph
    return [
        (graph.positions[node.name], node.target)
        for node in graph.fx_graph.nodes
        if isinstance(node.target, OpaqueCall)
    ]


def _is_in_order(plan: PartitionPlan, first: int, second: int) -> bool:
    """Whether two calls share a worker, and run there as in the plain loop."""
    one, two = (plan.segments[plan.segmentation.segment_of[p]] for p in (first, second))
    if one.index == two.index:
        return True
    return one.worker == two.worker and one.level < two.level and not plan.is_microbatched


def _travels(plan: PartitionPlan, key: object) -> bool:
    return key in _OF_THE_PROCESS and not plan.is_microbatched


def _refuse_drawing_in_microbatches(
    plan: PartitionPlan, calls: list[tuple[int, OpaqueCall]]
) -> None:
    """Refuse draws whose state would not be on every worker after the step."""
    if not plan.is_microbatched or plan.num_workers == 1:
        return
    for _, call in calls:
        for key in _OF_THE_PROCESS:
            if key in call.reached.changed:
                raise PlacementError(
                    f"{call.label} draws from {call.reached.holders[key].name}, and there are "
                    f"several microbatches; the other workers would not know what it has drawn\n"
                    f"  {call.source}\n"
                    f"  Fix: draw with torch, or with one microbatch."
                )


def _refusal(
    plan: PartitionPlan, holder: Holder, one: OpaqueCall, two: OpaqueCall
) -> PlacementError:
    return PlacementError(
        f"{one.label} and {two.label} share {holder.name}, which changes when they run, but they run "
        f"{'in several microbatches at once' if plan.is_microbatched else 'on several workers'}, or "
        f"in another order than in one process\n  {one.source}\n  {two.source}\n"
        f"  Fix: {ONE_STATE}"
    )
