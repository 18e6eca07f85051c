"""Replicas evaluate different batches at once; metrics and outputs are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from torch import nn
from torch.utils.data import DataLoader, Dataset

import graphsplit as gs
from graphsplit.errors import ConfigurationError, JobFailedError
from graphsplit.program.instruction import Opcode
from graphsplit.runtime.runner import ProgramRunner

assert threads_as_workers
pytestmark = [pytest.mark.usefixtures("threads_as_workers"), pytest.mark.timeout(200)]


class Net(nn.Module):
    """Batch norm and dropout, which evaluation leaves as they are; gives a tuple and a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.body(x)
        return self.head(hidden), {"hidden": hidden, "sum": hidden.sum(1)}


def loss_fn(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs[0], target) + outputs[1]["sum"].mean()


class Noisy(Dataset[Any]):
    """Samples that the default generator changes each time; notes which were asked for."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.values = torch.randn(size, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index] + 0.1 * torch.rand(4), index % 3


class Order(gs.metrics.Metric):
    """A number that depends on the order of the batches, and on every bit of the outputs."""

    needs_loss = True

    def reset(self) -> None:
        self.seen: list[Any] = []
        self.value = 0.0

    def update(self, *, outputs: Any, target: Any, loss: Any, num_samples: int) -> None:
        self.seen.append((outputs, target, loss))
        shown = outputs[0].double().sum() + outputs[1]["hidden"].double().sum() + loss.double()
        self.value = self.value * 0.7 + float(shown) + num_samples

    def compute(self) -> float:
        return self.value


def plain(sizes: tuple[int, int]) -> Any:
    """The loops in one process, without graphsplit."""
    torch.manual_seed(0)
    net = Net()
    data = DataLoader(Noisy(sizes[0]), sizes[1], shuffle=True)
    metric, found = Order(), []
    net.eval()
    with torch.no_grad():
        for _ in range(2):
            metric.reset()
            for x, y in data:
                outputs = net(x)
                loss = loss_fn(outputs, y)
                metric.update(outputs=outputs, target=y, loss=loss, num_samples=len(y))
            found.append(metric.compute())
            found.append([net(x) for x, _ in data])
    return found, torch.get_rng_state()


def split(sizes: tuple[int, int], place: Callable[[Any], object]) -> Any:
    torch.manual_seed(0)
    net = Net()
    place(net)
    model = gs.Model(net, loss_fn, None, {"Order": Order()}, microbatches=4)
    data, found = DataLoader(Noisy(sizes[0]), sizes[1], shuffle=True), []
    for _ in range(2):
        found.append(model.eval(data)["Order"])
        found.append(model.predict(data))
    return found, torch.get_rng_state()


def apart(net: Any) -> None:
    net.body.place("MS_WORKER", [1, 2])
    net.head.place("MS_WORKER", [0, 2, 3])


def uneven(net: Any) -> None:
    net.place([1, 0], rows=(1, 3))


def in_process(script: Callable[[], Any]) -> Any:
    before = torch.default_generator.get_state()
    try:
        return script()
    finally:
        torch.default_generator.set_state(before)


@pytest.mark.parametrize("sizes", [(24, 4), (30, 4), (4, 4)], ids=["even", "ragged", "one"])
@pytest.mark.parametrize(
    ("place", "num_workers"),
    [
        (lambda net: None, 1),
        (lambda net: net.place([0, 1]), 2),
        (uneven, 2),
        (lambda net: net.place([2, 0, 1]), 3),
        (apart, 4),
    ],
    ids=["one", "two", "uneven", "three", "apart"],
)
def test_metrics_and_outputs_are_those_of_one_process(
    place: Any, num_workers: int, sizes: tuple[int, int]
) -> None:
    expected = in_process(lambda: plain(sizes))
    cluster = ThreadCluster(lambda _: split(sizes, place), num_workers, is_recoverable=False)
    for found in cluster.run():
        assert difference(expected, found) is None


def test_each_replica_runs_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: dict[int, list[list[int]]] = {0: [], 1: []}
    run = ProgramRunner.run

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        here = [i.microbatch for i in self.instructions if i.opcode is Opcode.FORWARD]
        ran[self._parts.program.worker].append(sorted(set(here)))
        return run(self, *args, **options)

    monkeypatch.setattr(ProgramRunner, "run", noted)
    cluster = ThreadCluster(
        lambda _: split((24, 4), lambda net: net.place([0, 1])), 2, is_recoverable=False
    )
    cluster.run()
    # The first batch makes the plan; the second time, nothing is new.
    first, again = [[0], [0], [0], [0]], [[0], [0], [0]]
    assert ran[0] == 2 * first + 2 * again
    assert ran[1] == 2 * [[], [], [1], [1]] + 2 * [[1], [1], [1]]


class Drawing(Net):
    """Samples in evaluation, too: batches must come one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) + torch.rand(3)


