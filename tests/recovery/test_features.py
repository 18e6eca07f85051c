"""Whatever training offers, a lost worker changes no bit, in memory and from disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recovery_features import FEATURES
from recovery_features.parts import adam, all_of, batches, pairs, plain_net, trained
from recovery_helpers import Killed, ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn

import graphsplit as gs
from graphsplit.errors import ConfigurationError, JobFailedError, LoaderMismatchError, StateError
from graphsplit.job import joined
from graphsplit.recovery.settings import SnapshotSettings
from graphsplit.recovery.snapshot.disk import SnapshotFolder

assert threads_as_workers
pytestmark = [
    pytest.mark.usefixtures("threads_as_workers"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    pytest.mark.filterwarnings("ignore:network or loss reads"),
]
NUM_WORKERS = 3
# What a snapshot on disk holds otherwise than one in memory, or what plans anew depend on.
ON_DISK = (
    "accumulated_uneven_microbatches",
    "attributes_left_by_forward",
    "attributes_that_a_call_left_before_a_second_model",
    "attributes_that_no_step_reads",
    "buffers_of_other_forms",
    "built_later",
    "callback_that_keeps_what_lives_here",
    "counted_by_code_kept_whole",
    "drawn_by_code_kept_whole",
    "generators_of_loaders",
    "held_by_a_marked_module",
    "held_by_code_kept_whole",
    "kept_whole_with_memory",
    "loss_and_optimizer_given_anew",
    "numbers_of_python_and_numpy",
    "python_values",
    "remembered_by_a_loss",
    "replicas",
    "replicas_in_pairs",
    "replicas_that_exchange_once_in_a_step",
    "sampler_that_counts_epochs",
    "sampler_with_set_epoch",
    "scaled_and_clipped",
    "tensors_of_one_element",
    "tied_over_workers",
    "two_models_of_the_same_modules",
    "unfrozen_by_a_callback",
    "values_at_ends_of_lists",
)
MANY_INSTRUCTIONS = (
    "accumulated_uneven_microbatches",
    "replicas",
    "replicas_in_pairs",
    "replicas_that_exchange_once_in_a_step",
    "scaled_and_clipped",
)  # in a step


@cache
def undisturbed(script: Callable[..., Any]) -> Any:
    """What it returns in one process: to be looked at, not to be changed."""
    before = torch.default_generator.get_state()
    expected = script(place=False)
    torch.default_generator.set_state(before)
    return expected


def moment(name: str) -> tuple[int, int]:
    """Which worker dies, and after how many instructions: not always the same."""
    index = sorted(FEATURES).index(name)
    return index % NUM_WORKERS, 9 if name == "first_steps_only" else 32 + index % 16


@pytest.mark.parametrize("name", FEATURES)
def test_a_worker_that_is_waited_for_changes_nothing(name: str):
    script = FEATURES[name]
    expected = undisturbed(script)
    rank, at = moment(name)
    settings = SnapshotSettings(every=2)
    cluster = ThreadCluster(lambda rank: script(), NUM_WORKERS, settings, {rank: [at]})
    for found in cluster.run():
        assert difference(expected, found) is None
    assert cluster.num_killed == 1


@pytest.mark.parametrize("at", [30, 40, 56])
@pytest.mark.parametrize("rank", range(NUM_WORKERS))
def test_what_a_script_wrote_is_compared_again_after_a_loss(rank: int, at: int):
    """By those who go back as by the one who comes: what it wrote elsewhere was left out there."""
    script = FEATURES["given_data_by_the_script"]
    expected = undisturbed(script)
    cluster = ThreadCluster(
        lambda rank: script(), NUM_WORKERS, SnapshotSettings(every=2), {rank: [at]}
    )
    for found in cluster.run():
        assert difference(expected, found) is None


@pytest.mark.parametrize(
    ("name", "later"),
    [*((name, later) for name in ON_DISK for later in (0, 5)), ("python_values", 30)],
)
def test_a_job_started_again_from_disk_changes_nothing(name: str, later: int, tmp_path: Path):
    script = FEATURES[name]
    expected = undisturbed(script)
    settings = SnapshotSettings(every=1, disk_every=1, folder=tmp_path)
    rank, at = moment(name)
    at += later + 80 * (name in MANY_INSTRUCTIONS)
    lost = ThreadCluster(lambda rank: script(), NUM_WORKERS, settings, {rank: [at]})
    lost.comes_back, lost.dies_when = False, lambda: bool(SnapshotFolder(tmp_path).numbers())
    with pytest.raises(JobFailedError):
        lost.run()
    # How much more is on disk by then is up to the threads that write.
    assert SnapshotFolder(tmp_path).numbers()
    for found in ThreadCluster(lambda rank: script(), NUM_WORKERS, settings).run():
        assert difference(expected, found) is None


class Dying(gs.callbacks.Callback):
    """Ends its worker when an epoch has ended."""

    def __init__(self, die: Callable[[], None]) -> None:
        self.die = die

    def on_epoch_end(self, context: gs.callbacks.RunContext) -> None:
        self.die()


def test_a_job_that_is_lost_again_before_it_has_a_plan_forgets_nothing(tmp_path: Path):
    """It goes on behind the last step of ``train``, ends that, and is lost before the next step."""
    settings = SnapshotSettings(every=1, disk_every=1, folder=tmp_path)
    folder = SnapshotFolder(tmp_path)

    def script(die_in_train: Callable[[], None], die_after: Callable[[], None]) -> Any:
        net = plain_net(place=True)
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
        model.train(1, batches(), [Dying(die_in_train)])
        die_after()
        model.train(1, batches(), [])
        return all_of(model)

    def live(number: int | None, *, in_train: bool = False) -> Any:
        """One life of the job; it is lost as soon as a snapshot of this number is on disk."""

        def die() -> None:
            if number is not None and joined.get_rank() == 0:
                cluster.turns.wait_for(lambda: number in folder.numbers())
                raise Killed

        cluster = ThreadCluster(
            lambda rank: script(die, lambda: None) if in_train else script(lambda: None, die),
            NUM_WORKERS,
            settings,
            comes_back=False,
        )
        return cluster.run()

    plain = plain_net(place=False)
    model = gs.Model(plain, nn.CrossEntropyLoss(), adam(plain))
    before = torch.default_generator.get_state()
    for _ in range(2):
        model.train(1, batches(), [])
    expected = all_of(model)
    torch.default_generator.set_state(before)
    for number, in_train in ((3, True), (4, False)):
        with pytest.raises(JobFailedError):
            live(number, in_train=in_train)
    for found in live(None):
        assert difference(expected, found) is None


def test_a_snapshot_without_any_model_is_no_failure(tmp_path: Path):
    def script(rank: int) -> Any:
        net = plain_net(place=True)
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
        model.train(1, [], [])
        return trained(model)

    settings = SnapshotSettings(every=1, disk_every=1, folder=tmp_path)
    ThreadCluster(script, NUM_WORKERS, settings).run()


class Scaled(torch.utils.data.Dataset[Any]):
    """Its rows are scaled by a number."""

    def __init__(self) -> None:
        self.pairs, self.scale = pairs(), 1.0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.pairs[index]
        return x * self.scale, y

    def __len__(self) -> int:
        return len(self.pairs)


class Scales(gs.callbacks.Callback):
    """Changes the number after each step."""

    def __init__(self, data: Scaled) -> None:
        self.data = data

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        self.data.scale *= 0.75


class ScalesAgain(Scales):
    """It sets the number to what it was."""

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.data.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.scale = state["scale"]


def scaled(kind: type[Scales], place: bool = True) -> Any:
    net, data = plain_net(place=place), Scaled()
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()})
    return trained(model, torch.utils.data.DataLoader(data, batch_size=4), 3, kind(data))


@pytest.mark.parametrize("rank", range(NUM_WORKERS))
def test_a_batch_that_has_other_values_after_a_loss_is_refused(rank: int):
    settings, deaths = SnapshotSettings(every=4), {rank: [50]}
    cluster = ThreadCluster(lambda _: scaled(Scales), NUM_WORKERS, settings, deaths)
    told = r"training step \d+ is done again after a worker was lost, and its batch has other v"
    with pytest.raises((LoaderMismatchError, JobFailedError), match=told):
        cluster.run()
    assert cluster.num_killed == 1


def test_a_callback_gives_a_data_set_its_number_again():
    expected = undisturbed(partial(scaled, ScalesAgain))
    settings, deaths = SnapshotSettings(every=4), {0: [40]}
    cluster = ThreadCluster(lambda _: scaled(ScalesAgain), NUM_WORKERS, settings, deaths)
    for found in cluster.run():
        assert difference(expected, found) is None


def test_other_batches_may_follow_what_a_save_held(tmp_path: Path):
    def script(folder: Path, *, place: bool = True) -> Any:
        net = plain_net(place=place)
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()})
        model.train(1, batches(), [])
        model.save(folder)
        model.train(1, batches(), [])
        model.load(folder)
        return trained(model, batches(6), 2)

    expected = undisturbed(partial(script, tmp_path / "plain"))
    settings, deaths = SnapshotSettings(every=2), {1: [90]}
    cluster = ThreadCluster(lambda _: script(tmp_path / "cut"), NUM_WORKERS, settings, deaths)
    for found in cluster.run():
        assert difference(expected, found) is None
    assert cluster.num_killed == 1


class Hoarding(nn.Module):
    """Keeps what no snapshot can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = np.zeros(1, dtype=object)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return x * 2


