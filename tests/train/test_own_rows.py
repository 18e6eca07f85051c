"""Each replica reads its own rows of a loader's batches where that is safe, in the loop's bits."""

from __future__ import annotations

import os
import queue
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from own_rows_helpers import (
    EPOCHS,
    NUM_SAMPLES,
    PARTS,
    SIZE,
    Counted,
    loader_of,
    made,
    on,
    plain,
    said,
    whole,
    with_head,
)
from recovery_features.parts import Last, adam
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import graphsplit as gs
from graphsplit.batches.microbatches import Divider
from graphsplit.batches.rows import BatchRequest, RowLayout, divide_rows
from graphsplit.batches.signature import split_batch
from graphsplit.errors import ConfigurationError, LoaderMismatchError
from graphsplit.recovery.settings import SnapshotSettings
from graphsplit.settings import GO_ON, WAIT_REJOIN

assert threads_as_workers and said
pytestmark = [pytest.mark.usefixtures("threads_as_workers"), pytest.mark.timeout(100)]


def num_read(data: Counted) -> int:
    return data.read.qsize()


@pytest.mark.parametrize("workers", [2, 4])
def test_decoding_is_divided(workers: int, said: list[str]) -> None:
    expected = plain(loader_of(Counted()))
    found, data = on(workers, Counted)
    for one in found:
        assert difference(expected, one) is None
    (line,) = said
    parts = ", ".join(f"worker {rank} {SIZE // workers} of {SIZE}" for rank in range(workers))
    assert line == f"each replica reads its own rows: {parts}, and one to compare"
    # Whole: two batches of 16 and one of 13 in the first epoch; then 2 times (16 + 16 + 13) rows.
    own = 2 * NUM_SAMPLES / workers
    for one in data:
        assert NUM_SAMPLES + own - 4 <= num_read(one) <= NUM_SAMPLES + own + 2 * 3 + 4


def test_a_worker_beside_the_replicas_reads_all(said: list[str]) -> None:
    expected = plain(loader_of(Counted()))
    found, data = on(3, Counted, with_head)
    for one in found:
        assert difference(expected, one) is None
    read = [num_read(one) for one in data]
    assert read[0] == EPOCHS * NUM_SAMPLES and max(read[1:]) < 0.75 * read[0]
    assert said == [
        "each replica reads its own rows: worker 0 16 of 16, worker 1 8 of 16, worker 2 8 of 16, "
        "and one to compare"
    ]


class FromPython(Counted):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + random.random(), y


class FromNumPy(Counted):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + np.random.rand(), y


class FromTorch(Counted):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.rand(4), y


