"""What ``explain`` says of given links: seconds per edge and per step, and the costliest edge."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphsplit as gs
from graphsplit.encoding.links import MeasuredHost, MeasuredLink, MeasuredLinks, read_links
from graphsplit.errors import ConfigurationError
from graphsplit.partition.plan import PartitionPlan
from graphsplit.schedule.auto import POLICIES
from graphsplit.schedule.costs import Costs, LinkCost

SLOW = (20e-3, 1e6)  # seconds, bytes per second: beside it computing is nothing
BATCH = torch.ones(32, 8), torch.zeros(32, dtype=torch.int64)
HOSTS = (MeasuredHost("a", (0, 1), 2), MeasuredHost("b", (2,), 1))
LINKS = (MeasuredLink("a", "b", 40e-3, 1e6), MeasuredLink("b", "a", 40e-3, 1e6))


def model_of(*, microbatches: int = 1, schedule: Any = "1f1b") -> gs.Model:
    """Three workers in a row; 8 KiB go from 0 to 1 and back, 4 KiB from 1 to 2."""
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 4))
    for at, rank in ((0, 0), (2, 1), (3, 2)):
        net[at].place("MS_WORKER", rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"microbatches": microbatches, "schedule": schedule}
    return gs.Model(net, nn.CrossEntropyLoss(), optimizer, **options)


def seconds_of_edges(text: str) -> dict[tuple[str, str], list[float]]:
    """Milliseconds by source and destination, in the order of lines."""
    found: dict[tuple[str, str], list[float]] = {}
    for source, destination, ms in re.findall(
        r"^  edge\d+ .* (\d) +(\d) +\d+ +\S+ K?i?B +([\d.]+) ms$", text, re.MULTILINE
    ):
        found.setdefault((source, destination), []).append(float(ms))
    return found


def step_ms(text: str) -> float:
    found = re.search(r"predicted ([\d.]+) (m?s);", text)
    assert found is not None, text
    return float(found[1]) * (1 if found[2] == "ms" else 1000)


def test_links_by_ranks_give_seconds_per_edge_and_per_step() -> None:
    links = {(0, 1): SLOW, (1, 0): SLOW}
    text = model_of().explain(*BATCH, links=links)
    edges = seconds_of_edges(text)
    assert edges["0", "1"] == edges["1", "0"][:1] == [pytest.approx(20 + 8.192)]
    assert max(map(max, (edges["1", "2"], edges["2", "1"]))) < 1
    assert "the costliest is edge" in text and "from worker 0 to 1: 28.192 ms" in text
    # There and back: a step is no shorter than its chain.
    assert step_ms(text) > 2 * 28.192
    assert "messages by these links" in text
    assert "messages estimated" in model_of().explain(*BATCH)


def test_the_seconds_of_an_edge_are_those_of_all_its_messages() -> None:
    links = {(0, 1): SLOW, (1, 0): SLOW}
    text = model_of(microbatches=4).explain(*BATCH, links=links)
    assert seconds_of_edges(text)["0", "1"] == [pytest.approx(4 * 20 + 8.192)]


def test_a_schedule_that_looks_at_costs_sees_the_links_as_a_job_would_let_it() -> None:
    seen: list[Costs | None] = []

    def own(plan: PartitionPlan, microbatches: int, costs: Costs | None = None) -> Any:
        seen.append(costs)
        return POLICIES["1f1b"](plan, microbatches)

    links = {(0, 1): SLOW, (1, 0): SLOW}
    model_of(microbatches=4, schedule=own).explain(*BATCH, links=links)
    assert seen[-1] is not None and seen[-1].links[0, 1] == LinkCost(*SLOW)
    assert min(seen[-1].forward.values()) > 0


def test_what_doctor_measures_is_read_by_hosts(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    measured = MeasuredLinks(HOSTS, LINKS)
    measured.save(path)
    assert read_links(path) == measured
    edges = seconds_of_edges(model_of().explain(*BATCH, links=path))
    # Half of there and back, and what a value takes beyond the wire; one host as it is assumed.
    assert edges["1", "2"] == [pytest.approx(20 + 0.15 + 4.096)] and edges["0", "1"][0] < 1


def test_what_runs_behind_a_message_is_tried_behind_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    links = {(0, 1): (4e-3, 1e9), (1, 0): (1.0, 1e9)}
    model_of().explain(*BATCH, links=links)
    # For worker 1 as long as its message takes, for worker 0 no longer than makes a difference.
    assert any(4e-3 < seconds < 9e-3 for seconds in slept) and max(slept) == 10e-3


@pytest.mark.parametrize(
    ("links", "problem"),
    [
        ({(0, 3): SLOW}, "expected two different ranks below 3"),
        ({(1, 1): SLOW}, "expected two different ranks below 3"),
        ({(0, 1): (-1.0, 1.0)}, "then seconds and bytes per second"),
        ({(0, 1): (0.0, 0.0)}, "then seconds and bytes per second"),
        ("none.json", "No such file"),
    ],
)
def test_links_that_are_none_are_refused(links: object, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        model_of().explain(*BATCH, links=links)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("measured", "problem"),
    [
        (MeasuredLinks(HOSTS[:1], ()), "has 2 workers, and the plan 3"),
        (MeasuredLinks(HOSTS, LINKS[:1]), "from host b to host a was not measured"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tmp_path: Path, measured: MeasuredLinks, problem: str
) -> None:
    measured.save(tmp_path / "links.json")
    with pytest.raises(ConfigurationError, match=problem):
        model_of().explain(*BATCH, links=tmp_path / "links.json")


def test_a_file_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    path.write_text('{"hosts": [], "links": [{}]}')
    with pytest.raises(ConfigurationError, match=r"links.json: links.*missing"):
        model_of().explain(*BATCH, links=path)


def test_links_are_about_a_batch() -> None:
    with pytest.raises(ConfigurationError, match="Fix: pass one"):
        model_of().explain(links={})