def test_what_no_snapshot_can_hold_is_named_after_the_first_step():
    def script(rank: int) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), gs.opaque(Hoarding(), outputs=torch.empty_like))
        net[0].place("MS_WORKER", 0)
        net[1].place("MS_WORKER", 1)
        model = gs.Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
        x = torch.randn(2, 4)
        for _ in range(4):
            model.train_step(x, x)

    with pytest.raises((StateError, JobFailedError), match=r"Hoarding \(1\) changes.*'seen'"):
        ThreadCluster(script, 2, SnapshotSettings(every=100)).run()


@pytest.mark.parametrize("name", ["drawn_by_code_kept_whole", "remembered_by_a_loss"])
@pytest.mark.parametrize("rank", range(NUM_WORKERS))
def test_what_code_kept_whole_leaves_survives_a_loss_in_any_step(name: str, rank: int):
    """The next worker is lost before there is another snapshot, and the first step counts too."""
    expected = undisturbed(FEATURES[name])
    for at, later in ((5, 12), (40, 14)):
        kills = {rank: [at], (rank + 1) % NUM_WORKERS: [at + later, 20]}
        cluster = ThreadCluster(
            lambda _: FEATURES[name](), NUM_WORKERS, SnapshotSettings(every=3), kills
        )
        for found in cluster.run():
            assert difference(expected, found) is None
        assert cluster.num_killed == 3


