"""Own rows of replicas whose loaders have processes: the bits of one process, decoding divided."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from own_rows_helpers import (
    EPOCHS,
    NUM_SAMPLES,
    SIZE,
    loader_of,
    made,
    on,
    plain,
    said,
    trained,
    whole,
)
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from torch.utils.data import Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as Reader

import graphsplit as gs
from graphsplit.errors import ConfigurationError

assert threads_as_workers and said
pytestmark = [pytest.mark.usefixtures("threads_as_workers"), pytest.mark.timeout(100)]


@pytest.fixture(autouse=True)
def _no_process_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Model refers to itself, and to a loader whose processes persist.

    What is collected as part of a cycle has closed the line to its processes before it asks them to
    end, so torch waits 5 s for each. Here they are asked first.
    """
    started, begin = [], Reader.__init__

    def noted(reader: Any, loader: Any) -> None:
        started.append(reader)
        begin(reader, loader)

    monkeypatch.setattr(Reader, "__init__", noted)
    yield
    for one in started:
        one._shutdown_workers()
    started.clear()
    gc.collect()


class Counted(Dataset[Any]):
    """Counts what all processes read, in a file."""

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(1)
        self.x = torch.randn(NUM_SAMPLES, 4, generator=draws)
        self.y = torch.arange(NUM_SAMPLES) % 3
        self.file = os.memfd_create("read")

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        os.write(self.file, b"1")  # the position is shared
        return self.x[index] * 2, self.y[index]

    @property
    def num_read(self) -> int:
        return os.fstat(self.file).st_size


class Drawing(Counted):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.rand(4), y


class DrawingLater(Counted):
    """Draws at one sample, once the leader has decided."""

    def __getitem__(self, index: int) -> Any:
        if index == 7 and self.num_read > 2 * NUM_SAMPLES:
            torch.rand(())
        return super().__getitem__(index)


class ChangingLater(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.num_changes = 0

    def __getitem__(self, index: int) -> Any:
        if index == 7 and self.num_read > 2 * NUM_SAMPLES:
            self.num_changes += 1
        return super().__getitem__(index)


def seeded(number: int) -> None:
    torch.manual_seed(number)


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (2, {"num_workers": 2}),
        (3, {"num_workers": 1, "prefetch_factor": 1, "worker_init_fn": seeded}),
        (4, {"num_workers": 1, "persistent_workers": True}),
    ],
)
def test_decoding_is_divided_among_processes(workers: int, options: Any, said: list[str]) -> None:
    expected = plain(loader_of(Counted(), **options))
    found, data = on(workers, Counted, **options)
    for one in found:
        assert difference(expected, one) is None
    line = " ".join(said)
    assert line.startswith("each replica reads its own rows: worker 0")
    # The first epoch is asked for before it is decided; then a part of 45, one row of each batch,
    # and on the leader one batch more, as it was tried.
    for one in data:
        own = (EPOCHS - 1) * (NUM_SAMPLES / workers + 3)
        assert one.num_read <= NUM_SAMPLES + own + 8 + (one is data[0]) * 2 * SIZE


def test_own_rows_begin_in_the_first_epoch(said: list[str]) -> None:
    options: Any = {
        "batch_size": 8,
        "drop_last": True,
        "num_workers": 1,
        "prefetch_factor": 1,
    }
    expected = plain(loader_of(Counted(), **options), 1)
    found, data = on(2, Counted, epochs=1, **options)
    for one in found:
        assert difference(expected, one) is None
    assert len(said) == 1 and data[1].num_read < 0.9 * NUM_SAMPLES


def test_others_have_asked_for_more_or_less(said: list[str]) -> None:
    """Replicas with other numbers of processes have read ahead when the leader decides."""
    expected = plain(loader_of(Counted(), batch_size=8, drop_last=True))

    def script(rank: int) -> Any:
        data = Counted()
        options: Any = {"batch_size": 8, "drop_last": True, "num_workers": (1, 0, 2)[rank]}
        return trained(data, 3, **options), data.num_read

    for found, num_read in ThreadCluster(script, 3, is_recoverable=False).run():
        assert difference(expected, found) is None
        assert num_read < 0.9 * EPOCHS * NUM_SAMPLES
    assert len(said) == 1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Drawing, "reading a batch draws from torch's generator"),
        (lambda: torch.utils.data.Subset(Drawing(), range(40)), "reading a batch draws"),
    ],
)
def test_whole_batches_are_read_by_processes_for_a_reason(
    make: Callable[[], Any], why: str, said: list[str]
) -> None:
    expected = plain(loader_of(make(), num_workers=2))
    found, _ = on(2, make, num_workers=2)
    for one in found:
        assert difference(expected, one) is None
    assert said[0].startswith(f"each replica reads whole batches: {why}")


@pytest.mark.parametrize(
    ("make", "what"),
    [(DrawingLater, "draws from torch's generator"), (ChangingLater, "changes an attribute of")],
)
def test_what_happens_later_in_a_process_ends_the_job_by_name(make: Any, what: str) -> None:
    expected = f"reading a batch {what}.*while each replica reads its own rows.*Fix: Model"
    with pytest.raises(ConfigurationError, match=f"(?s){expected}"):
        on(2, make, num_workers=1, epochs=8)


def test_others_read_whole_batches_of_processes_that_persist(said: list[str]) -> None:
    """The script itself between two epochs of own rows; and predict, which has rows of its own."""

    def script(rank: int) -> Any:
        net = made()
        whole(net, 2)
        model = gs.Model(
            *(net, nn.CrossEntropyLoss(), torch.optim.Adam(net.parameters())),
            microbatches=4,
        )
        loader = loader_of(Counted(), num_workers=1, persistent_workers=True, shuffle=False)
        found = []
        for _ in range(3):
            model.train(1, loader)
            found.append([len(x) for x, _ in loader])
            found.append([len(y) for y in model.predict(loader)])
        return found

    for found in ThreadCluster(script, 2, is_recoverable=False).run():
        assert found == [[16, 16, 13]] * 6
    rows = "each replica reads its own rows: worker 0"
    assert [line.split(",")[0] for line in said] == [f"{rows} 8 of 16", f"{rows} 16 of 32"]