class FromItsOwn(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.draws = np.random.default_rng(1)

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + self.draws.normal(), y


class Counting(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.num_read = 0

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        x, y = super().__getitem__(index)
        return x * self.num_read, y


class InLargeArray(Counted):
    """A count that shows in one sample alone."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = np.zeros((1 << 20) + 1, dtype=np.uint8)

    def __getitem__(self, index: int) -> Any:
        self.counts[0] += 1
        x, y = super().__getitem__(index)
        return x * int(self.counts[0]) if index == 7 else x, y


class AfterAnother(Counted):
    """What was read before is kept where Python does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = queue.SimpleQueue()
        self.last.put(0)

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        before = self.last.get()
        self.last.put(index)
        return x + before, y


class AtOnce(Counted):
    """Samples that depend on those beside them."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        samples = [self[index] for index in indices]
        mean = torch.stack([x for x, _ in samples]).mean()
        return [(x - mean, y) for x, y in samples]


class FromFile(Counted):
    """Takes the next byte of an open file, whose position a child shares."""

    def __init__(self) -> None:
        super().__init__()
        self.file = os.memfd_create("samples")
        os.pwrite(self.file, bytes(range(256)), 0)

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + os.read(self.file, 1)[0], y


def normalized(samples: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(samples)
    return x - x.mean(), y


def turned(samples: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(samples)
    return x.t().contiguous().t(), y


_VALUES = "rows that are read by themselves have other values than in the whole batch"


@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (FromPython, {}, "reading a batch draws from Python's random"),
        (FromNumPy, {}, "reading a batch draws from numpy.random"),
        (FromTorch, {}, "reading a batch draws from torch's generator"),
        (FromItsOwn, {}, "reading a batch changes "),
        (Counting, {}, "reading a batch changes "),
        (InLargeArray, {}, "reading a batch changes an attribute of InLargeArray['counts']"),
        (AfterAnother, {}, _VALUES),
        (AtOnce, {}, _VALUES),
        (FromFile, {}, _VALUES),
        (lambda: Subset(Counting(), range(40)), {}, "reading a batch changes an attribute of Coun"),
        (Counted, {"collate_fn": normalized}, _VALUES),
        (Counted, {"collate_fn": turned}, "rows that are read by themselves look otherwise"),
        (Counted, {"num_workers": 1, "in_order": False}, "the loader has in_order=False"),
        (Counted, {"model": {"reading": "batches"}}, 'the Model has reading="batches"'),
    ],
)
def test_whole_batches_are_read_for_a_reason(
    make: Any, options: Any, why: str, said: list[str]
) -> None:
    of_loader = {name: value for name, value in options.items() if name != "model"}
    state = random.getstate(), np.random.get_state()
    random.seed(1)
    np.random.seed(1)
    expected = plain(loader_of(make(), **of_loader))

    def seeded() -> Any:
        random.seed(1)
        np.random.seed(1)
        return make()

    found, data = on(2, seeded, **options)
    random.setstate(state[0])
    np.random.set_state(state[1])
    for one in found:
        assert difference(expected, one) is None
    (line,) = said
    assert line.startswith(f"each replica reads whole batches: {why}")
    if not of_loader.get("num_workers") and isinstance(data[0], Counted):
        assert [num_read(one) for one in data] == [EPOCHS * NUM_SAMPLES] * 2


class Late(Counted):
    """Something happens at one sample, after the leader has decided."""

    def __init__(self, happens: Callable[[], object]) -> None:
        super().__init__()
        self.happens = happens

    def __getitem__(self, index: int) -> Any:
        if index == LATE and self.read.qsize() > NUM_SAMPLES:
            self.happens()
        return super().__getitem__(index)


LATE = 7
_counted = [0]


def count() -> None:
    _counted[0] += 1


@pytest.mark.parametrize(
    ("happens", "what"),
    [
        (random.random, "draws from Python's random"),
        (np.random.rand, "draws from numpy.random"),
        (lambda: torch.rand(()), "draws from torch's generator"),
        (count, "changes _counted"),
    ],
)
def test_what_happens_later_ends_the_job_by_name(happens: Any, what: str) -> None:
    expected = (
        f"reading a batch {what}, while each replica reads its own rows.*Fix: Model.*reading="
    )
    with pytest.raises(ConfigurationError, match=f"(?s){expected}"):
        on(2, lambda: Late(happens))


class HiddenCounter(Counted):
    """From some sample on, what is read depends on how much was read before, which nobody sees."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return (x + 1, y) if self.read.qsize() > 1.6 * NUM_SAMPLES else (x, y)


def test_samples_that_depend_on_what_was_read_are_found() -> None:
    expected = "row that all read has other values.*depends on what was read before it, Model"
    with pytest.raises(LoaderMismatchError, match=f"(?s){expected}"):
        on(2, HiddenCounter, epochs=8)


class Changes(gs.callbacks.Callback):
    """Changes something on one worker, once the loaders were compared."""

    def __init__(self, rank: int, change: Callable[[], object]) -> None:
        self.rank, self.change = rank, change

    def on_epoch_begin(self, context: gs.callbacks.RunContext) -> None:
        if context.epoch == 2 and self.rank == 1:
            self.change()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda loader: loader.generator.manual_seed(4), "its batch has other samples"),
        (lambda loader: loader.dataset.x.add_(1), "the row that all read has other values"),
    ],
)
def test_loaders_that_disagree_are_found(change: Any, what: str) -> None:
    def script(rank: int) -> Any:
        loader, net = loader_of(Counted()), made()
        whole(net, 2)
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), microbatches=PARTS)
        model.train(3, loader, [Changes(rank, lambda: change(loader))])

    with pytest.raises(LoaderMismatchError, match=what):
        ThreadCluster(script, 2, is_recoverable=False).run()