class Finished:
    """An object that code makes."""


class Remembers(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.made, self.by_object = where, None, {Finished(): 0}
        self.items = iter(range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "an object":
            self.made = self.made or Finished()
        elif self.where == "a key":
            self.by_object[Finished()] = 1
        elif self.where == "a generator":
            self.made = self.made or torch.Generator()
        return x * 1.5 if x.sum() > 0 else x * 0.5


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("an object", r"changes an attribute of Remembers.*\(it holds a Finished, under 'made'\)"),
        ("a key", r"changes Remembers\.by_object.*\(under a key of Finished\)"),
        ("a generator", r"changes an attribute of Remembers.*\(it holds a Generator, under "),
    ],
)
def test_what_code_kept_whole_leaves_and_nothing_can_write_is_refused(where: str, told: str):
    def script(rank: int) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), Remembers(where))
        net[0].place("MS_WORKER", 0)
        net[1].place("MS_WORKER", 1)
        model = gs.Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(4):
            model.train_step(torch.randn(2, 4), torch.randn(2, 4))

    with pytest.raises((StateError, JobFailedError), match=told):
        ThreadCluster(script, 2, SnapshotSettings(every=100)).run()


def test_a_profile_is_refused_before_it_begins():
    def script(rank: int) -> None:
        net = plain_net(place=True)
        model = gs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
        with pytest.raises(ConfigurationError, match=r"runs with wait_rejoin.*\n.*fail_fast"):
            model.profile()

    ThreadCluster(script, NUM_WORKERS).run()
