"""One Python state, one truth: calls kept whole that share it must run on one worker, in order.

Every worker is a process, with Python objects of its own. A counter that two calls keep would be
two counters; and where several microbatches are under way, two calls in different segments would
not find it as the plain loop leaves it. What was seen to change when a plan was made is refused
here; what changes only later is refused when it does.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Set
from typing import Any

from graphsplit.capture.graph import NodeKind
from graphsplit.capture.operations.opaque_call import ONE_STATE, OpaqueCall
from graphsplit.capture.reach.holders import OF_THE_PROCESS, Holder
from graphsplit.capture.reach.state import Reached
from graphsplit.capture.reach.ways import Ways
from graphsplit.errors import PlacementError
from graphsplit.partition.plan import PartitionPlan
from graphsplit.torch_ext.attributes import BACKWARD_HOOKS, FORWARD_HOOKS, TABLES

_TABLES = tuple(f".{kind}" for kind in (*TABLES, *FORWARD_HOOKS, *BACKWARD_HOOKS))


def refuse_shared_state(plan: PartitionPlan) -> None:
    """Refuse calls kept whole that share changing Python state, but do not run in one order.

    Raises:
        PlacementError: Names both lines, and the state.
    """
    calls = opaque_calls(plan)
    for position, call in calls if plan.placed.graph.has_gradients else ():
        if call.reached.uses_gradients:
            _refuse_gradients(plan, position, call)
    for (first, one), (second, two) in itertools.combinations_with_replacement(calls, 2):
        for key in _shared(plan, first, one.reached, second, two.reached):
            holder = one.reached.holders[key]
            changes = key in one.reached.changed or key in two.reached.changed
            is_own = holder.is_generator and key not in OF_THE_PROCESS
            if holder.decides and (changes or is_own) and not _travels(plan, key):
                raise _refusal(plan, holder, one, two)


def _refuse_gradients(plan: PartitionPlan, position: int, call: OpaqueCall) -> None:
    """Refuse a call that reads gradients of parameters, or adds to them, where they are not."""
    graph, workers = plan.placed.graph, plan.placed.workers
    read = [at for at in graph.nodes[position].reads if graph.nodes[at].kind is NodeKind.PARAMETER]
    is_elsewhere = any(workers[at] != workers[position] for at in read)
    if is_elsewhere or plan.is_microbatched:
        how = "on another worker" if is_elsewhere else "in several microbatches at once"
        error = PlacementError(
            f"{call.label} reads gradients of parameters (grad), or adds to them (backward), but "
            f"it runs {how}\n"
            f"  {call.source}\n"
            f"  Fix: place it where its parameters are; or read gradients between steps, and keep "
            f"what counts in an attribute."
        )
        error.may_do_in_turn = not is_elsewhere
        raise error


def shared_elsewhere(
    plan: PartitionPlan, position: int, *, in_backward: bool = False
) -> Iterator[tuple[Holder, str]]:
    """Python state of a call that calls in another order, or elsewhere, can reach as well.

    Args:
        plan: The plan.
        position: The call.
        in_backward: What its hooks and its own backward can reach, not what it reaches when called.
    """
    lane = plan.lane_of(position)
    calls = {at: call for at, call in opaque_calls(plan) if plan.lane_of(at) == lane}
    mine = calls[position].reached
    own = mine.in_backward if in_backward else mine.in_forward
    found: dict[Any, str] = {}
    for other, call in calls.items():
        for key in own & _shared(plan, position, mine, other, call.reached):
            found.setdefault(key, call.source)
    for key, source in found.items():
        if mine.holders[key].decides and not _travels(plan, key):
            yield mine.holders[key], source


def opaque_calls(plan: PartitionPlan) -> list[tuple[int, OpaqueCall]]:
    """The calls kept whole, those on copies of what they write to as well; with their positions.

    In each lane, where there are some.
    """
    graph = plan.placed.graph
    targets = {name: fx_node.target for name, fx_node in graph.fx_nodes.items()}
    found = ((at, targets.get(node.name)) for at, node in enumerate(graph.nodes))
    calls = ((at, getattr(target, "target", target)) for at, target in found)
    return [(at, one) for at, one in calls if isinstance(one, OpaqueCall)]


def reached_on(plan: PartitionPlan, rank: int) -> Iterator[Any]:
    """The keys of the Python state that calls kept whole on one worker can reach."""
    for position, call in opaque_calls(plan):
        if plan.placed.workers[position] == rank:
            yield from call.reached.holders


def reached_apart(plan: PartitionPlan, rank: int) -> Iterator[Any]:
    """The keys of the Python state that calls can reach and a worker's hooks must leave.

    Those on other workers have their own; of the microbatches that run together, some have been
    called already.
    """
    for position, call in opaque_calls(plan):
        if plan.is_microbatched or plan.placed.workers[position] != rank:
            yield from call.reached.holders


def left_by_calls(
    plan: PartitionPlan, owned: Set[Any], ways: Ways | None = None
) -> dict[int, Mapping[str, Holder]]:
    """The Python state that calls kept whole may change, by the worker that runs them, and by name.

    Where code has an operation that writes, this is all that it can reach: what it changes may
    depend on the step. And all generators of the script's own that it can draw from.

    Args:
        plan: The plan.
        owned: Tensors that have owners, by number (``id``): parameters and buffers.
        ways: Names, where one worker has made its plan earlier than another: then all workers that
            run such calls are named, and all ways are known.
    """
    found: dict[int, dict[Any, Holder]] = {}
    for position, call in opaque_calls(plan):
        of_worker = found.setdefault(plan.placed.workers[position], {})
        of_worker.update(call.reached.own_generators())
        if call.reached.may_write or call.reached.changed:
            holders = call.reached.holders.items()
            of_worker.update(
                (key, one)
                for key, one in holders
                if one.is_value or (one.is_tensor and key not in owned)
            )
    of_code = {
        rank: [one for one in holders.values() if not one.name.endswith(_TABLES)]
        for rank, holders in found.items()  # tables hold modules, tensors and hooks
    }
    if ways is not None:
        return {rank: ways.named(holders) for rank, holders in of_code.items()}
    return {rank: _named(holders) for rank, holders in of_code.items() if found[rank]}


def _named(holders: Collection[Holder]) -> dict[str, Holder]:
    """Holders by names of their own, which workers whose like objects lead to them share."""
    total, number = Counter(one.name for one in holders), Counter[str]()
    found = {}
    for one in holders:
        number[one.name] += 1
        found[f"{one.name} ({number[one.name]} of {total[one.name]})"] = one
    return found


def _shared(plan: PartitionPlan, first: int, one: Reached, second: int, two: Reached) -> Set[Any]:
    """Keys of what two calls, or one with itself, can reach in another order than in one process.

    The plain loop runs a microbatch's backward before the next one's forward. Python's and NumPy's
    generators count as one state there: who was seen to draw from one tells where both are.
    """
    if not _is_in_order(plan, *sorted((first, second))):
        common = one.holders.keys() & two.holders.keys()
        tells = one.drew_from_process() and not two.drew_from_process()
        if plan.is_microbatched and two.may_draw_from_process() and not tells:
            common |= one.holders.keys() & OF_THE_PROCESS
        return common
    if plan.is_microbatched and plan.placed.graph.has_gradients:
        return one.in_forward & two.in_backward | one.in_backward & two.in_forward
    return frozenset()


def _is_in_order(plan: PartitionPlan, first: int, second: int) -> bool:
    """Whether two calls share a worker, and run there as in the plain loop."""
    if plan.is_replicated:
        return False
    one, two = (plan.segments[plan.segmentation.segment_of[p]] for p in (first, second))
    if one.index == two.index:
        return True
    return one.worker == two.worker and one.level < two.level and not plan.is_microbatched


def _travels(plan: PartitionPlan, key: object) -> bool:
    return key in OF_THE_PROCESS and not plan.is_microbatched


def _refusal(
    plan: PartitionPlan, holder: Holder, one: OpaqueCall, two: OpaqueCall
) -> PlacementError:
    first = one.label if one is not two else "forward and backward"
    who = f"{first} {'and' if one is not two else 'of'} {two.label}"
    lines = "".join(f"\n  {source}" for source in dict.fromkeys((one.source, two.source)))
    what = holder.name if holder.key in two.reached.holders else "random and numpy.random"
    how = "in several microbatches at once" if plan.is_microbatched else "on several workers"
    error = PlacementError(
        f"{who} share {what}, which changes when they run, but they run {how}"
        f", or in another order than in one process{lines}\n"
        f"  Fix: {ONE_STATE}"
    )
    error.may_do_in_turn = plan.is_microbatched
    return error
