"""In eval and predict each replica reads the batches that it runs, where that is safe."""

from __future__ import annotations

import itertools
import queue
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from own_rows_helpers import Counted as EachRead
from own_rows_helpers import Net, loader_of, made, said
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from torch.utils.data import DataLoader, Dataset

import graphsplit as gs
from graphsplit.errors import LoaderMismatchError

assert threads_as_workers and said
pytestmark = [pytest.mark.usefixtures("threads_as_workers"), pytest.mark.timeout(100)]
NUM_SAMPLES, SIZE, EPOCHS = 90, 8, 3  # eleven batches of 8 rows, and one of 2


class Counted(EachRead):
    """Of so many rows that each replica has batches of its own."""

    def __init__(self) -> None:
        super().__init__(NUM_SAMPLES)


class Order(gs.metrics.Metric):
    """A number that depends on the order of the batches, their targets, and bits of outputs."""

    def reset(self) -> None:
        self.value = 0.0

    def update(self, *, outputs: Any, target: Any, loss: Any, num_samples: int) -> None:
        shown = (outputs * (target + 1).unsqueeze(1)).double().sum()
        self.value = self.value * 0.7 + float(shown) + num_samples

    def compute(self) -> float:
        return self.value


Data = Callable[[], Dataset[Any]]


def metrics() -> dict[str, Any]:
    return {"order": Order(), "loss": gs.metrics.Loss(), "accuracy": gs.metrics.Accuracy()}


def without_loss() -> dict[str, Any]:
    return {"order": Order(), "accuracy": gs.metrics.Accuracy()}


def plain(make: Data, count: Any = metrics) -> Any:
    """The loop in one process, without graphsplit."""
    net, data, found, loss_fn = made().eval(), loader(make()), [], nn.CrossEntropyLoss()
    with torch.no_grad():
        for _ in range(EPOCHS):
            counted = count()
            counted["order"].reset()
            for x, y in data:
                outputs = net(x)
                for metric in counted.values():
                    seen = {"loss": loss_fn(outputs, y), "num_samples": len(y)}
                    metric.update(outputs=outputs, target=y, **seen)
            found.append({name: metric.compute() for name, metric in counted.items()})
    return found


def loader(data: Dataset[Any], **options: Any) -> DataLoader[Any]:
    return loader_of(data, **{"batch_size": SIZE, **options})


def evaluated(
    net: nn.Module, data: DataLoader[Any], count: Any = metrics, **options: Any
) -> list[Any]:
    model = gs.Model(net, nn.CrossEntropyLoss(), None, count(), **options)
    return [model.eval(data) for _ in range(EPOCHS)]


def predicted(net: nn.Module, data: DataLoader[Any], **options: Any) -> list[Any]:
    model = gs.Model(net, nn.CrossEntropyLoss(), None, **options)
    return [model.predict(data) for _ in range(EPOCHS)]


def plain_outputs(make: Data) -> list[Any]:
    """The loop of predict in one process, without graphsplit."""
    net, data = made().eval(), loader(make())
    with torch.no_grad():
        return [[net(x) for x, _ in data] for _ in range(EPOCHS)]


def as_ever(rank: int, make: Data) -> Dataset[Any]:
    return make()


def on(
    workers: int,
    place: Any,
    make: Any,
    look: Any = evaluated,
    for_rank: Any = as_ever,
    **options: Any,
) -> tuple[list[Any], list[int]]:
    """What each worker finds, and how many samples it has read."""
    data: list[Any] = [None] * workers

    def script(rank: int) -> Any:
        data[rank] = for_rank(rank, make)
        net = made()
        place(net)
        return look(net, loader(data[rank], **options))

    found = ThreadCluster(script, workers, is_recoverable=False).run()
    return found, [one.read.qsize() for one in data]


def pair(net: Net) -> None:
    net.place("MS_WORKER", [0, 1])


def uneven(net: Net) -> None:
    net.place("MS_WORKER", [1, 0], rows=(1, 3))


