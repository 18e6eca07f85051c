"""The verifier of plans notices what graphsplit itself must never do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from pass_helpers import Op, placed_graph

from graphsplit.errors import InvariantError
from graphsplit.partition.checks.sound import verify
from graphsplit.partition.edges import partition
from graphsplit.partition.plan import EdgeKind, PartitionPlan, SumTerm
from graphsplit.partition.segments import Segment


def sound() -> PartitionPlan:
    ops = {
        "a": Op(0, ("x", "w"), is_random=True),
        "b": Op(1, ("a",), is_random=True),
        "c": Op(0, ("a", "b")),
    }
    return partition(placed_graph(ops, parameters={"w": 0}))


def with_segments(plan: PartitionPlan, *segments: Segment) -> PartitionPlan:
    return replace(plan, segmentation=replace(plan.segmentation, segments=segments))


def without(plan: PartitionPlan, kind: EdgeKind) -> PartitionPlan:
    index = next(e.index for e in plan.edges if e.kind is kind)
    return replace(plan, edges=tuple(e for e in plan.edges if e.index != index))


def an_operation_in_no_segment(plan: PartitionPlan) -> PartitionPlan:
    first, *rest = plan.segments
    return with_segments(plan, replace(first, nodes=()), *rest)


def an_operation_in_two_segments(plan: PartitionPlan) -> PartitionPlan:
    *rest, last = plan.segments
    return with_segments(plan, *rest, replace(last, nodes=plan.segments[0].nodes + last.nodes))


def an_operation_on_the_wrong_worker(plan: PartitionPlan) -> PartitionPlan:
    first, *rest = plan.segments
    return with_segments(plan, replace(first, worker=1), *rest)


def a_circle_of_segments(plan: PartitionPlan) -> PartitionPlan:
    first, second, last = plan.segments
    a, b, c = first.nodes[0], second.nodes[0], last.nodes[0]
    segment_of = [-1] * len(plan.placed.graph.nodes)
    segment_of[a], segment_of[b], segment_of[c] = 0, 1, 0
    broken = with_segments(plan, replace(first, nodes=(a, c)), second)
    return replace(broken, segmentation=replace(broken.segmentation, segment_of=tuple(segment_of)))


def a_level_that_falls(plan: PartitionPlan) -> PartitionPlan:
    first, second, last = plan.segments
    return with_segments(plan, first, replace(second, level=7), last)


def a_parameter_without_a_worker(plan: PartitionPlan) -> PartitionPlan:
    x, _, *rest = plan.placed.workers
    return replace(plan, placed=replace(plan.placed, workers=(x, 9, *rest)))


def a_value_that_is_not_sent(plan: PartitionPlan) -> PartitionPlan:
    return without(plan, EdgeKind.VALUE)


def a_value_that_is_sent_twice(plan: PartitionPlan) -> PartitionPlan:
    return replace(plan, edges=(*plan.edges, replace(plan.edges[0], index=len(plan.edges))))


def a_gradient_that_is_not_sent(plan: PartitionPlan) -> PartitionPlan:
    return without(plan, EdgeKind.GRADIENT)


def a_gradient_that_is_not_summed(plan: PartitionPlan) -> PartitionPlan:
    edge = next(e for e in plan.edges if e.kind is EdgeKind.GRADIENT)
    kept = tuple(t for t in plan.gradient_sums[edge.value] if t.edge != edge.index)
    return replace(plan, gradient_sums={**plan.gradient_sums, edge.value: kept})


def a_gradient_that_is_summed_twice(plan: PartitionPlan) -> PartitionPlan:
    edge = next(e for e in plan.edges if e.kind is EdgeKind.GRADIENT)
    twice = (*plan.gradient_sums[edge.value], SumTerm(edge=edge.index))
    return replace(plan, gradient_sums={**plan.gradient_sums, edge.value: twice})


def a_contribution_of_another_value(plan: PartitionPlan) -> PartitionPlan:
    first, *rest = plan.contributions
    return replace(plan, contributions=(replace(first, value=0), *rest))


def a_generator_state_that_is_not_handed_on(plan: PartitionPlan) -> PartitionPlan:
    return without(plan, EdgeKind.GENERATOR)


DAMAGES = [
    (an_operation_in_no_segment, "operation a lies in no segment"),
    (an_operation_in_two_segments, "node 2 lies in two segments"),
    (an_operation_on_the_wrong_worker, "node 2 is astray"),
    (a_circle_of_segments, "cycle"),
    (a_level_that_falls, "segment 1 does not come before 2"),
    (a_parameter_without_a_worker, "w has no worker"),
    (a_value_that_is_not_sent, "value 2 does not reach worker 1"),
    (a_value_that_is_sent_twice, "a value goes to one worker twice"),
    (a_gradient_that_is_not_sent, "a gradient is lost"),
    (a_gradient_that_is_not_summed, "a gradient that arrives is not summed"),
    (a_gradient_that_is_summed_twice, "a gradient that arrives is not summed"),
    (a_contribution_of_another_value, None),
    (a_generator_state_that_is_not_handed_on, "the generator's state goes astray"),
]


def test_a_sound_plan_passes() -> None:
    verify(sound())


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=lambda d: getattr(d, "__name__", ""))
def test_damage_is_noticed(damage: Callable[[PartitionPlan], PartitionPlan], message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        verify(damage(sound()))