class Tokens(Dataset[Any]):
    """Sequences of three lengths, one after the other."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.read: Any = queue.SimpleQueue()

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        self.read.put(index)
        length = self.lengths[index // SIZE % len(self.lengths)]
        return (torch.arange(length) * (index + 3)) % 11, index % 3


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(16, 8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.tokens(ids).mean(1))
        return made


def reader() -> Reader:
    torch.manual_seed(0)
    return Reader()


@pytest.mark.parametrize(
    ("lengths", "line"),
    [
        ((5,), "each replica reads its own rows: "),
        ((5, 5, 7), "each replica reads whole batches from now on: batches of 16 rows look"),
    ],
)
def test_batches_of_tokens(lengths: Any, line: str, said: list[str]) -> None:
    def run() -> Any:
        net = reader()
        net.place("MS_WORKER", [0, 1])
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), microbatches=PARTS)
        last = Last()
        model.train(2, DataLoader(Tokens(lengths), batch_size=SIZE), [last])
        if len(lengths) == 1:
            assert "Reading of the loader\n  each replica reads its own rows" in model.explain()
        return last.losses, dict(model.state_dict())

    expected = plain(DataLoader(Tokens(lengths), batch_size=SIZE), 2, reader)
    for found in ThreadCluster(lambda _: run(), 2, is_recoverable=False).run():
        assert difference(expected, found) is None
    assert said[-1].startswith(line)


class Masked(Tokens):
    def __getitem__(self, index: int) -> Any:
        ids, target = super().__getitem__(index)
        return ids % 2, target


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = Counted()
        return (data[index] for index in range(NUM_SAMPLES))


def test_a_mask_and_a_stream_are_read_whole(said: list[str]) -> None:
    def run(net: Any, data: Any) -> Any:
        net.place("MS_WORKER", [0, 1])
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), microbatches=PARTS)
        model.train(1, DataLoader(data, batch_size=SIZE))
        return dict(model.state_dict())

    expected = plain(DataLoader(Masked((5,)), batch_size=SIZE), 1, reader)[1]
    for found in ThreadCluster(lambda _: run(reader(), Masked((5,))), 2).run():
        assert difference(expected, found) is None
    assert said == [
        "each replica reads whole batches: a batch holds whole numbers of 0 and 1 alone, which "
        "may be a mask"
    ]
    expected = plain(DataLoader(Streamed(), batch_size=SIZE), 1)[1]
    for found in ThreadCluster(lambda _: run(made(), Streamed()), 2).run():
        assert difference(expected, found) is None
    assert said[1] == (
        "each replica reads whole batches: the data set, a Streamed, has no samples by index"
    )


@pytest.mark.parametrize(("policy", "workers"), [(GO_ON, 3), (WAIT_REJOIN, 2)])
def test_rows_are_read_after_the_loss_of_a_replica(
    policy: str, workers: int, said: list[str]
) -> None:
    """Four epochs; the last worker is lost in the second one."""
    expected = plain(loader_of(Counted()), 4)

    def script(rank: int) -> Any:
        net = made()
        whole(net, workers)
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), microbatches=PARTS)
        last = Last()
        model.train(4, loader_of(Counted()), [last])
        return last.losses, dict(model.state_dict())

    kills = {workers - 1: [150]}
    cluster = ThreadCluster(script, workers, SnapshotSettings(every=2), kills, policy=policy)
    found = [one for one in cluster.run() if one is not None]
    assert cluster.num_killed == 1 and len(found) == workers - (policy == GO_ON)
    for one in found:
        assert difference(expected, one) is None
    assert len(said) == 2 and said[1].count("worker ") == 2


def test_an_epoch_goes_on_in_its_middle_by_rows(tmp_path: Any, said: list[str]) -> None:
    expected = plain(loader_of(Counted()))

    class SaveAt(gs.callbacks.Callback):
        def on_step_end(self, context: gs.callbacks.RunContext) -> None:
            if context.model.position.num_steps == 5:
                context.model.save(tmp_path / "saved")

    def script(workers: int, *callbacks: Any, resumes: bool = False) -> Any:
        net = made()
        whole(net, workers)
        model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), microbatches=PARTS)
        if resumes:
            model.load(tmp_path / "saved")
        last = Last()
        model.train(EPOCHS, loader_of(Counted()), [last, *callbacks])
        return last.losses, dict(model.state_dict())

    ThreadCluster(lambda _: script(2, SaveAt()), 2, is_recoverable=False).run()
    resumed = ThreadCluster(lambda _: script(3, resumes=True), 3, is_recoverable=False).run()
    for losses, state in resumed:
        assert difference(expected[1], state) is None
        assert difference(expected[0][5:], losses[-4:]) is None
    assert len(said) == 2


def test_a_wrong_way_of_reading_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="reading='row'; expected 'rows' or 'batches'"):
        gs.Model(made(), nn.CrossEntropyLoss(), reading="row")  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1, 4, 5, 13, 16])
def test_rows_begin_in_memory_as_they_do_in_the_whole_batch(width: int) -> None:
    """The bits of small products depend on it."""
    draws = torch.Generator().manual_seed(1)
    x, y = torch.randn(21, width, generator=draws), torch.arange(21)
    whole = Divider(5).divide((x, y), has_loss_fn=True)
    layout = RowLayout(whole.shape(), 21, ((0, 2), (1, 3, 4)))
    opening = partial(split_batch, has_loss_fn=True)
    weight, bias = torch.randn(8, width, generator=draws), torch.randn(8, generator=draws)
    for worker, parts in enumerate(layout.needed):
        request = BatchRequest(3, tuple(range(21)), layout, worker, by_rows=True)
        rows = list(request.positions)
        found = divide_rows((x[rows], y[rows]), request, opening)
        assert found is not None
        for part in parts:
            (mine, own_target), (theirs, target) = (d.microbatches[part][0] for d in (found, whole))
            assert mine.data_ptr() % 64 == theirs.data_ptr() % 64
            assert own_target.data_ptr() % 64 == target.data_ptr() % 64
            assert torch.equal(F.linear(mine, weight, bias), F.linear(theirs, weight, bias))
            assert torch.equal(own_target, target)
