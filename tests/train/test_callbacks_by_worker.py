"""A callback may keep what lives on its worker: a save keeps each worker's own state of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import ThreadHolder, all_well, groups_of, task_of, together
from torch import nn

import graphsplit as gs
from graphsplit.checkpoint.by_worker import saver_of
from graphsplit.checkpoint.position import NoRun
from graphsplit.checkpoint.states import States
from graphsplit.errors import StateError
from graphsplit.job.group import WorkerGroup


class Means(gs.callbacks.Callback):
    """Keeps something."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state


class Clock(Means):
    """Keeps something else."""


def states_of(group: WorkerGroup) -> States:
    torch.manual_seed(0)
    network = nn.Linear(2, 2)
    owners = {"weight": 0, "bias": group.num_workers - 1}
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return States(task_of(network, optimizer), ThreadHolder(group, owners))


def save(folder: Path, num_workers: int, state: Any, *, gather: bool = False) -> list[Any]:
    def run(group: WorkerGroup) -> None:
        states = states_of(group)
        callbacks = [Means(state(group.rank)), Clock({"ticks": 3})]
        states.run = NoRun(position=(1, 1), callbacks=callbacks)  # in the middle: they go on
        states.save(folder, gather=gather, extra={})

    return together(groups_of(num_workers), run)


def load(folder: Path, num_workers: int) -> list[Any]:
    def run(group: WorkerGroup) -> Any:
        states = states_of(group)
        states.load(folder, extra={})
        assert states.resumption is not None
        return states.resumption.callbacks

    return together(groups_of(num_workers), run)


def own(rank: int) -> dict[str, Any]:
    return {"mean": torch.full((3,), float(rank)), "rank": rank}


@pytest.mark.parametrize("gather", [False, True])
def test_as_many_workers_take_their_own(tmp_path: Path, gather: bool):
    all_well(save(tmp_path, 3, own, gather=gather))
    for rank, (means, clock) in enumerate(load(tmp_path, 3)):
        assert means[0] == "Means" and means[1]["rank"] == rank
        assert torch.equal(means[1]["mean"], torch.full((3,), float(rank)))
        assert clock == ["Clock", {"ticks": 3}]


def test_a_worker_may_have_nothing_to_keep(tmp_path: Path):
    all_well(save(tmp_path, 3, lambda rank: own(rank) if rank == 2 else {}))
    found = load(tmp_path, 3)
    assert [[name for name, _ in callbacks] for callbacks in found] == [
        ["Clock"],
        ["Clock"],
        ["Means", "Clock"],
    ]


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_another_number_takes_what_all_have_alike(tmp_path: Path, num_workers: int):
    all_well(save(tmp_path, 3, lambda rank: {"mean": torch.ones(2)}))
    for callbacks in load(tmp_path, num_workers):
        assert torch.equal(callbacks[0][1]["mean"], torch.ones(2))


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_another_number_is_refused_where_they_differ(tmp_path: Path, num_workers: int):
    all_well(save(tmp_path, 3, own))
    results = load(tmp_path, num_workers)
    assert all(isinstance(result, StateError) for result in results), results
    assert len({str(result) for result in results}) == 1
    assert str(results[0]).startswith(
        "the state of Means is not the same on workers 0 and 1 that have saved it"
    )


@pytest.mark.parametrize(
    ("section", "rank"),
    [
        ("callbacks", 0),
        ("callbacks 2", 2),
        ("resumption 11", 11),
        ("callbacks 0", None),
        ("callbacks 1" + "0" * 5000, None),
        ("callbacks ٣", None),
        ("callbacks x", None),
        ("position", None),
    ],
)
def test_only_names_that_are_written_are_taken_for_a_workers_own(section: str, rank: int | None):
    assert saver_of(section) == rank
