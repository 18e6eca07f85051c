"""Saved under one placement, loaded under another: training goes on with the same bits."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
from graphsplit.job.group import WorkerGroup
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.planning import plain_attributes
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
        self._planner, self._engine = worker.planner, worker.engine
        self._planner.on_settled = self.settle_now

    def owners(self) -> Mapping[str, int]:
        return self._planner.owners

    def when_settled(self, what: str, action: Callable[[], None]) -> None:
        if self._planner.owners:
            action()
        else:
            self.waiting[what] = action

    def reached_here(self) -> Collection[int]:
        return self._engine.reached_here()


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


def test_of_what_kept_whole_code_can_reach_its_worker_knows(tmp_path: Path):
    cluster = SimulatedCluster(lambda: remembering(1), 2)
    states = states_of(cluster)
    for one in states:
        one.begin()
        one._task.network[1].calls = 5
    cluster.train_step(split_batch(BATCHES[0], has_loss_fn=True))
    for rank, one in enumerate(states):
        one._task.network[1].calls += rank
        one._task.network[0].seen = rank
    run_all(states, lambda one: one.save(tmp_path, gather=False, extra={}))
    run_all(states, lambda one: one.load(tmp_path, extra={}))
    assert [one._task.network[1].calls for one in states] == [7, 7]
    assert [one._task.network[0].seen for one in states] == [0, 0]


class Score(NamedTuple):
    """What a module kept whole has seen."""

    calls: int
    total: float


class Collecting(nn.Module):
    """Kept whole, it keeps what is of no class that a save writes, and writes into tensors."""

    by_class = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.found: dict[str, list[float]] = defaultdict(list)
        self.number: dict[str, int] = defaultdict(lambda: 0)
        self.score = Score(0, 0.0)
        self.average = torch.zeros(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.inner(x)
        key = "odd" if self.score.calls % 2 else "even"
        self.found[key].append(h.sum().item())
        self.number[key] += 1
        self.score = Score(self.score.calls + 1, self.score.total + h.sum().item())
        self.average.mul_(0.9).add_(h.detach().mean(0))
        self.by_class += 1
        if self.score.calls > 1:
            self.later = self.score.calls
        more = len(self.found["odd"]) + self.number["even"] + self.by_class
        return h * 0.1 * more + self.average + self.score.total * 1e-3 + getattr(self, "later", 0)


def collecting() -> tuple[nn.Module, Any, Any, Any]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8), Collecting(), nn.Linear(8, 8))
    return network, rows_against_target, torch.optim.SGD(network.parameters(), lr=0.01), None


def placed_collecting() -> Task:
    network, loss_fn, optimizer, _ = collecting()
    network[0].place("MS_WORKER", 0)
    gs.opaque(network[1], outputs=torch.empty_like).place("MS_WORKER", 1)
    return Task(network, loss_fn, optimizer, "affinity", with_loss=True)


@pytest.mark.parametrize("in_a_new_process", [False, True])
def test_containers_of_other_classes_and_tensors_written_to_are_as_they_were(
    tmp_path: Path, in_a_new_process: bool
):
    reference = EagerLoop(collecting)
    cluster = SimulatedCluster(placed_collecting, 2)
    states = states_of(cluster)
    for one in states:
        one.begin()
    train(cluster, reference, BATCHES[:1])
    run_all(states, lambda one: one.save(tmp_path, gather=False, extra={}))
    then = copy.deepcopy(reference.network)
    train(cluster, reference, BATCHES[1:3])
    if in_a_new_process:
        cluster = SimulatedCluster(placed_collecting, 2)
        states = states_of(cluster)
    run_all(states, lambda one: one.load(tmp_path, extra={}))
    again = EagerLoop(collecting)
    again.network.load_state_dict(then.state_dict())
    for name in ("found", "number", "score", "average", "by_class"):
        setattr(again.network[1], name, getattr(then[1], name))
    train(cluster, again, BATCHES[3:])
    for one in states:
        held = one._task.network[1]
        assert type(held.found) is type(held.number) is defaultdict and type(held.score) is Score


def test_a_load_goes_back_behind_what_kept_whole_code_has_made(tmp_path: Path):
    cluster = SimulatedCluster(placed_collecting, 2)
    states = states_of(cluster)
    for one in states:
        one.begin()
    run_all(states, lambda one: one.save(tmp_path, gather=False, extra={}))
    for batch in BATCHES[:3]:
        cluster.train_step(split_batch(batch, has_loss_fn=True))
    held = [one._task.network[1] for one in states]
    assert [one.later for one in held] == [3, 3]
    run_all(states, lambda one: one.load(tmp_path, extra={}))
    for one in held:
        assert not hasattr(one, "later") and one.by_class == 0 and one.score == Score(0, 0.0)
        assert one.found == one.number == {} and torch.equal(one.average, torch.zeros(8))


def test_attributes_that_earlier_versions_saved_by_module_are_loaded() -> None:
    saved = {"attributes": {"net.seen": 0.5, "net.1.calls": 0}, "gone": [], "unsaved": []}
    apart = [{"network.1": {"here": {"calls": 3}}, "loss": {"here": {"rate": 0.25}}}]
    found = plain_attributes.together(saved, apart)
    assert found["attributes"] == {"net.seen": 0.5, "net.1.calls": 3, "loss_fn.rate": 0.25}
