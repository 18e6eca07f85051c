"""Scripts whose workers are killed at any instruction end in the bits of an undisturbed run."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import graphsplit as gs
from graphsplit import api
from graphsplit.errors import ClusterError, JobFailedError, OwnershipError
from graphsplit.job import joined
from graphsplit.recovery import script as recovering
from graphsplit.recovery.script import RecoveringScript
from graphsplit.recovery.settings import SnapshotSettings
from graphsplit.runtime.runner import ProgramRunner
from graphsplit.settings import RESTART

assert threads_as_workers
# Filters of warnings belong to the process: a thread beside compute sees those of a capture.
pytestmark = [
    pytest.mark.usefixtures("threads_as_workers"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]
NUM_WORKERS = 3


def make(*, place: bool = True, **options: Any) -> tuple[gs.Model, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU(),
        nn.Linear(8, 3),
    )  # fmt: skip
    if place:
        for index, rank in ((0, 0), (1, 1), (3, 2), (5, 0)):
            net[index].place("MS_WORKER", rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    metrics = {"Loss": gs.metrics.Loss()}
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer, metrics, **options)
    return model, schedule


def loader() -> Any:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(20, 4, generator=generator), torch.arange(20) % 3)
    return DataLoader(data, batch_size=5, shuffle=True)


def state_of(model: gs.Model) -> Any:
    return model.state_dict(), model.optimizer_state_dict(), torch.get_rng_state()


def epochs(**options: Any) -> Any:
    """Training by ``train``, with evaluation in between and after."""
    model, schedule = make(**options)
    data = loader()
    model.train(2, data, [gs.callbacks.LearningRateScheduler(schedule, "step")])
    first = model.eval(data)
    torch.rand(3)
    model.train(1, data)
    return first, model.eval(data), state_of(model), model.position


def steps(**options: Any) -> Any:
    """A loop of the user's own."""
    model, schedule = make(**options)
    losses = []
    for _ in range(2):
        for inputs, target in loader():
            losses.append(model.train_step(inputs + 0.1 * torch.rand(5, 4), target))
            schedule.step()
            if model.network[0].weight.shape and len(losses) == 5:
                outputs = model.predict(inputs)
    return losses, outputs, state_of(model), model.position


_expected: dict[Any, Any] = {}


def undisturbed(script: Callable[..., Any]) -> Any:
    """What one process returns."""
    if script not in _expected:
        before = torch.default_generator.get_state()
        _expected[script] = script(place=False)
        torch.default_generator.set_state(before)
    return _expected[script]


def run(
    script: Callable[..., Any],
    kills: dict[int, list[int]],
    *,
    settings: SnapshotSettings | None = None,
    together: tuple[int, ...] = (),
) -> ThreadCluster:
    expected = undisturbed(script)
    settings = settings or SnapshotSettings(every=3)
    cluster = ThreadCluster(lambda rank: script(), NUM_WORKERS, settings, kills, together=together)
    for found in cluster.run():
        assert difference(expected, found) is None
    return cluster


@pytest.mark.parametrize("script", [epochs, steps])
def test_snapshots_change_nothing(script: Callable[..., Any]):
    assert run(script, {}).num_killed == 0


@pytest.mark.parametrize("script", [epochs, steps])
@pytest.mark.parametrize("rank", range(NUM_WORKERS))
@pytest.mark.parametrize("at", [0, 25, 60])
def test_a_killed_worker_comes_back_and_the_bits_are_the_same(
    script: Callable[..., Any], rank: int, at: int
):
    assert run(script, {rank: [at]}).num_killed == 1


def test_killed_again_and_again_while_it_comes_back():
    assert run(epochs, {0: [30, 5], 1: [44, 0]}).num_killed == 4


def test_two_workers_killed_at_once_come_back_where_snapshots_are_on_disk(tmp_path: Path):
    settings = SnapshotSettings(every=3, disk_every=3, folder=tmp_path)
    cluster = run(epochs, {1: [40]}, settings=settings, together=(1, 2))
    assert cluster.num_killed == 2
    assert list(tmp_path.iterdir()) == []  # the job has finished


def test_a_worker_lost_with_the_holder_of_its_state_ends_the_job_where_nothing_is_on_disk():
    cluster = ThreadCluster(
        lambda rank: steps(), NUM_WORKERS, SnapshotSettings(every=3), {1: [85]}, together=(1, 2)
    )
    with pytest.raises(ClusterError, match="worker 1 was lost together with worker 2"):
        cluster.run()


def test_nor_does_it_begin_again_within_a_call_whose_beginning_is_forgotten():
    cluster = ThreadCluster(
        lambda rank: epochs(), NUM_WORKERS, SnapshotSettings(every=3), {1: [150]}, together=(1, 2)
    )
    with pytest.raises(ClusterError, match="worker 1 was lost together with worker 2"):
        cluster.run()


def test_what_is_kept_for_recovery_does_not_grow_with_training(tmp_path: Path):
    found: list[Any] = []

    def script(rank: int) -> None:
        model, _ = make()
        model.train(10, loader())
        job = joined.current()
        assert job is not None and isinstance(job.script, RecoveringScript)
        snapshots = job.script._snapshots
        assert snapshots._replicator is not None
        found.append((snapshots._places, snapshots._replicator.held.log))

    ThreadCluster(script, NUM_WORKERS, SnapshotSettings(1, 4, tmp_path)).run()
    for places, log in found:  # of 41 snapshots, eleven on disk; no call but one
        assert 3 <= len(places) <= 6, sorted(places)
        assert len(log) <= 1


KILLED = 1


def runners_there() -> list[ProgramRunner]:
    return [one for one in gc.get_objects() if type(one) is ProgramRunner]


