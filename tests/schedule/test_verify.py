"""Programs that could wait for ever are found out before they run, with a message to read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_helpers import Op, placed_graph, placed_graphs

from graphsplit.errors import ScheduleError
from graphsplit.partition.edges import partition
from graphsplit.partition.plan import PartitionPlan
from graphsplit.placement.resolve import PlacedGraph
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.program.lower import WorkerProgram, lower
from graphsplit.schedule.gpipe import gpipe
from graphsplit.schedule.verify import verify_programs


def programs_of(*texts: Sequence[str]) -> tuple[WorkerProgram, ...]:
    return tuple(
        WorkerProgram(worker, 1, tuple(map(Instruction.parse, lines)))
        for worker, lines in enumerate(texts)
    )


def there_and_back() -> PartitionPlan:
    """Edge 0 goes from worker 0 to 1, edge 1 from 1 to 0, edge 2 (the loss) from 0 to 1."""
    ops = {name: replace(op, requires_grad=False) for name, op in _OPS.items()}
    return partition(placed_graph(ops))


_OPS = {"a": Op(0, ("x",)), "b": Op(1, ("a",)), "c": Op(0, ("b",))}


def test_sound_programs_pass() -> None:
    plan = there_and_back()
    verify_programs(plan, lower(plan, gpipe, num_microbatches=2))


def finishes(plan: PartitionPlan, programs: Sequence[WorkerProgram], depth: int) -> bool:
    """Run the programs one instruction at a time; whether all come to their end."""
    channels: dict[int, deque[int]] = {edge.index: deque() for edge in plan.edges}
    at = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for worker, program in enumerate(programs):
            while at[worker] < len(program.instructions):
                instruction = program.instructions[at[worker]]
                channel = channels.get(instruction.operand, deque())
                if instruction.opcode is Opcode.SEND:
                    if len(channel) == depth:
                        break
                    channel.append(instruction.microbatch)
                elif instruction.opcode is Opcode.RECEIVE:
                    if not channel:
                        break
                    assert channel.popleft() == instruction.microbatch
                at[worker] += 1
                moved = True
    return all(at[w] == len(p.instructions) for w, p in enumerate(programs))


@settings(max_examples=60, deadline=None)
@given(placed_graphs(), st.integers(1, 4), st.integers(1, 2))
def test_gpipe_on_any_plan_is_judged_as_running_it_shows(
    graph: PlacedGraph, num_microbatches: int, depth: int
) -> None:
    plan = partition(graph)
    programs = lower(plan, gpipe, num_microbatches=num_microbatches)
    try:
        verify_programs(plan, programs, depth=depth)
    except ScheduleError:
        assert not finishes(plan, programs, depth)
    else:
        assert finishes(plan, programs, depth)


@settings(max_examples=60, deadline=None)
@given(placed_graphs())
def test_with_one_microbatch_every_plan_is_free_of_deadlock(graph: PlacedGraph) -> None:
    plan = partition(graph)
    verify_programs(plan, lower(plan, gpipe), depth=1)


def test_a_message_that_nobody_receives_is_found() -> None:
    plan = there_and_back()
    programs = programs_of(
        ["SEND mb0 edge0", "RECEIVE mb0 edge1", "SEND mb0 edge2"],
        ["SEND mb0 edge1", "RECEIVE mb0 edge2"],
    )
    with pytest.raises(ScheduleError) as caught:
        verify_programs(plan, programs)
    assert str(caught.value) == "edge0: worker 0 sends microbatches [0], worker 1 receives []"


def test_a_message_that_nobody_sends_is_found() -> None:
    plan = there_and_back()
    programs = programs_of(
        ["RECEIVE mb0 edge1", "SEND mb0 edge2"],
        ["RECEIVE mb0 edge0", "SEND mb0 edge1", "RECEIVE mb0 edge2"],
    )
    with pytest.raises(ScheduleError, match="edge0 is never sent"):
        verify_programs(plan, programs)


def test_an_edge_left_out_at_both_ends_is_found() -> None:
    plan = there_and_back()
    programs = programs_of(
        ["SEND mb0 edge0", "RECEIVE mb0 edge1"], ["RECEIVE mb0 edge0", "SEND mb0 edge1"]
    )
    with pytest.raises(ScheduleError, match="edge2 is never sent"):
        verify_programs(plan, programs)


def test_two_messages_received_in_another_order_than_sent_are_found() -> None:
    plan = there_and_back()
    first, second = lower(plan, gpipe, num_microbatches=2)
    swap = {"RECEIVE mb0 edge0": "RECEIVE mb1 edge0", "RECEIVE mb1 edge0": "RECEIVE mb0 edge0"}
    swapped = [swap.get(str(i), str(i)) for i in second.instructions]
    programs = (first, replace(programs_of([], swapped)[1], num_microbatches=2))
    with pytest.raises(ScheduleError) as caught:
        verify_programs(plan, programs)
    assert (
        str(caught.value) == "edge0: worker 0 sends microbatches [0, 1], worker 1 receives [1, 0]"
    )


def test_a_message_of_the_wrong_worker_is_found() -> None:
    plan = there_and_back()
    programs = programs_of(["RECEIVE mb0 edge0"], [])
    with pytest.raises(ScheduleError) as caught:
        verify_programs(plan, programs)
    assert str(caught.value) == (
        "worker 0 runs 'RECEIVE mb0 edge0', but that edge goes from worker 0 to worker 1"
    )


def test_a_circle_of_waits_is_printed() -> None:
    plan = there_and_back()
    programs = programs_of(
        ["RECEIVE mb0 edge1", "SEND mb0 edge0", "SEND mb0 edge2"],
        ["RECEIVE mb0 edge0", "SEND mb0 edge1", "RECEIVE mb0 edge2"],
    )
    with pytest.raises(ScheduleError) as caught:
        verify_programs(plan, programs)
    assert str(caught.value) == (
        "the programs wait for each other in a circle:\n"
        "  worker 0 #0: RECEIVE mb0 edge1  (then)\n"
        "  worker 0 #1: SEND mb0 edge0  (is waited for by worker 1)\n"
        "  worker 1 #0: RECEIVE mb0 edge0  (then)\n"
        "  worker 1 #1: SEND mb0 edge1  (is waited for by worker 0)"
    )
    assert not finishes(plan, programs, depth=9)


def test_a_circle_through_a_full_channel_depends_on_its_depth() -> None:
    plan = there_and_back()
    programs = programs_of(
        ["SEND mb0 edge0", "SEND mb1 edge0", "SEND mb0 edge2", "RECEIVE mb0 edge1"],
        ["RECEIVE mb0 edge2", "RECEIVE mb0 edge0", "RECEIVE mb1 edge0", "SEND mb0 edge1"],
    )
    verify_programs(plan, programs, depth=2)
    with pytest.raises(ScheduleError) as caught:
        verify_programs(plan, programs, depth=1)
    assert "worker 1 #1: RECEIVE mb0 edge0  (is waited for by worker 0)" in str(caught.value)
    assert finishes(plan, programs, depth=2)
    assert not finishes(plan, programs, depth=1)
