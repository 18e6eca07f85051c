"""Programs that could wait for ever are found out before they run, with a message to read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_helpers import Op, placed_graph, placed_graphs

from graphsplit.capture.graph import NodeKind
from graphsplit.errors import ScheduleError
from graphsplit.partition.edges import partition
from graphsplit.partition.plan import PartitionPlan
from graphsplit.placement.resolve import PlacedGraph
from graphsplit.program.depths import channel_depths
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.program.lower import WorkerProgram, lower
from graphsplit.program.proof import draw_circle, verify_programs
from graphsplit.schedule.named import gpipe


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


@settings(max_examples=100, deadline=None)
@given(placed_graphs(), st.integers(2, 32))
def test_with_many_microbatches_every_plan_is_free_of_deadlock(
    graph: PlacedGraph, num_microbatches: int
) -> None:
    plan = partition(graph, is_microbatched=True)
    programs = lower(plan, gpipe, num_microbatches=num_microbatches)
    depths = channel_depths(programs)
    verify_programs(plan, programs, depths=depths)
    assert max(depths.values(), default=2) <= num_microbatches


def test_what_is_modified_in_place_meets_microbatches_in_order() -> None:
    graph = placed_graph({"a": Op(0, ("x", "w"))}, parameters={"w": 0})
    nodes = [
        replace(n, kind=NodeKind.BUFFER, requires_grad=False) if n.is_state else n
        for n in graph.graph.nodes
    ]
    (state,) = (p for p, n in enumerate(nodes) if n.is_state)
    nodes[-1] = replace(nodes[-1], changes_inputs=True, shares_modified=((state, True),))
    plan = partition(replace(graph, graph=replace(graph.graph, nodes=tuple(nodes))))
    (program,) = programs_of(["FORWARD mb1 seg0", "FORWARD mb0 seg0"])
    with pytest.raises(ScheduleError, match="'FORWARD mb0 seg0' after microbatch 1 has modified w"):
        verify_programs(plan, [replace(program, num_microbatches=2)])


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
        "  worker 1 #1: SEND mb0 edge1  (is waited for by worker 0)\n"
        "each is stopped at its first instruction; '--> n' is what worker n waits for:\n"
        "  time      now                then\n"
        "  worker 0  RECEIVE mb0 edge1  SEND mb0 edge0 --> 1\n"
        "  worker 1  RECEIVE mb0 edge0  SEND mb0 edge1 --> 0"
    )
    assert not finishes(plan, programs, depth=9)


def test_of_a_long_circle_both_ends_are_printed() -> None:
    names = ["x", *(f"op{i}" for i in range(20))]
    ops = {names[i + 1]: Op(i % 2, (names[i],), requires_grad=False) for i in range(20)}
    plan = partition(placed_graph(ops))
    first, second = lower(plan, gpipe)
    zero, forward, send, *rest = first.instructions
    assert str(send) == "SEND mb0 edge0"
    sent_last = replace(first, instructions=(zero, forward, *rest, send))
    with pytest.raises(ScheduleError) as caught:
        verify_programs(plan, [sent_last, second])
    num = len(first.instructions)
    lines = str(caught.value).splitlines()
    assert lines[1:-4] == [
        "  worker 0 #2: RECEIVE mb0 edge1  (then)",
        "  worker 0 #3: FORWARD mb0 seg2  (then)",
        "  worker 0 #4: SEND mb0 edge2  (then)",
        f"  worker 0 ... {num - 8} more instructions  (then)",
        f"  worker 0 #{num - 3}: {first.instructions[-2]}  (then)",
        f"  worker 0 #{num - 2}: {first.instructions[-1]}  (then)",
        f"  worker 0 #{num - 1}: SEND mb0 edge0  (is waited for by worker 1)",
        "  worker 1 #1: RECEIVE mb0 edge0  (then)",
        "  worker 1 #2: FORWARD mb0 seg1  (then)",
        "  worker 1 #3: SEND mb0 edge1  (is waited for by worker 0)",
    ]
    assert [" ".join(line.split()) for line in lines[-2:]] == [
        f"worker 0 RECEIVE mb0 edge1 FORWARD mb0 seg2 ... {num - 6} more {first.instructions[-1]} "
        f"SEND mb0 edge0 --> 1",
        "worker 1 RECEIVE mb0 edge0 FORWARD mb0 seg1 SEND mb0 edge1 --> 0",
    ]


def test_of_a_circle_of_many_workers_the_first_and_the_last_are_drawn() -> None:
    waits = tuple(map(Instruction.parse, ["RECEIVE mb0 edge1", "SEND mb0 edge2"]))
    lines = draw_circle([(worker, waits) for worker in range(20)])
    assert [line.split("  ")[1].strip() for line in lines[2:]] == [
        *(f"worker {worker}" for worker in range(7)),
        "... 12 more workers",
        "worker 19",
    ]


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
