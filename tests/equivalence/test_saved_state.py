"""Saved under one placement, loaded under another: training goes on with the same bits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import ThreadHolder, all_well, groups_of, together
from equivalence_helpers import batches_of, rows_against_target
from simulated.compare import difference
from simulated.reference import EagerLoop
from simulated.simulate import SimulatedCluster, SimulatedWorker
from torch import nn

import graphsplit as gs
from graphsplit.batches.signature import split_batch
from graphsplit.checkpoint.states import States
from graphsplit.deferred.construction import deferred_init
from graphsplit.errors import StateError
from graphsplit.job.group import WorkerGroup
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.planning.task import Task, named_state

BATCHES = batches_of(4, 8, num=6)
LAYERS = ("first", "norm", "second", "third")


class Net(nn.Module):
    """A tied weight, dropout, running statistics, a counter that is no part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.third.weight = self.first.weight
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.4)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1.0)
        h = self.dropout(self.norm(self.first(x)))
        return self.third(self.dropout(torch.relu(self.second(h)))) * self.count + h


class PlannerHolder(ThreadHolder):
    """Where one simulated worker's state is."""

    def __init__(self, group: WorkerGroup, worker: SimulatedWorker) -> None:
        super().__init__(group, {})
        self._planner = worker.planner
        self._planner.on_settled = self.settle_now

    def owners(self) -> Mapping[str, int]:
        return self._planner.owners

    def when_settled(self, what: str, action: Callable[[], None]) -> None:
        if self._planner.owners:
            action()
        else:
            self.waiting[what] = action


def make(ranks: tuple[int, ...], *, seed: int, deferred: bool) -> Callable[[], Task]:
    def make_task() -> Task:
        torch.manual_seed(seed)
        if deferred:
            with deferred_init():
                network = Net()
        else:
            network = Net()
        for name, rank in zip(LAYERS, ranks, strict=True):
            network.get_submodule(name).place("MS_WORKER", rank)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.02, amsgrad=True)
        return Task(network, rows_against_target, optimizer, "affinity", with_loss=True)

    return make_task


def states_of(cluster: SimulatedCluster) -> list[States]:
    groups = groups_of(len(cluster.workers))
    return [
        States(worker.task, PlannerHolder(group, worker))
        for worker, group in zip(cluster.workers, groups, strict=True)
    ]


def run_all(states: list[States], run: Callable[[States], Any]) -> None:
    groups: list[Any] = [one._holder.group() for one in states]
    all_well(together(groups, lambda group: run(states[group.rank])))


def plain() -> tuple[nn.Module, Any, Any, Any]:
    torch.manual_seed(0)
    network = Net()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.02, amsgrad=True)
    return network, rows_against_target, optimizer, None


def train(cluster: SimulatedCluster, reference: EagerLoop, batches: list[Any]) -> None:
    for batch in batches:
        expected = reference.train_step(batch)
        for loss in cluster.train_step(split_batch(batch, has_loss_fn=True)):
            assert difference(expected, loss) is None


def assert_same_state(cluster: SimulatedCluster, reference: EagerLoop) -> None:
    for name, tensor in named_state(reference.network, None).items():
        owner = cluster.owner_of(name)
        mine = named_state(owner.task.network, None)[name]
        assert difference(tensor.detach(), mine.detach()) is None, name
        entry = dict(reference.optimizers[0].state.get(tensor) or {})
        (optimizer,) = owner.task.optimizers
        assert difference(entry, dict(optimizer.state.get(mine) or {})) is None, name
    for worker in cluster.workers:
        assert difference(reference.generator, worker.generator) is None


