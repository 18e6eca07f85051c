"""What workers tell each other of their measurements, and what follows from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pass_helpers import Op, placed_graph

from graphsplit.encoding.records import to_node, to_text
from graphsplit.errors import ConfigurationError, FrameError
from graphsplit.partition.edges import partition
from graphsplit.profiling.estimate import estimate
from graphsplit.profiling.measurements import (
    Estimate,
    Measurements,
    read_estimate,
    read_measurements,
)
from graphsplit.profiling.pings import clock_offset_ns, link_of
from graphsplit.profiling.recorder import TimedRun
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.program.lower import lower
from graphsplit.schedule.costs import Costs, Host, LinkCost
from graphsplit.schedule.named import gpipe
from graphsplit.schedule.simulation.simulate import simulate
from graphsplit.schedule.simulation.timeline import Span

MS = 1_000_000
PLAN = partition(
    placed_graph({"a": Op(0, ("x", "w")), "b": Op(1, ("a", "v"))}, parameters={"w": 0, "v": 1})
)
PROGRAMS = lower(PLAN, gpipe)
ONE = Measurements(0, "clock", "host", 2, 1, 5, (TimedRun(3, -1, 0, 10, 1, (11, 12), (2, 2)),),
                   {0: 7}, {1: LinkCost(1e-5, 2e9)}, 4096)  # fmt: skip


def test_measurements_read_back_from_their_text() -> None:
    assert read_measurements(to_text(ONE), worker=0, num_instructions=2) == ONE


def changed(**fields: Any) -> str:
    return json.dumps({**to_node(ONE), **fields})


def with_run(**fields: Any) -> str:
    return changed(runs=[{**to_node(ONE.runs[0]), **fields}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "what worker 0 measured is no JSON"),
        ("[]", r"what worker 0 measured is \[\], no object"),
        ("[" * 100_000, "what worker 0 measured is no JSON"),
        (changed(worker=1), "what worker 0 measured: worker is 1"),
        (changed(cores=0), "cores is 0, not 1 to"),
        (changed(cores=True), "cores is True, no int"),
        (changed(cores=[1]), r"cores is \[1\], no int"),
        (changed(host="x" * 300), "host has 300 characters, more than 256"),
        (changed(host=3), "host is 3, no str"),
        (changed(more=1), "more is not expected"),
        (changed(pings=[[1, {"latency_s": float("nan"), "bytes_per_s": 1}]]), "latency_s is nan"),
        (changed(pings=[[1, {"latency_s": 1, "bytes_per_s": 0}]]), "bytes_per_s is 0"),
        (changed(pings=[[1, 0.1, 2]]), "pings is .*, no list of 2 values"),
        (changed(pings=3), "pings is 3, no mapping"),
        (changed(activations=[[0, -5]]), "activations is -5, not 0 to"),
        (changed(activations=[["0", 5]]), "activations is '0', no int"),
        (with_run(ends_ns=[11]), "a run ends 1 of 2 times"),
        (with_run(ends_ns=[11, 10]), "a run goes back in time"),
        (with_run(ends_cpu_ns=[0, 2]), "a run goes back in time"),
        (with_run(ends_ns=[11, "12"]), "an entry of what worker 0 measured: an entry of|ends_ns"),
        (with_run(step=None), "step is None, no int"),
        (changed(runs={}), "runs is {}, no list"),
    ],
)
def test_a_malformed_text_is_refused_and_the_field_is_named(text: str, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        read_measurements(text, worker=0, num_instructions=2)


def test_a_missing_field_is_named() -> None:
    fields = to_node(ONE)
    del fields["clock"]
    with pytest.raises(FrameError, match="what worker 0 measured: clock is missing"):
        read_measurements(json.dumps(fields), worker=0, num_instructions=2)


COSTS = Costs(
    {0: 0.5}, {0: 1.0}, {0: 0.25}, {0: 9}, {(0, 1): LinkCost(1e-5, float("inf"))}, {1: 0.1},
    {2: 0.3}, {2: 0.4}, {(0, Opcode.CLIP, -1): 0.7}, {0: 0.8}, (Host((0, 1), 2),), 4, "by hand",
)  # fmt: skip
TIMELINE = simulate(PLAN, PROGRAMS, replace(COSTS, hosts=()), num_steps=2, leader=0)
ESTIMATE = Estimate(COSTS, TIMELINE, (5, 6))


def test_an_estimate_reads_back_from_its_text() -> None:
    assert read_estimate(to_text(ESTIMATE), PROGRAMS) == ESTIMATE


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("others", [[[0, "JUMP", -1], 0.5]], "the Opcode 'JUMP' is not known"),
        ("others", [[[0, [], -1], 0.5]], r"the Opcode \[\] is not known"),
        ("links", [[[0, 1], {"latency_s": -1.0, "bytes_per_s": 1}]], "latency_s is -1"),
        ("hosts", [{"workers": [0], "cores": 0}], "cores is 0, not 1 to"),
        ("hosts", [{"workers": 0, "cores": 1}], "workers is 0, no list"),
        ("forward", [[0, "1"]], "forward is '1', no float"),
    ],
)
def test_malformed_costs_are_refused(name: str, value: object, message: str) -> None:
    node = to_node(ESTIMATE)
    node["costs"][name] = value
    with pytest.raises(FrameError, match=message):
        read_estimate(json.dumps(node), PROGRAMS)


@pytest.mark.parametrize(
    "span",
    [
        Span(Instruction(Opcode.FORWARD, 99), 0, 0, 1),
        Span(PROGRAMS[0].instructions[0], 1, 0, 2),
        Span(None, 0, float("-inf"), 1),
    ],
)
def test_a_timeline_with_spans_that_cannot_be_is_refused(span: Span) -> None:
    wrong = replace(ESTIMATE, timeline=replace(TIMELINE, workers=((span,), ())))
    with pytest.raises(FrameError, match="the timeline has the span"):
        read_estimate(to_text(wrong), PROGRAMS)
    with pytest.raises(FrameError, match="1 workers are in the timeline"):
        read_estimate(
            to_text(replace(ESTIMATE, timeline=replace(TIMELINE, workers=((),)))), PROGRAMS
        )


def test_the_clocks_difference_is_that_of_the_fastest_round_trip() -> None:
    # b's clock is 1000 ahead. The first trip took long on the way back.
    trips = [(0, 1010, 1020, 900), (2000, 3005, 3006, 2011)]
    assert clock_offset_ns(trips) == -1000


def test_a_link_has_half_a_round_trip_as_latency_and_the_rest_as_bandwidth() -> None:
    link = link_of([20e-6, 22e-6, 18e-6], [1.018e-3, 1.5e-3], 1_000_000)
    assert link.latency_s == pytest.approx(10e-6)
    assert link.bytes_per_s == pytest.approx(2e9)


def test_a_link_that_was_disturbed_has_a_rate_that_can_be() -> None:
    assert link_of([1e-3, 1e-3], [0.9e-3], 1_000_000).bytes_per_s == 1e11


Seconds = Callable[[Any], tuple[int, int]]


def runs_of(worker: int, shift: int = 0, num_steps: int = 4) -> tuple[TimedRun, ...]:
    """Runs made from a simulated step of 20 ms, by a clock that is ``shift`` ahead."""
    known = Costs(
        {0: 0.002, 1: 0.003},
        {0: 0.004, 1: 0.005},
        {},
        links={(0, 1): LinkCost(0.001, float("inf")), (1, 0): LinkCost(0.001, float("inf"))},
        send=dict.fromkeys(range(len(PLAN.edges)), 0.0005),
        optimizer={0: 0.001, 1: 0.001},
    )
    spans = simulate(PLAN, PROGRAMS, known).workers[worker]
    runs = []
    for step in range(num_steps):
        start = shift + step * 20 * MS
        ends = tuple(start + round(span.end_s * 1e9) for span in spans)
        cpu = tuple(_cpu(spans, index) for index in range(len(spans)))
        before = (start - MS, 0) if step else (-1, 0)
        runs.append(TimedRun(step, *before, start, 0, ends, cpu))
    return tuple(runs)


def _cpu(spans: tuple[Span, ...], index: int) -> int:
    return round(sum(span.busy_s for span in spans[: index + 1]) * 1e9)


def measured(worker: int, shift: int = 0, **more: Any) -> Measurements:
    pings = {1: LinkCost(5e-6, 1e9)} if worker == 0 else {}
    fields = {"clock": f"c{shift}", "host": "h", "offset_ns": -shift, **more}
    runs = fields.pop("runs", None) or runs_of(worker, shift)
    return Measurements(
        worker=worker, cores=2, num_threads=1, runs=runs, pings=pings, activations={worker: 64},
        **fields,
    )  # fmt: skip


def test_costs_come_back_from_the_runs_that_they_made() -> None:
    costs, timeline = estimate(PLAN, PROGRAMS, [measured(0), measured(1)], leader=0)
    assert costs.forward == pytest.approx({0: 0.002, 1: 0.003})
    assert costs.backward_input == pytest.approx({0: 0.004, 1: 0.005})
    assert costs.optimizer == pytest.approx({0: 0.001, 1: 0.001})
    assert costs.hosts == (Host((0, 1), 2),)
    assert costs.activations == {0: 64, 1: 64}
    assert costs.links[0, 1].latency_s == pytest.approx(0.001, rel=0.01)
    assert costs.source == "measured over 4 steps"
    assert timeline.step_s == pytest.approx(0.020)
    predicted = simulate(PLAN, PROGRAMS, replace(costs, between={}))
    assert predicted.step_s == pytest.approx(simulate_ends(timeline), rel=0.02)


def simulate_ends(timeline: Any) -> float:
    """How long the programs of a measured step took."""
    begin = timeline.workers[0][0].end_s  # what was between steps
    return float(max(spans[-1].end_s for spans in timeline.workers) - begin)


def test_clocks_that_differ_give_the_same_costs() -> None:
    same = estimate(PLAN, PROGRAMS, [measured(0), measured(1)], leader=0)[0]
    shifted = estimate(PLAN, PROGRAMS, [measured(0), measured(1, shift=77 * MS)], leader=0)[0]
    assert shifted.links == same.links


def test_too_few_steps_are_an_error() -> None:
    few = [measured(0, runs=runs_of(0, num_steps=1)), measured(1)]
    with pytest.raises(ConfigurationError, match=r"1 training step\(s\) were measured.*2 or more"):
        estimate(PLAN, PROGRAMS, few, leader=0)


def test_steps_that_never_follow_each_other_are_timed_from_their_own_beginning() -> None:
    every_second = [measured(w, runs=runs_of(w)[::2]) for w in range(2)]
    _, timeline = estimate(PLAN, PROGRAMS, every_second, leader=0)
    begin = min(m.runs[0].begin_ns for m in every_second)
    end = max(m.runs[0].ends_ns[-1] for m in every_second)
    assert timeline.step_s == pytest.approx((end - begin) * 1e-9)
