"""Replicas that are lost, and other numbers of them, change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recovery_features import FEATURES
from recovery_features.parts import Last, adam, all_of, batches
from recovery_features.replicated import normed
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn

import graphsplit as gs
from graphsplit.errors import JobFailedError
from graphsplit.recovery.settings import SnapshotSettings
from graphsplit.recovery.snapshot.disk import SnapshotFolder

assert threads_as_workers
pytestmark = [
    pytest.mark.usefixtures("threads_as_workers"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]


@pytest.mark.parametrize(
    ("name", "rank", "at"),
    [
        ("replicas", 0, 110),
        ("replicas", 1, 330),  # while replicas evaluate
        ("replicas", 2, 70),
        ("replicas_in_pairs", 0, 140),
        ("replicas_in_pairs", 1, 70),
        ("replicas_in_pairs", 2, 151),
        *(("replicas_that_exchange_once_in_a_step", at % 3, at) for at in range(60, 320, 37)),
    ],
)
def test_a_replica_that_is_lost_twice_comes_back(name: str, rank: int, at: int) -> None:
    state = torch.default_generator.get_state()
    expected = FEATURES[name](place=False)
    torch.default_generator.set_state(state)
    kills, settings = {rank: [at, min(at // 4, 20)]}, SnapshotSettings(every=2)
    cluster = ThreadCluster(lambda _: FEATURES[name](), 3, settings, kills)
    for found in cluster.run():
        assert difference(expected, found) is None
    assert cluster.num_killed == 2


class Saving(gs.callbacks.Callback):
    """Saves in the middle of an epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        if (context.epoch, context.step) == (2, 1):
            context.model.save(self.path)


def script(
    num_replicas: int, *, save: Path | None = None, load: Path | None = None, **options: Any
) -> Any:
    """Two epochs of three batches in 4 microbatches, the last one ragged."""
    net = normed(list(range(num_replicas)), place=num_replicas > 0)
    options = {"microbatches": 4, "gradient_order": "pairs", **options}
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), **options)
    if load is not None:
        model.load(load)
    last = Last()
    model.train(2, batches(12, 33), [last] if save is None else [last, Saving(save)])
    return last.losses[-2:], all_of(model)


def undisturbed(**options: Any) -> Any:
    state = torch.default_generator.get_state()
    try:
        return script(0, **options)
    finally:
        torch.default_generator.set_state(state)


# Batches 3 and 4 are ragged: parts of a step that are kept, and wait for who goes on with them.
AT_ONCE: dict[str, Any] = {}
KEPT: dict[str, Any] = {"accumulate": 3, "accumulate_by": "microbatch"}


@pytest.mark.parametrize("options", [AT_ONCE, KEPT], ids=["at once", "kept"])
def test_a_job_goes_on_from_disk_with_other_numbers_of_replicas(
    options: dict[str, Any], tmp_path: Path
) -> None:
    expected = undisturbed(**options)
    settings = SnapshotSettings(every=1, disk_every=1, folder=tmp_path)
    for workers, at in ((3, 140), (2, 60)) if not options else ((3, 90), (2, 30)):
        lost = ThreadCluster(
            lambda _, n=workers: script(n, **options), workers, settings, {1: [at]}
        )
        lost.comes_back, lost.dies_when = False, lambda: bool(SnapshotFolder(tmp_path).numbers())
        with pytest.raises(JobFailedError):
            lost.run()
    for found in ThreadCluster(lambda _: script(4, **options), 4, settings).run():
        assert difference(expected, found) is None


@pytest.mark.parametrize("options", [AT_ONCE, KEPT], ids=["at once", "kept"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_save_in_mid_epoch_is_loaded_by_other_numbers_of_replicas(
    workers: int, options: dict[str, Any], tmp_path: Path
) -> None:
    expected = undisturbed(**options)
    first = ThreadCluster(lambda _: script(3, save=tmp_path, **options), 3, is_recoverable=False)
    assert difference(expected, first.run()[0]) is None
    then = ThreadCluster(
        lambda _: script(workers if workers > 1 else 0, load=tmp_path, **options),
        workers,
        is_recoverable=False,
    )
    for found in then.run():
        assert difference(expected, found) is None