@pytest.mark.parametrize(
    ("saving", "loading", "deferred", "gather"),
    [
        ((0, 1, 2, 0), (1, 0, 0, 1), False, False),
        ((0, 1, 2, 0), (1, 0, 0, 1), True, False),
        ((3, 1, 0, 3), (0, 0, 0, 0), True, True),
        ((0, 0, 0, 0), (2, 4, 1, 2), True, False),
    ],
)
def test_another_number_of_workers_goes_on(
    tmp_path: Path,
    saving: tuple[int, ...],
    loading: tuple[int, ...],
    deferred: bool,
    gather: bool,
) -> None:
    torch.manual_seed(0)
    reference = EagerLoop(plain)
    first = SimulatedCluster(make(saving, seed=0, deferred=deferred), max(saving) + 1)
    train(first, reference, BATCHES[:3])
    torch.default_generator.set_state(first.workers[0].generator)
    run_all(states_of(first), lambda states: states.save(tmp_path, gather=gather, extra={}))

    second = SimulatedCluster(make(loading, seed=5, deferred=deferred), max(loading) + 1)
    run_all(states_of(second), lambda states: states.load(tmp_path, extra={}))
    for worker in second.workers:
        worker.generator = torch.default_generator.get_state()
    train(second, reference, BATCHES[3:])
    assert_same_state(second, reference)
    for worker in second.workers:
        (optimizer,) = worker.task.optimizers
        assert not any(is_elsewhere(key) for key in optimizer.state)


class Remembering(nn.Module):
    """Kept whole, it keeps in its attributes what it likes between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls, self.rate = nn.Linear(8, 8), 0, 1.0
        self.last: list[torch.Tensor] = []
        self.queue: deque[torch.Tensor] = deque(maxlen=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.rate *= 0.5
        mixed: torch.Tensor = self.inner(x) / self.calls + self.rate
        for one in self.last:
            mixed = mixed + 0.1 * one
        mixed = mixed + 0.1 * sum(self.queue)
        self.queue.append(mixed.detach().mean(0))
        self.last = [*self.last[-1:], mixed.detach().mean(0)]
        return mixed


def remembering(rank: int | None) -> Task:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8), Remembering(), nn.Linear(8, 8))
    if rank is not None:
        gs.opaque(network[1], outputs=torch.empty_like).place("MS_WORKER", rank)
        network[0].place("MS_WORKER", 0)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return Task(network, rows_against_target, optimizer, "affinity", with_loss=True)


def plain_remembering() -> tuple[nn.Module, Any, Any, Any]:
    task = remembering(None)
    return task.network, rows_against_target, task.optimizers[0], None


def test_what_a_module_kept_whole_remembers_is_saved_by_the_worker_that_runs_it(tmp_path: Path):
    reference = EagerLoop(plain_remembering)
    for at, (rank, num_workers) in enumerate([(1, 2), (1, 2), (0, 1), (2, 3)]):
        cluster = SimulatedCluster(lambda rank=rank: remembering(rank), num_workers)
        states = states_of(cluster)
        for one in states:
            one.begin()
        if at:
            run_all(states, lambda one: one.load(tmp_path, extra={}))
        train(cluster, reference, BATCHES[at : at + 2])
        run_all(states, lambda one: one.save(tmp_path, gather=False, extra={}))


def test_what_script_and_kept_whole_code_both_change_must_be_alike(tmp_path: Path):
    cluster = SimulatedCluster(lambda: remembering(1), 2)
    states = states_of(cluster)
    for one in states:
        one.begin()
        one._task.network[1].calls = 5
    cluster.train_step(split_batch(BATCHES[0], has_loss_fn=True))
    run_all(states, lambda one: one.save(tmp_path, gather=False, extra={}))
    run_all(states, lambda one: one.load(tmp_path, extra={}))
    assert [one._task.network[1].calls for one in states] == [6, 6]

    for rank, one in enumerate(states):
        one._task.network[1].calls = 7 + rank
    run_all(states, lambda one: one.save(tmp_path, gather=False, extra={}))
    groups: list[Any] = [one._holder.group() for one in states]
    found = together(groups, lambda group: states[group.rank].load(tmp_path, extra={}))
    for error in found:
        assert isinstance(error, StateError)
        assert "'1' is kept whole, and its attribute 'calls' was saved with other" in str(error)
