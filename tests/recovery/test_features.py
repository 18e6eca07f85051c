"""Whatever training offers, a lost worker changes no bit, in memory and from disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recovery_features import FEATURES, plain_net
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn

import graphsplit as gs
from graphsplit.errors import ConfigurationError, JobFailedError, StateError
from graphsplit.testing.compare import difference
from graphsplit.train.recovery.settings import SnapshotSettings

assert threads_as_workers
pytestmark = [
    pytest.mark.usefixtures("threads_as_workers"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
    pytest.mark.timeout(300),
]
NUM_WORKERS = 3
# What a snapshot on disk holds otherwise than one in memory, or what plans anew depend on.
ON_DISK = (
    "accumulated_uneven_microbatches",
    "attributes_left_by_forward",
    "built_later",
    "generators_of_loaders",
    "kept_whole_with_memory",
    "numbers_of_python_and_numpy",
    "sampler_that_counts_epochs",
    "sampler_with_set_epoch",
    "scaled_and_clipped",
    "tied_over_workers",
    "two_models_of_the_same_modules",
    "unfrozen_by_a_callback",
)
MANY_INSTRUCTIONS = ("accumulated_uneven_microbatches", "scaled_and_clipped")  # in a step


def undisturbed(script: Callable[..., Any]) -> Any:
    before = torch.default_generator.get_state()
    expected = script(place=False)
    torch.default_generator.set_state(before)
    return expected


def moment(name: str) -> tuple[int, int]:
    """Which worker dies, and after how many instructions: not always the same."""
    index = sorted(FEATURES).index(name)
    return index % NUM_WORKERS, 9 if name == "first_steps_only" else 32 + index % 20


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


@pytest.mark.parametrize("name", ON_DISK)
def test_a_job_started_again_from_disk_changes_nothing(name: str, tmp_path: Path):
    script = FEATURES[name]
    expected = undisturbed(script)
    settings = SnapshotSettings(every=1, disk_every=1, folder=tmp_path)
    rank, at = moment(name)
    at += 80 * (name in MANY_INSTRUCTIONS)
    lost = ThreadCluster(
        lambda rank: script(), NUM_WORKERS, settings, {rank: [at]}, comes_back=False
    )
    with pytest.raises(JobFailedError):
        lost.run()
    # How much of it is on disk by then is up to the threads that write.
    for found in ThreadCluster(lambda rank: script(), NUM_WORKERS, settings).run():
        assert difference(expected, found) is None


class Hoarding(nn.Module):
    """Keeps what no snapshot can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = np.zeros(1)

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

    with pytest.raises((StateError, JobFailedError), match=r"'1' is kept whole.*'seen'"):
        ThreadCluster(script, 2, SnapshotSettings(every=100)).run()


def test_a_profile_is_refused_before_it_begins():
    def script(rank: int) -> None:
        net = plain_net(place=True)
        model = gs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
        with pytest.raises(ConfigurationError, match=r"runs with wait_rejoin.*\n.*fail_fast"):
            model.profile()

    ThreadCluster(script, NUM_WORKERS).run()
