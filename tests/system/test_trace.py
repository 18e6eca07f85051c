"""``graphsplit trace`` runs a real job, and leaves pictures and a table."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from system.helpers import JOBS, Finished, run_command

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(120)]


def run_trace(folder: Path, script: Path) -> Finished:
    return run_command(["trace", "-n", "2", "-o", str(folder), str(script)], timeout_s=110)


def test_a_job_is_traced_while_its_schedule_is_chosen_by_measured_costs(tmp_path: Path) -> None:
    done = run_trace(tmp_path / "found", JOBS / "traced.py")
    assert done.status == 0, done.output[-6000:]
    for rank in range(2):
        assert f"[worker {rank}] same bits" in done.output
        assert f"[worker {rank}] explained" in done.output
    assert "predicted / measured" in done.output
    trace = json.loads((tmp_path / "found" / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    ElementTree.parse(tmp_path / "found" / "timeline.svg")
    summary = json.loads((tmp_path / "found" / "summary.json").read_text())
    assert summary["source"] == "measured over 10 steps"
    assert summary["measured_step_s"] > 0
    assert len(summary["workers"]) == 2


def test_a_script_that_trains_nothing_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "idle.py"
    script.write_text("import graphsplit as gs\n\ngs.init()\nprint('nothing to train')\n")
    done = run_trace(tmp_path / "found", script)
    assert done.status == 1
    assert "nothing was measured" in done.output
    assert "Fix: train ten or more steps" in done.output


def test_replicas_run_forward_at_the_same_time(tmp_path: Path) -> None:
    shares: list[float] = []
    while not shares or (max(shares) < 0.8 and len(shares) < 3):  # others may have taken a core
        shares.append(_share_together(tmp_path / f"found {len(shares)}"))
    assert max(shares) >= 0.8, shares


def _share_together(folder: Path) -> float:
    """How much of the forwards of one replica is beside those of the other."""
    done = run_trace(folder, JOBS / "traced_replicas.py")
    assert done.status == 0, done.output[-6000:]
    assert all(f"[worker {rank}] same bits" in done.output for rank in range(2))
    trace = json.loads((folder / "trace.json").read_text())
    spans: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    begun: dict[tuple[int, str], float] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") != "measured" or not event["name"].startswith("FORWARD"):
            continue
        key = event["pid"], event["name"]
        if event["ph"] == "B":
            begun[key] = event["ts"]
        else:
            spans[event["pid"]].append((begun.pop(key), event["ts"]))
    assert [len(found) for found in spans.values()] == [2, 2]
    together = sum(
        max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
        for one in spans[0]
        for other in spans[1]
    )
    shortest = min(sum(end - start for start, end in found) for found in spans.values())
    return together / shortest
