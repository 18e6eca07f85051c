"""A callback may keep what lives on its worker: a save keeps each worker's own state of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import ThreadHolder, all_well, groups_of, task_of, together
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn

import graphsplit as gs
from graphsplit.checkpoint.by_worker import saver_of
from graphsplit.checkpoint.contents import Ownership
from graphsplit.checkpoint.position import NoRun
from graphsplit.checkpoint.states import States
from graphsplit.errors import JobFailedError, StateError
from graphsplit.job.group import WorkerGroup
from graphsplit.recovery.settings import SnapshotSettings
from graphsplit.recovery.snapshot.disk import SnapshotFolder

assert threads_as_workers


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


class Averages(gs.callbacks.Callback):
    """What the documents show: each worker averages what lives there."""

    def __init__(self) -> None:
        self.averages: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        for name, parameter in context.owned_parameters():
            if name in self.averages:
                self.averages[name].lerp_(parameter, 0.1)
            else:
                self.averages[name] = parameter.clone()

    @torch.no_grad()
    def on_train_end(self, context: gs.callbacks.RunContext) -> None:
        for name, parameter in context.owned_parameters():
            parameter.copy_(self.averages[name])

    def state_dict(self) -> dict[str, Any]:
        return self.averages

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.averages = dict(state)


class Alike(Averages):
    """Is the same on all workers."""

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        self.averages["steps"] = self.averages.get("steps", torch.zeros(())) + 1

    def on_train_end(self, context: gs.callbacks.RunContext) -> None:
        assert self.averages["steps"] == (2 if context.epoch == 1 else 6)


class Saves(gs.callbacks.Callback):
    """Saves early, at the latest after two steps, and ends that run."""

    runs_last, may_stop = True, True

    def __init__(self, folder: Path, *, at_begin: bool = False) -> None:
        self.folder, self.at_begin = folder, at_begin

    def on_epoch_begin(self, context: gs.callbacks.RunContext) -> None:
        if self.at_begin:
            context.model.save(self.folder)

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        if context.step == 2:
            if not self.at_begin:
                context.model.save(self.folder)
            context.stop()


Ranks = Sequence[int]
BATCHES = [
    (x, torch.tensor([0, 1, 0, 1]))
    for x in torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1))
]


def trained(
    ranks: Ranks,
    kept: gs.callbacks.Callback,
    *,
    load: Path | None = None,
    save: Path | None = None,
    at_begin: bool = False,
    resume: bool = True,
) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    for layer, rank in zip((net[0], net[2]), ranks, strict=False):
        layer.place(rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer)
    if load is not None:
        model.load(load)
    saves = [] if save is None else [Saves(save, at_begin=at_begin)]
    model.train(2, BATCHES, [kept, *saves], resume=resume)
    return copy.deepcopy(model.state_dict())


def on_two(
    ranks: Ranks, kept: type[Averages], settings: SnapshotSettings | None = None, **how: Any
) -> list[Any]:
    def run(_: int) -> Any:
        return trained(ranks, kept(), **how)

    if settings is None:
        return ThreadCluster(run, 2, is_recoverable=False).run()
    return ThreadCluster(run, 2, settings, kills={1: [9]}).run()


as_threads = pytest.mark.usefixtures("threads_as_workers")
REFUSED = (
    "the state of Averages is not the same on worker 0 and worker 1 that have saved it, and "
    "parameters live on other workers now than then"
)


@as_threads
def test_an_average_goes_on_where_they_are_as_they_were(tmp_path: Path) -> None:
    whole = trained((), Averages())
    on_two((0, 1), Averages, save=tmp_path)
    for found in on_two((0, 1), Averages, load=tmp_path):
        assert difference(whole, found) is None


@as_threads
@pytest.mark.parametrize("ranks", [(1, 0), (0, 0)])
def test_it_is_refused_where_they_are_elsewhere(tmp_path: Path, ranks: Ranks) -> None:
    on_two((0, 1), Averages, save=tmp_path)
    with pytest.raises(StateError, match=REFUSED):
        on_two(ranks, Averages, load=tmp_path)


@as_threads
def test_what_is_the_same_on_all_goes_on(tmp_path: Path) -> None:
    on_two((0, 1), Alike, save=tmp_path)
    on_two((1, 0), Alike, load=tmp_path)


@as_threads
def test_what_is_not_resumed_does_not_matter(tmp_path: Path) -> None:
    on_two((0, 1), Averages, save=tmp_path)
    on_two((1, 0), Averages, load=tmp_path, resume=False)


@as_threads
def test_a_save_that_does_not_say_where_they_were_is_loaded(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Ownership, "digest", None)
        on_two((0, 1), Averages, save=tmp_path)
    on_two((0, 1), Averages, load=tmp_path)


@as_threads
def test_a_save_before_the_first_step_knows_it_from_the_one_before(tmp_path: Path) -> None:
    both = {"load": tmp_path / "first", "save": tmp_path / "second"}
    on_two((0, 1), Averages, save=tmp_path / "first")
    with pytest.raises(StateError, match=REFUSED):
        on_two((1, 0), Averages, **both, at_begin=True)
    with pytest.raises(StateError, match=REFUSED):
        on_two((1, 0), Averages, load=tmp_path / "second")
    whole = trained((), Averages())
    for found in on_two((0, 1), Averages, load=tmp_path / "second"):
        assert difference(whole, found) is None


@as_threads
@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_so_it_is_where_workers_come_back(tmp_path: Path, ranks: Ranks) -> None:
    on_two((0, 1), Averages, save=tmp_path)
    settings = SnapshotSettings(1)
    if ranks != (0, 1):
        with pytest.raises(StateError, match=REFUSED):
            on_two(ranks, Averages, settings, load=tmp_path)
        return
    whole = trained((), Averages())
    for _ in range(5):  # whichever snapshot it goes back to
        for found in on_two(ranks, Averages, settings, load=tmp_path):
            assert difference(whole, found) is None


@as_threads
@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_so_it_is_where_a_job_is_started_again_from_disk(tmp_path: Path, ranks: Ranks) -> None:
    settings = SnapshotSettings(every=1, disk_every=1, folder=tmp_path)
    lost = ThreadCluster(lambda _: trained((0, 1), Averages()), 2, settings, kills={1: [26]})
    lost.comes_back, lost.dies_when = False, lambda: bool(SnapshotFolder(tmp_path).numbers())
    with pytest.raises(JobFailedError):
        lost.run()
    again = ThreadCluster(lambda _: trained(ranks, Averages()), 2, settings)
    if ranks != (0, 1):
        with pytest.raises(StateError, match=REFUSED):
            again.run()
        return
    whole = trained((), Averages())
    for found in again.run():
        assert difference(whole, found) is None
