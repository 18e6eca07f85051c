"""Predicted steps, compared with what a person draws on paper."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_helpers import Op, placed_graph, placed_graphs

from graphsplit.capture.graph import Mode
from graphsplit.errors import ScheduleError
from graphsplit.partition.edges import partition
from graphsplit.partition.plan import EdgeKind, PartitionPlan
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.program.lower import WorkerProgram, lower
from graphsplit.schedule.costs import Costs, Host, LinkCost
from graphsplit.schedule.named import gpipe, one_forward_one_backward
from graphsplit.schedule.simulation.simulate import Processors, simulate
from graphsplit.schedule.simulation.timeline import Timeline


def chain(length: int, *, mode: Mode = Mode.TRAIN) -> PartitionPlan:
    """One segment with a parameter per worker, in a row."""
    before, ops = "x", {}
    for worker in range(length):
        ops[f"op{worker}"] = Op(worker, (before, f"w{worker}"))
        before = f"op{worker}"
    owners = {f"w{worker}": worker for worker in range(length)}
    return partition(placed_graph(ops, parameters=owners, mode=mode))


def costs(plan: PartitionPlan, forward: float = 1, backward: float = 2, **more: object) -> Costs:
    indices = range(len(plan.segments))
    return Costs(
        dict.fromkeys(indices, forward),
        dict.fromkeys(indices, backward),
        {},
        **more,  # type: ignore[arg-type]
    )


def drawn(timeline: Timeline, *, unit: float = 1.0) -> list[str]:
    """Each worker's compute as a row: a letter per unit, the microbatch's number after the first.

    ``F0`` is a forward of one unit and a bit of space; every unit takes two characters.
    """
    rows = []
    for spans in timeline.workers:
        row = [".."] * round(timeline.step_s / unit)
        for span in spans:
            if span.instruction is None or span.instruction.opcode not in (
                Opcode.FORWARD,
                Opcode.BACKWARD,
            ):
                continue
            name = f"{span.instruction.opcode.value[0]}{span.instruction.microbatch}"
            for at in range(round(span.start_s / unit), round(span.end_s / unit)):
                row[at] = name
        rows.append(" ".join(row))
    return rows


def edge_of(plan: PartitionPlan, kind: EdgeKind, source: int) -> int:
    return next(e.index for e in plan.edges if e.kind is kind and e.source == source)


def test_a_chain_with_gpipe() -> None:
    plan = chain(3)
    programs = lower(plan, gpipe, num_microbatches=2)
    assert drawn(simulate(plan, programs, costs(plan))) == [
        "F0 F1 .. .. .. .. .. .. B0 B0 B1 B1",
        ".. F0 F1 .. .. .. B0 B0 B1 B1 .. ..",
        ".. .. F0 F1 B0 B0 B1 B1 .. .. .. ..",
    ]


def test_a_chain_with_one_forward_one_backward() -> None:
    plan = chain(2)
    programs = lower(plan, one_forward_one_backward, num_microbatches=3)
    timeline = simulate(plan, programs, costs(plan))
    assert drawn(timeline) == [
        "F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2",
        ".. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..",
    ]
    assert timeline.step_s == 12
    assert [timeline.busy_s(worker) for worker in range(2)] == [9, 9]
    assert [timeline.idle_share(worker) for worker in range(2)] == [0.25, 0.25]


def test_branches_run_beside_each_other() -> None:
    ops = {
        "left": Op(0, ("x", "a")),
        "right": Op(1, ("x", "b")),
        "both": Op(0, ("left", "right", "c")),
    }
    plan = partition(placed_graph(ops, parameters={"a": 0, "b": 1, "c": 0}))
    timeline = simulate(plan, lower(plan, gpipe), costs(plan))
    assert drawn(timeline) == [
        "F0 F0 B0 B0 B0 B0",
        "F0 .. .. .. B0 B0",
    ]


def test_a_message_takes_the_time_of_its_link() -> None:
    plan = chain(2)
    size = plan.edges[0].meta.size_bytes  # 2 seconds beside a latency of 1
    links = {pair: LinkCost(1.0, size / 2) for pair in ((0, 1), (1, 0))}
    timeline = simulate(plan, lower(plan, gpipe), costs(plan, links=links))
    backward = next(s for s in timeline.workers[0] if str(s.instruction).startswith("BACKWARD"))
    assert drawn(timeline)[1].startswith(".. .. .. .. F0 B0 B0")
    assert backward.start_s == 1 + 3 + 1 + 2 + 3


def test_sender_and_receiver_are_busy_for_their_part_of_a_message() -> None:
    plan = chain(2, mode=Mode.EVAL)
    edge = edge_of(plan, EdgeKind.VALUE, 0)
    links = {(0, 1): LinkCost(5.0, float("inf"))}
    known = costs(plan, links=links, send={edge: 1.0}, receive={edge: 2.0})
    timeline = simulate(plan, lower(plan, gpipe), known)
    (send,) = (s for s in timeline.workers[0] if str(s.instruction).startswith("SEND"))
    receive = timeline.workers[1][0]
    assert (send.start_s, send.end_s) == (1, 2)
    assert (receive.begin_s, receive.start_s, receive.end_s) == (0, 4, 6)
    assert receive.wait_s == 4


def test_bytes_of_two_messages_share_their_link() -> None:
    plan = chain(2, mode=Mode.EVAL)
    edge = edge_of(plan, EdgeKind.VALUE, 0)
    size = plan.edges[edge].meta.size_bytes
    known = costs(plan, forward=1, links={(0, 1): LinkCost(0.5, size / 4)})
    timeline = simulate(plan, lower(plan, gpipe, num_microbatches=2), known)
    arrivals = [
        s.start_s for s in timeline.workers[1] if str(s.instruction).endswith(f"edge{edge}")
    ]
    assert arrivals == [1 + 4 + 0.5, 1 + 4 + 4 + 0.5]


def test_a_sender_without_room_waits_until_its_receiver_has_taken_a_message() -> None:
    plan = chain(2, mode=Mode.EVAL)
    edge = edge_of(plan, EdgeKind.VALUE, 0)
    known = Costs({0: 1.0, 1: 10.0}, {}, {})
    programs = lower(plan, gpipe, num_microbatches=4)
    timeline = simulate(plan, programs, known, depths={edge: 1, **_deep(plan, edge)})
    sends = [
        (s.begin_s, s.start_s) for s in timeline.workers[0] if str(s.instruction).startswith("SEND")
    ]
    # Taken at 1, 11 and 21: the receiver takes a message when it begins to compute with it.
    assert sends == [(1, 1), (2, 2), (3, 11), (12, 21)]


def _deep(plan: PartitionPlan, but: int) -> dict[int, int]:
    return {edge.index: 8 for edge in plan.edges if edge.index != but}


def test_two_workers_on_one_core_take_turns() -> None:
    ops = {"left": Op(0, ("x", "a")), "right": Op(1, ("x", "b"))}
    ops["both"] = Op(0, ("left", "right", "c"))
    plan = partition(placed_graph(ops, parameters={"a": 0, "b": 1, "c": 0}))
    known = costs(plan, hosts=(Host((0, 1), 1),))
    timeline = simulate(plan, lower(plan, gpipe), known)
    # Forward: both at half speed, 2 seconds. Then 1 + 2 alone, then 2 + 2 at half speed.
    assert timeline.step_s == 2 + 3 + 4
    two_cores = simulate(plan, lower(plan, gpipe), costs(plan, hosts=(Host((0, 1), 2),)))
    assert two_cores.step_s == 1 + 3 + 2


def test_processors_share_evenly_and_end_in_the_order_of_their_work() -> None:
    host = Processors(cores=2)
    for worker, seconds in enumerate((1.0, 2.0, 3.0)):
        host.start(0.0, worker, seconds)
    ends = []
    while (end := host.next_end()) != float("inf"):
        ends.append((host.finish(end), end))
    # Three on two cores at 2/3 speed until 1.5; then two, each on its own.
    assert [worker for worker, _ in ends] == [0, 1, 2]
    assert [end for _, end in ends] == pytest.approx([1.5, 2.5, 3.5])


def test_computations_with_several_threads_fill_the_cores_sooner() -> None:
    host = Processors(cores=4, threads=4)
    host.start(0.0, 0, 1.0)
    host.start(0.0, 1, 1.0)
    assert host.next_end() == 2.0


def test_a_later_step_begins_where_its_workers_were_left() -> None:
    plan = chain(2)
    known = costs(plan, between={0: 1.0, 1: 1.0}, optimizer={0: 1.0, 1: 1.0})
    programs = lower(plan, gpipe)
    alone = simulate(plan, programs, known)
    repeated = simulate(plan, programs, known, num_steps=3, leader=0)
    # Worker 1 is done earlier, and uses the time for its work between steps.
    assert alone.step_s == repeated.step_s == 1 + 1 + 1 + 2 + 2 + 1
    first = repeated.workers[1][0]
    assert first.instruction is None and first.busy_s == 1.0


def test_no_worker_begins_a_step_before_its_leader_has_announced_it() -> None:
    ops = {"left": Op(0, ("x", "a")), "right": Op(1, ("x", "b"))}
    ops["both"] = Op(0, ("left", "right", "c"))
    plan = partition(placed_graph(ops, parameters={"a": 0, "b": 1, "c": 0}))
    known = costs(plan, between={0: 5.0}, links={(0, 1): LinkCost(0.5, float("inf"))})
    free = simulate(plan, lower(plan, gpipe), known)
    led = simulate(plan, lower(plan, gpipe), known, leader=0)
    forwards = [
        next(s.start_s for s in t.workers[1] if str(s.instruction).startswith("FORWARD"))
        for t in (free, led)
    ]
    assert forwards == [0, 5.5]


def test_peak_memory_grows_with_the_microbatches_under_way() -> None:
    plan = chain(3)
    activations = dict.fromkeys(range(3), 1000)
    for policy, expected in ((gpipe, [8, 8, 8]), (one_forward_one_backward, [3, 2, 1])):
        programs = lower(plan, policy, num_microbatches=8)
        found = simulate(plan, programs, costs(plan, activations=activations)).peak_bytes
        assert [size // 1000 for size in found] == expected


def test_programs_that_wait_for_each_other_are_refused() -> None:
    plan = chain(2)
    programs = [
        WorkerProgram(worker, 1, (Instruction.parse(text),))
        for worker, text in enumerate(["RECEIVE mb0 edge1", "RECEIVE mb0 edge0"])
    ]
    with pytest.raises(ScheduleError, match="worker 0 can never run 'RECEIVE mb0 edge1'"):
        simulate(plan, programs, costs(plan))


@settings(max_examples=40, deadline=None)
@given(placed_graphs(), st.integers(1, 5), st.sampled_from([gpipe, one_forward_one_backward]))
def test_any_program_ends_and_no_worker_does_two_things_at_once(
    placed: object, number: int, policy: object
) -> None:
    plan = partition(placed)  # type: ignore[arg-type]
    programs = lower(plan, policy, num_microbatches=number)  # type: ignore[arg-type]
    known = costs(plan, hosts=(Host(tuple(range(plan.num_workers)), 2),))
    timeline = simulate(plan, programs, known, num_steps=2, leader=0)
    for spans, program in zip(timeline.workers, programs, strict=True):
        ran = [span.instruction for span in spans if span.instruction is not None]
        assert ran == list(program.instructions)
        _check_order([(span.begin_s, span.start_s, span.end_s) for span in spans])
    assert all(timeline.busy_s(w) <= timeline.step_s + 1e-9 for w in range(plan.num_workers))


def _check_order(times: Sequence[tuple[float, float, float]]) -> None:
    flat = [moment for span in times for moment in span]
    assert flat == sorted(flat)