def test_a_network_that_draws_is_evaluated_batch_by_batch() -> None:
    def script(place: bool) -> Any:
        torch.manual_seed(0)
        net = Drawing()
        if place:
            net.place([0, 1])
        data, found = DataLoader(Noisy(12), 4, shuffle=True), []
        if not place:
            net.eval()
            with torch.no_grad():
                return [net(x) for _ in range(2) for x, _ in data], torch.get_rng_state()
        model = gs.Model(net, nn.CrossEntropyLoss())
        for _ in range(2):
            found += model.predict(data)
        return found, torch.get_rng_state()

    expected = in_process(lambda: script(False))
    for found in ThreadCluster(lambda _: script(True), 2, is_recoverable=False).run():
        assert difference(expected, found) is None


class Scaled(nn.Module):
    """Reads a number that anybody may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 3), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factor


class Meddling(gs.metrics.Metric):
    """Changes the network between two batches."""

    def __init__(self, net: Scaled) -> None:
        self.net, self.num_epochs = net, 0

    def reset(self) -> None:
        self.num_epochs += 1

    def update(self, **seen: Any) -> None:
        if self.num_epochs == 2:  # when batches are evaluated together from the first one on
            self.net.factor += 1.0

    def compute(self) -> float:
        return 0.0


def reused(net: Scaled) -> Iterator[Any]:
    x, y = torch.zeros(4, 4), torch.zeros(4, dtype=torch.long)
    for _ in range(4):
        x.add_(1.0)
        yield x, y


def changing(net: Scaled) -> Iterator[Any]:
    for _ in range(4):
        net.factor += 1.0
        yield torch.ones(4, 4), torch.zeros(4, dtype=torch.long)


def writing(net: Scaled) -> Iterator[Any]:
    for _ in range(4):
        if net.layer.bias.numel() == 3:
            with torch.no_grad():
                net.layer.bias.add_(1.0)
        yield torch.ones(4, 4), torch.zeros(4, dtype=torch.long)


def still(net: Scaled) -> Iterator[Any]:
    for _ in range(4):
        yield torch.ones(4, 4), torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize(
    ("batches", "meddles", "why"),
    [
        (reused, False, "the loader writes to a batch that it gave before"),
        (changing, False, "the loader changes what forward reads between two batches"),
        (writing, False, "the loader changes what forward reads between two batches"),
        (still, True, "a metric changes what forward reads between two batches"),
    ],
)
def test_what_reading_ahead_would_change_is_refused_by_name(
    batches: Any, meddles: bool, why: str
) -> None:
    def script(rank: int) -> None:
        torch.manual_seed(0)
        net = Scaled()
        net.place([0, 1])
        metric = Meddling(net) if meddles else gs.metrics.Loss()
        model = gs.Model(net, nn.CrossEntropyLoss(), None, {"metric": metric})
        data = still(net)
        model.eval(data)
        model.eval(batches(net))

    with pytest.raises((ConfigurationError, JobFailedError), match=rf"{why}; replicas evaluate"):
        ThreadCluster(script, 2, is_recoverable=False).run()
