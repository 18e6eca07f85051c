"""Recovery of containers and tensors that script and forward put in each other's place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_model import PlainModel
from recovery_helpers import Generators, ThreadCluster, threads_as_workers
from torch import nn
from torch.nn import functional as F

import graphsplit as gs
from graphsplit.planning import planner
from graphsplit.planning.passes import capture_graph
from graphsplit.recovery.settings import SnapshotSettings

pytestmark = [
    pytest.mark.usefixtures("threads_as_workers"),
    pytest.mark.filterwarnings("ignore:network or loss reads"),
]

__all__ = ["threads_as_workers"]
NUM_STEPS = 5


class Net(nn.Module):
    """Runs a function of itself between two layers.

    Args:
        change: The function.
    """

    def __init__(self, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.items: list[Any] = [0.5]
        self.others: list[Any] = []
        self.seen: torch.Tensor | None = None
        self.table = {"first": torch.ones(4)}
        self.register_buffer("mean", torch.zeros(4))
        self._change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self._change(self, self.first(x))
        out: torch.Tensor = self.second(torch.tanh(h))
        return out


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        change: What forward does.
        between: What the script does before each step, with what it holds itself.
    """

    change: Callable[[Any, torch.Tensor], torch.Tensor]
    between: Callable[[Any, SimpleNamespace, int], None]


def _takes_the_first(net: Any, h: torch.Tensor) -> torch.Tensor:
    if net.others:
        h = h + 0.1 * net.others.pop(0)
    return h


def _puts_tensors(net: Any, held: SimpleNamespace, step: int) -> None:
    if step in (1, 4):
        net.others = [torch.ones(4)]
    if step == 3:
        net.others = []


def _counts(net: Any, h: torch.Tensor) -> torch.Tensor:
    h = h * (1 + 0.1 * sum(net.items))
    net.items.append(len(net.items) % 3)
    return h


def _keeps_the_old_one(net: Any, held: SimpleNamespace, step: int) -> None:
    if step == 1:
        held.history = net.items
    if step == 3:
        net.items = [one * 0.5 for one in net.items[:2]]
        held.history.insert(0, "ended")
    if step == 4:
        held.history.append("later")


def _exchanges(net: Any, h: torch.Tensor) -> torch.Tensor:
    h = h * (1 + 0.1 * sum(net.items))
    net.others.append(len(net.others) * 0.25)
    net.items, net.others = net.others, net.items
    return h


def _holds_both(net: Any, held: SimpleNamespace, step: int) -> None:
    if step == 0:
        held.history = net.items


def _averages(net: Any, h: torch.Tensor) -> torch.Tensor:
    if net.seen is not None:
        h = h + 0.1 * net.seen
        net.seen = net.seen * 0.5 + h.detach().mean(0)
    return h


def _begins_an_average(net: Any, held: SimpleNamespace, step: int) -> None:
    if step == 1:
        net.seen = torch.zeros(4)


def _begins_it_later(net: Any, held: SimpleNamespace, step: int) -> None:
    if step == 2:
        net.seen = torch.zeros(4)


def _adds_to_a_table(net: Any, h: torch.Tensor) -> torch.Tensor:
    h = h + 0.1 * sum(net.table.values())
    net.table.setdefault("second", h.detach().mean(0))
    return h


def _collects(net: Any, h: torch.Tensor) -> torch.Tensor:
    net.table[len(net.table)] = h.detach().mean(0)
    return h


def _begins_to_collect(net: Any, held: SimpleNamespace, step: int) -> None:
    if step in (1, 2):  # for the first that forward has put there nothing stands
        net.table = {0: torch.ones(4)} if step == 2 else {}


def _asks(net: Any, h: torch.Tensor) -> torch.Tensor:
    if float(h.detach().sum()) > 0:
        h = torch.tanh(h)
    net.mean = net.mean * 0.5 + h.detach().mean(0)
    return h + net.mean


def _leaves_all(net: Any, held: SimpleNamespace, step: int) -> None:
    pass