class Runners(gs.callbacks.Callback):
    """Counts what is there of plans, of all generations and of workers that are not killed."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.before = {id(one): one for one in runners_there()}  # of other tests

    def on_rollback(self, context: gs.callbacks.RunContext) -> None:
        runners = [one for one in runners_there() if id(one) not in self.before]
        self.counts.append(sum(runner._parts.program.worker != KILLED for runner in runners))


def test_nothing_is_kept_of_generations_that_are_over():
    watch = Runners()

    def script(rank: int) -> None:
        model, _ = make()
        model.train(8, loader(), [watch] if rank == 0 else [])

    gc.collect()
    gc.disable()  # Python looks for cycles only now and then
    try:
        ThreadCluster(script, NUM_WORKERS, SnapshotSettings(1), {KILLED: [20] * 8}).run()
    finally:
        gc.enable()
    assert len(watch.counts) >= 6
    # Each of the others has that of the new generation, and no more.
    assert max(watch.counts) <= NUM_WORKERS - 1, watch.counts


# Started again as a whole.


def crash(script: Callable[..., Any], folder: Path, *, at: int, workers: int = NUM_WORKERS) -> None:
    settings = SnapshotSettings(every=2, disk_every=2, folder=folder)
    cluster = ThreadCluster(lambda rank: script(), workers, settings, {0: [at]}, comes_back=False)
    cluster.dies_when = lambda: any(folder.glob("*/snapshot.json"))  # threads write it
    with pytest.raises(JobFailedError):
        cluster.run()


def go_on(script: Callable[..., Any], folder: Path, *, workers: int = NUM_WORKERS) -> None:
    expected = undisturbed(script)
    settings = SnapshotSettings(every=2, disk_every=2, folder=folder)
    for found in ThreadCluster(lambda rank: script(), workers, settings).run():
        assert difference(expected, found) is None


@pytest.mark.parametrize("script", [epochs, steps])
def test_a_job_that_is_started_again_goes_on_from_disk(script: Callable[..., Any], tmp_path: Path):
    crash(script, tmp_path, at=80)
    assert list(tmp_path.glob("*/snapshot.json"))
    go_on(script, tmp_path)
    assert list(tmp_path.iterdir()) == []


class Counts(gs.callbacks.Callback):
    """Counts the steps that were really run."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        self.steps += 1


def ruled(num_workers: int, counts: Counts | None = None) -> Any:
    """Placed by a rule that follows the number of workers; 0: not at all."""
    model, schedule = make(place=False)
    for index, name in enumerate(("0", "1", "3", "5")):
        if num_workers:
            model.network.get_submodule(name).place("MS_WORKER", index % num_workers)
    data = loader()
    callbacks = [gs.callbacks.LearningRateScheduler(schedule, "step"), counts or Counts()]
    model.train(3, data, callbacks)
    return model.eval(data), state_of(model)


def test_a_job_goes_on_with_fewer_and_with_more_workers(tmp_path: Path):
    expected = ruled(0)
    for workers, at in ((3, 60), (2, 40)):
        crash(functools.partial(ruled, workers), tmp_path, at=at, workers=workers)
    settings = SnapshotSettings(every=2, disk_every=2, folder=tmp_path)
    counts = [Counts() for _ in range(4)]
    for found in ThreadCluster(lambda rank: ruled(4, counts[rank]), 4, settings).run():
        assert difference(expected, found) is None
    assert len({one.steps for one in counts}) == 1 and 0 < counts[0].steps < 12, counts[0].steps


class Averaging:
    """A loss that keeps an average in a plain attribute."""

    def __init__(self) -> None:
        self.average: torch.Tensor | None = None

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(outputs, target)
        now = loss.detach()
        self.average = now if self.average is None else 0.9 * self.average + 0.1 * now
        return loss / (1 + self.average)


def averaging(*, taken: int = -1, place: bool = True) -> Any:
    """Takes the average of an early step, and goes on from it after later ones."""
    model, _ = make(place=place)
    model.loss_fn = loss_fn = Averaging()
    losses, saved = [], None
    for step, (inputs, target) in enumerate([*loader(), *loader()]):
        losses.append(model.train_step(inputs, target))
        if step == taken:
            saved = loss_fn.average
        if step == 6 and taken >= 0:
            loss_fn.average = saved
    return losses, state_of(model)


def test_a_kept_tensor_that_a_script_took_before_all_began_anew_is_not_gone_on_from(
    tmp_path: Path,
):
    crash(averaging, tmp_path, at=60)
    assert list(tmp_path.glob("*/snapshot.json"))
    with pytest.raises(OwnershipError, match=r"(?s)average.* it is not here"):
        go_on(functools.partial(averaging, taken=0), tmp_path)
    go_on(averaging, tmp_path)


def test_a_kept_tensor_that_a_script_takes_where_all_begin_anew_has_its_value(tmp_path: Path):
    script = functools.partial(averaging, taken=1)
    crash(script, tmp_path, at=50)
    (place,) = tmp_path.glob("*/snapshot.json")
    assert '"ordinal":1,"inside":false' in place.read_text()
    go_on(script, tmp_path)


def test_what_a_script_had_before_it_joined_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """``gc`` finds the tensors and modules whose memory a network shares."""
    role = {"ROLE": "MS_WORKER", "WORKER_NUM": "1", "SCHED_PORT": "1", "SCHED_HOST": "127.0.0.1"}
    for name, value in role.items():
        monkeypatch.setenv(f"MS_{name}", value)
    monkeypatch.setattr(recovering, "RecoveringScript", lambda *arguments: arguments)
    mine = torch.nn.Linear(2, 2)
    job: Any = SimpleNamespace(recovery_policy=RESTART, script=None)

    api._install_recovery(job)

    assert job.script
    assert any(one is mine for one in gc.get_objects())