def three(net: Net) -> None:
    net.place("MS_WORKER", [2, 0, 1])


def beside(net: Net) -> None:
    """Metrics are with the head, which runs what others have read."""
    net.body.place("MS_WORKER", [1, 2])
    net.head.place("MS_WORKER", 0)


# The batch that makes the plan, those beside it, a group and one more are read whole.
@pytest.mark.parametrize(
    ("workers", "place", "count", "shares"),
    [
        (2, pair, metrics, [1 / 2, 1 / 2]),
        (2, uneven, metrics, [3 / 4, 1 / 4]),
        (3, three, metrics, [1 / 3, 1 / 3, 1 / 3]),
        (3, beside, metrics, [1, 1 / 2, 1 / 2]),
        (3, beside, without_loss, [0, 1 / 2, 1 / 2]),
    ],
    ids=["pair", "uneven", "three", "loss beside", "metrics beside"],
)
def test_decoding_is_divided(
    workers: int, place: Any, count: Any, shares: Any, said: list[str]
) -> None:
    expected = plain(Counted, count)
    look = partial(evaluated, count=count)
    found, read = on(workers, place, Counted, look)
    for one in found:
        assert difference(expected, one) is None
    (line,) = said
    assert line.startswith("each replica reads its own rows: worker")
    assert line.endswith(", and one of each batch to compare")
    for number, share in zip(read, shares, strict=True):
        own, compared = 2 * NUM_SAMPLES * share, 2 * 12 * (1 - share)
        assert number <= NUM_SAMPLES + own + compared + 5 * SIZE


@pytest.mark.parametrize(
    ("workers", "place", "shares"),
    [
        (2, pair, [1 / 2, 1 / 2]),
        (2, uneven, [3 / 4, 1 / 4]),
        (3, three, [1 / 3, 1 / 3, 1 / 3]),
        (3, beside, [0, 1 / 2, 1 / 2]),
    ],
    ids=["pair", "uneven", "three", "head beside"],
)
def test_decoding_of_predict_is_divided(
    workers: int, place: Any, shares: list[float], said: list[str]
) -> None:
    expected = plain_outputs(Counted)
    found, read = on(workers, place, Counted, predicted)
    for one in found:
        assert difference(expected, one) is None
    (line,) = said
    assert line.startswith("each replica reads its own rows: worker")
    for number, share in zip(read, shares, strict=True):
        own, compared = 2 * NUM_SAMPLES * share, 2 * 12 * (1 - share)
        assert number <= NUM_SAMPLES + own + compared + 5 * SIZE


def split_in_two(net: Net) -> None:
    net.body.place("MS_WORKER", 0)
    net.head.place("MS_WORKER", 1)


@pytest.mark.parametrize("call", ["eval", "predict"])
@pytest.mark.parametrize("place", [pair, split_in_two])
def test_all_go_on_reading_what_a_short_call_has_read(
    call: str, place: Any, said: list[str]
) -> None:
    """Three batches are too few for each replica to run one; no worker has missed them."""

    def look(net: Net, data: DataLoader[Any]) -> Any:
        model = gs.Model(
            *(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters()), metrics()),
            microbatches=2,
        )
        for _ in range(3):
            model.train(1, data)
            getattr(model, call)(data)

    _, read = on(2, place, lambda: EachRead(20), look)
    assert not any("has not read all" in line for line in said)
    assert max(read) <= 6 * 20
    if place is split_in_two:
        assert read == [6 * 20] * 2


def test_an_iterator_of_inputs_is_predicted(said: list[str]) -> None:
    def look(net: Net, data: DataLoader[Any]) -> Any:
        model = gs.Model(net, nn.CrossEntropyLoss(), None)
        batches = (x for x, _ in data)
        return model.predict(itertools.islice(batches, 5)), list(batches)

    found, _ = on(3, three, Counted, look)
    data = loader(Counted())
    batches, net = [x for x, _ in data], made().eval()
    with torch.no_grad():
        expected = [net(x) for x in batches[:5]], batches[5:]
    for one in found:
        assert difference(expected, one) is None
    assert said == []