PROGRAMS = {
    "tensors that forward takes out": Program(_takes_the_first, _puts_tensors),
    "a list that the script goes on with": Program(_counts, _keeps_the_old_one),
    "two lists that forward exchanges": Program(_exchanges, _holds_both),
    "an average that the script begins": Program(_averages, _begins_an_average),
    "a tensor of the script beside one of forward": Program(_adds_to_a_table, _leaves_all),
    "a tensor of forward behind one of the script": Program(_collects, _begins_to_collect),
    "a buffer behind a question": Program(_asks, _leaves_all),
}
CASES = [  # with the worker that is killed, how often snapshots are taken, and by train or not
    ("tensors that forward takes out", 0, 2, False),
    ("a list that the script goes on with", 1, 9, False),
    ("two lists that forward exchanges", 1, 1, True),
    ("an average that the script begins", 1, 1, True),
    ("a tensor of the script beside one of forward", 0, 1, False),
    ("a tensor of forward behind one of the script", 0, 1, False),
    ("a buffer behind a question", 1, 1, False),
]


def _train(make: Any, program: Program, *, in_one_call: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    net, held = Net(program.change), SimpleNamespace(history=[])
    net.first.place("MS_WORKER", 0)
    net.second.place("MS_WORKER", 1)
    model = make(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    losses, outputs, looked = [], [], []
    for step in range(NUM_STEPS):
        program.between(net, held, step)
        batches = [(torch.randn(5, 3), torch.randn(5, 2)) for _ in range(1 + in_one_call)]
        if in_one_call:
            model.train(1, batches)
        else:
            losses.append(float(model.train_step(*batches[0])))
        outputs.append(model.predict(batches[0][0]))
        looked.append((copy.copy(held.history), held.history is net.items))
    ends = [copy.copy(one) for one in (net.items, net.others)]
    state = copy.deepcopy(model.state_dict())
    return {"losses": losses, "outputs": outputs, "state": state, "ends": ends, "looked": looked}


@pytest.mark.parametrize("name, killed, every, in_one_call", CASES)
def test_containers_are_the_ones_that_they_were(
    name: str, killed: int, every: int, in_one_call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "capture_graph", capture_graph)  # each worker for itself
    before = Generators.now()
    expected = _train(PlainModel, PROGRAMS[name], in_one_call=in_one_call)

    def cluster(kills: dict[int, list[int]]) -> ThreadCluster:
        before.put_back()
        return ThreadCluster(
            lambda rank: _train(gs.Model, PROGRAMS[name], in_one_call=in_one_call),
            2,
            SnapshotSettings(every=every),
            kills,
        )

    undisturbed = cluster({})
    undisturbed.run()
    length = undisturbed.lengths[killed]
    for at in (length // 2, length - 3):
        disturbed = cluster({killed: [at]})
        for rank, found in enumerate(disturbed.run()):
            for key in ("losses", "outputs", "ends"):
                assert str(found[key]) == str(expected[key]), (rank, at, key)
            assert all(torch.equal(found["state"][n], v) for n, v in expected["state"].items())
            if rank != killed:  # what the script holds itself is as it has made it anew
                assert found["looked"] == expected["looked"], at
        assert disturbed.num_killed == 1


def _began_an_average_behind_a_snapshot(
    num_workers: int, settings: SnapshotSettings, kills: dict[int, list[int]], **options: Any
) -> None:
    """Workers are lost when the script has put a tensor in the place of None since then."""
    before = Generators.now()
    program = Program(_averages, _begins_it_later)
    expected = _train(PlainModel, program, in_one_call=False)
    before.put_back()
    cluster = ThreadCluster(
        lambda rank: _train(gs.Model, program, in_one_call=False),
        num_workers,
        settings,
        kills,
        **options,
    )
    for found in cluster.run():
        assert found["losses"] == expected["losses"]
        assert all(torch.equal(found["state"][n], v) for n, v in expected["state"].items())
    assert cluster.num_killed == 2


@pytest.mark.parametrize("first, second", [(26, 38), (34, 48)])
def test_a_worker_that_came_back_goes_back_to_what_hung_there_then(
    first: int, second: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was given the snapshot by others, and has gone beyond it when the other one is killed."""
    monkeypatch.setattr(planner, "capture_graph", capture_graph)  # each worker for itself
    settings = SnapshotSettings(every=2)
    _began_an_average_behind_a_snapshot(2, settings, {0: [first], 1: [second]})


def test_a_survivor_goes_back_to_what_hung_there_when_a_snapshot_went_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two neighbours are lost at once: the third one goes back to the disk with them."""
    monkeypatch.setattr(planner, "capture_graph", capture_graph)  # each worker for itself
    settings = SnapshotSettings(every=2, disk_every=2, folder=tmp_path)
    _began_an_average_behind_a_snapshot(3, settings, {0: [38]}, together=(0, 1))
