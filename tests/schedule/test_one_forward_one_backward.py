"""1F1B: backward as soon as it can run, few microbatches under way, for any graph."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_helpers import Op, lenet_plan, placed_graph, placed_graphs

from graphsplit.partition.edges import partition
from graphsplit.partition.plan import PartitionPlan
from graphsplit.placement.resolve import PlacedGraph
from graphsplit.program.depths import channel_depths
from graphsplit.program.instruction import Opcode
from graphsplit.program.lower import lower
from graphsplit.program.proof import verify_programs
from graphsplit.schedule.named import gpipe, one_forward_one_backward


def chain(*workers: int) -> PartitionPlan:
    """One operation after the other, on the given workers."""
    names = ["x", *(f"op{i}" for i in range(len(workers)))]
    ops = {
        name: Op(worker, (before, f"w{i}"))
        for i, (worker, before, name) in enumerate(zip(workers, names, names[1:], strict=False))
    }
    parameters = {f"w{i}": worker for i, worker in enumerate(workers)}
    return partition(placed_graph(ops, parameters=parameters))


def text(plan: PartitionPlan, worker: int, num_microbatches: int) -> str:
    names = {Opcode.FORWARD: "F", Opcode.BACKWARD: "B"}
    order = one_forward_one_backward(plan, num_microbatches)[worker]
    return " ".join(f"{names[i.opcode]}{i.microbatch}" for i in order)


def test_a_straight_pipeline_runs_as_published() -> None:
    plan = chain(0, 1, 2)
    assert text(plan, 0, 5) == "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"
    assert text(plan, 1, 5) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"
    assert text(plan, 2, 5) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"


@pytest.mark.parametrize("num_microbatches", [1, 2, 7, 32])
@pytest.mark.parametrize("workers", [(0, 1, 2), (0, 1, 0), (1, 0, 2, 0, 1, 2), (0, 0), (2, 0)])
def test_what_is_under_way_does_not_grow_with_the_microbatches(
    workers: tuple[int, ...], num_microbatches: int
) -> None:
    plan = chain(*workers)
    for order in one_forward_one_backward(plan, num_microbatches):
        left: Counter[int] = Counter(i.microbatch for i in order)
        begun: set[int] = set()
        for instruction in order:
            begun.add(instruction.microbatch)
            under_way = sum(left[m] > 0 for m in begun)
            assert under_way <= len(workers)
            left[instruction.microbatch] -= 1


def check(plan: PartitionPlan, num_microbatches: int) -> None:
    """The same computations as GPipe, microbatches in order, and programs that pass the proof."""
    orders = one_forward_one_backward(plan, num_microbatches)
    for worker, order in enumerate(orders):
        assert Counter(order) == Counter(gpipe(plan, num_microbatches)[worker])
        for operand in {(i.opcode, i.operand) for i in order}:
            met = [i.microbatch for i in order if (i.opcode, i.operand) == operand]
            assert met == list(range(num_microbatches))
    programs = lower(plan, one_forward_one_backward, num_microbatches=num_microbatches)
    verify_programs(plan, programs, depths=channel_depths(programs))


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 32])
def test_lenet_on_five_workers(num_microbatches: int) -> None:
    check(lenet_plan(), num_microbatches)


@settings(max_examples=60, deadline=None)
@given(placed=placed_graphs(), num_microbatches=st.sampled_from([1, 2, 3, 5, 9, 16]))
def test_any_graph_any_placement(placed: PlacedGraph, num_microbatches: int) -> None:
    check(partition(placed), num_microbatches)
