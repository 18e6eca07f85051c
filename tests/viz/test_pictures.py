"""Traces and pictures of timelines."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from pass_helpers import lenet_plan

from graphsplit.program.instruction import Opcode
from graphsplit.program.lower import lower
from graphsplit.schedule.costs import Costs, LinkCost
from graphsplit.schedule.named import gpipe
from graphsplit.schedule.simulation.simulate import simulate
from graphsplit.viz.chrome import chrome_trace
from graphsplit.viz.report import FILES, StepReport, describe_report, write_report
from graphsplit.viz.svg import draw_timelines

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def report() -> StepReport:
    plan = lenet_plan()
    pairs = {(edge.source, edge.destination) for edge in plan.edges}
    edges = range(len(plan.edges))
    costs = Costs(
        dict.fromkeys(range(5), 1e-3),
        dict.fromkeys(range(5), 2e-3),
        {},
        links=dict.fromkeys(pairs, LinkCost(1e-4, 1e9)),
        send=dict.fromkeys(edges, 1e-5),
        receive=dict.fromkeys(edges, 1e-5),
        between=dict.fromkeys(range(5), 1e-4),
    )
    programs = lower(plan, gpipe, num_microbatches=2)
    predicted = simulate(plan, programs, costs)
    measured = simulate(plan, programs, costs, num_steps=2, leader=3)
    return StepReport(plan, predicted, measured, (1 << 20,) * 5, "by hand")


def trace_of(report: StepReport) -> dict[str, Any]:
    timelines = {"predicted": report.predicted, "measured": report.measured}
    found: dict[str, Any] = json.loads(json.dumps(chrome_trace(report.plan, timelines)))
    return found


def test_every_event_of_the_trace_has_what_its_phase_needs(report: StepReport) -> None:
    needed = {"M": {"args"}, "B": {"ts", "cat"}, "E": {"ts"}, "s": {"ts", "id"},
              "f": {"ts", "id", "bp"}}  # fmt: skip
    events = trace_of(report)["traceEvents"]
    for event in events:
        assert {"name", "ph", "pid", "tid", *needed[event["ph"]]} <= event.keys()
        assert event["pid"] in range(5) and event["tid"] in range(6)
        assert event.get("ts", 0.0) >= 0.0
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {
        f"{when}: {what}"
        for when in ("predicted", "measured")
        for what in ("compute", "send", "receive")
    }


def test_spans_begin_and_end_in_turn_on_every_track(report: StepReport) -> None:
    open_on: dict[tuple[int, int], tuple[str, float]] = {}
    count = 0
    for event in trace_of(report)["traceEvents"]:
        track = (event["pid"], event["tid"])
        if event["ph"] == "B":
            assert track not in open_on
            open_on[track] = (event["name"], event["ts"])
        elif event["ph"] == "E":
            name, begin = open_on.pop(track)
            assert name == event["name"] and begin <= event["ts"]
            count += not name.startswith("wait")
    assert not open_on
    spans = [s for t in (report.predicted, report.measured) for w in t.workers for s in w]
    assert count == len(spans)


def test_every_message_has_an_arrow_from_its_send_to_its_receive(report: StepReport) -> None:
    events = trace_of(report)["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    sends = [
        s
        for t in (report.predicted, report.measured)
        for spans in t.workers
        for s in spans
        if s.instruction is not None and s.instruction.opcode is Opcode.SEND
    ]
    assert starts.keys() == ends.keys()
    assert len(starts) == len(sends)
    assert all(starts[i]["ts"] < ends[i]["ts"] for i in starts)
    assert all(starts[i]["pid"] != ends[i]["pid"] for i in starts)


def test_the_picture_is_well_formed_and_shows_every_worker_and_wait(report: StepReport) -> None:
    text = draw_timelines(report.plan, {"predicted": report.predicted, "measured": report.measured})
    root = ElementTree.fromstring(text)
    labels = Counter(e.text or "" for e in root.iter(f"{SVG}text"))
    assert all(labels[f"worker {worker}"] == 1 for worker in range(5))
    assert sum(label.startswith("predicted: ") for label in labels) == 1
    assert sum(label.startswith("measured: ") for label in labels) == 1
    assert labels["F0"] == labels["B1"] == 10
    titles = [e.text or "" for e in root.iter(f"{SVG}title")]
    assert any(title.startswith("waits ") for title in titles)
    assert any("FORWARD mb1 seg0: conv1" in title for title in titles)
    colours = {e.get("fill") for e in root.iter(f"{SVG}rect")}
    assert sum(str(colour).startswith("hsl") for colour in colours) == 4  # 2 microbatches, F and B


def test_the_table_shows_times_their_ratio_idle_shares_and_memory(report: StepReport) -> None:
    text = describe_report(report)
    ratio = report.predicted.step_s / report.measured.step_s
    assert f"{ratio:.3f}" in text
    assert "idle, predicted" in text and "1.0 MiB" in text
    assert len(text.splitlines()) == 5 + 6


def test_all_files_are_written(report: StepReport, tmp_path: Path) -> None:
    write_report(report, tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(FILES)
    found = json.loads((tmp_path / "new" / "summary.json").read_text())
    assert found["ratio"] == report.predicted.step_s / report.measured.step_s
    assert [worker["worker"] for worker in found["workers"]] == list(range(5))