def test_loaders_of_predict_that_disagree_are_found() -> None:
    def for_rank(rank: int, make: Any) -> Any:
        return Other() if rank else Counted()

    with pytest.raises(LoaderMismatchError, match="or the row that all read has other values"):
        on(2, pair, Counted, predicted, for_rank=for_rank)


def test_a_loader_with_processes_is_divided(said: list[str]) -> None:
    expected = plain(Plain)
    found, _ = on(2, pair, Plain, num_workers=2)
    for one in found:
        assert difference(expected, one) is None
    assert said and said[0].startswith("each replica reads its own rows: worker 0 8 of 16, worker")


class Plain(Dataset[Any]):
    def __init__(self) -> None:
        self.x = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(1))
        self.y = torch.arange(NUM_SAMPLES) % 3
        self.read: Any = queue.SimpleQueue()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.x[index] * 2, self.y[index]

    def __getstate__(self) -> Any:
        return {**vars(self), "read": None}


class Drawing(Counted):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + random.random(), y


class Adding(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.added = 0

    def __getitem__(self, index: int) -> Any:
        self.added += 1
        x, y = super().__getitem__(index)
        return x + self.added, y


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Drawing, "reading a batch draws from Python's random"),
        (Adding, "reading a batch changes"),
    ],
)
def test_whole_batches_are_read_for_a_reason(make: Any, why: str, said: list[str]) -> None:
    def run(work: Callable[[], Any]) -> Any:
        random.seed(0)
        return work()

    expected = run(lambda: plain(make))
    found, read = run(lambda: on(2, pair, make))
    if make is not Drawing:  # threads share Python's generator
        for one in found:
            assert difference(expected, one) is None
    assert said[0].startswith(f"each replica reads whole batches: {why}")
    assert min(read) == EPOCHS * NUM_SAMPLES


def test_whole_batches_are_read_if_the_model_says_so(said: list[str]) -> None:
    look = partial(evaluated, reading="batches")
    found, read = on(2, pair, Counted, look)
    assert difference(plain(Counted), found[1]) is None
    assert said == ['each replica reads whole batches: the Model has reading="batches"']
    assert read == [EPOCHS * NUM_SAMPLES] * 2


class Other(Counted):
    """Other values on one worker, in samples that it alone reads."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return (x if self.read.qsize() < 60 else x + 1), y


def test_loaders_that_disagree_are_found() -> None:
    def for_rank(rank: int, make: Any) -> Any:
        return Other() if rank else Counted()

    with pytest.raises(LoaderMismatchError, match="or the row that all read has other values"):
        on(2, pair, Counted, for_rank=for_rank)


class Lengths(Counted):
    """Samples that look otherwise from some batch on: wider ones."""

    first_wide = 48

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return (x if index < self.first_wide else torch.stack([x, x])), y


class AnyWidth(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.net(x if x.dim() == 2 else x.mean(1))
        return made


@pytest.mark.parametrize("first_wide", [40, 48, 56, 64])
def test_batches_that_look_otherwise_are_read_whole(first_wide: int, said: list[str]) -> None:
    def make() -> Lengths:
        data = Lengths()
        data.first_wide = first_wide
        return data

    def look(net: Net, data: Any, **options: Any) -> Any:
        wide = AnyWidth(net)
        return evaluated(wide, data)

    net = AnyWidth(made()).eval()
    with torch.no_grad():
        metric = Order()
        metric.reset()
        for x, y in DataLoader(make(), SIZE):
            metric.update(outputs=net(x), target=y, loss=None, num_samples=len(y))
        found = [metric.compute()] * EPOCHS
    got, _ = on(2, pair, make, look, shuffle=False)
    for one in got:
        assert [epoch["order"] for epoch in one] == found
    assert "look otherwise from one to the next" in said[-1]
