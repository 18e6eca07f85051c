"""What code kept whole leaves in Python under an own loop, the script finds on every worker."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from loop_helpers import Distribute, assert_same_bits, placed, plain
from recovery_helpers import threads_as_workers
from torch import nn
from torch.nn.utils.prune import l1_unstructured

import graphsplit as gs
from graphsplit.capture.reach.holders import Holder
from graphsplit.errors import ConfigurationError, OwnershipError
from graphsplit.feeding.left_kinds import Known
from graphsplit.feeding.left_values import learned, told

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")

Draw = Callable[[], Any]


def of_torch() -> Draw:
    own = torch.Generator().manual_seed(5)
    return lambda: torch.rand(4, generator=own)


def of_python() -> Draw:
    return random.Random(5).random


def of_numpy() -> Draw:
    own = np.random.default_rng(5)
    return lambda: float(own.random())


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: torch.Tensor, counts: dict[str, int]) -> torch.Tensor:
        context.counts = counts
        return values * 0.5

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.counts["backward"] += 1
        return gradient * 0.5, None


class Whole(nn.Module):
    def __init__(self, counts: dict[str, int], draw: Draw | None) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.counts, self.draw = counts, draw

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.counts["forward"] += 1
        hidden = Halved.apply(self.inner(values), self.counts)
        return hidden if self.draw is None else hidden + self.draw() * 0.1


@pytest.mark.parametrize("ranks", [(0, 1, 0), (1, 0, 1)])
@pytest.mark.parametrize("draws", [None, of_torch, of_python, of_numpy])
def test_counters_and_generators(draws: Callable[[], Draw] | None, ranks: tuple[int, ...]) -> None:
    def loop(distribute: Distribute, _: Any) -> Iterator[Any]:
        counts = {"forward": 0, "backward": 0}
        draw = None if draws is None else draws()
        net = nn.Sequential(nn.Linear(6, 8), gs.opaque(Whole(counts, draw)), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(placed(net, list(net), ranks).parameters(), lr=0.01)
        net = distribute(net)
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(torch.randn(5, 6)).square().mean()
            yield dict(counts), draw and draw()
            loss.backward()
            yield dict(counts), draw and draw()
            optimizer.step()
        with torch.no_grad():
            yield net(torch.ones(2, 6)).sum().item(), dict(counts), draw and draw()
        yield net.state_dict()

    assert_same_bits(loop, 2)


@pytest.mark.parametrize("draws", [of_torch, of_python, of_numpy])
def test_generators_that_code_of_a_model_draws_from(draws: Callable[[], Draw]) -> None:
    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        draw = draws()
        net = nn.Sequential(nn.Linear(6, 8), gs.opaque(Whole({"forward": 0, "backward": 0}, draw)))
        optimizer = torch.optim.SGD(placed(net, list(net), ranks).parameters(), lr=0.01)
        model = None if distribute is plain else gs.Model(net, nn.MSELoss(), optimizer)
        for _ in range(3):
            inputs, targets = torch.randn(5, 6), torch.randn(5, 4)
            if model is None:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(net(inputs), targets)
                loss.backward()
                optimizer.step()
            else:
                loss = model.train_step(inputs, targets)
            yield float(loss.detach()), draw()
        yield net.state_dict() if model is None else model.state_dict()

    assert_same_bits(loop, 2)


class Late(nn.Module):
    """Changes what it holds from its third call on only, or where the script lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.starts, self.calls = False, 0
        self.counts: dict[str, Any] = {"n": 0, "nested": {"n": [0]}}
        self.seen: list[Any] = []
        self.bag, self.tail, self.table = {0}, deque([0], 3), np.zeros(3)
        self.added = SimpleNamespace(n=0)
        cell = 0

        def count() -> int:
            nonlocal cell
            cell += 1
            return cell

        def told() -> int:
            return cell

        self.count, self.told = count, told

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.starts:
            self.calls += 1
            self.counts["n"] += 1
            self.counts["nested"]["n"][0] += 2
            self.counts[f"call {self.calls}"] = self.calls / 3
            self.seen.append(self.calls)
            self.bag.add(self.calls)
            self.tail.append(self.calls)
            self.table[self.calls % 3] += 0.5
            self.added.n += 1
            self.new = {"made": self.count()}
            self.inner.scale = self.calls * 0.1
        made: torch.Tensor = self.inner(values) * (1 + len(self.seen) * 0.1)
        return made

    def read(self) -> Any:
        return (
            *(self.calls, repr(self.counts), [*self.seen], sorted(self.bag), [*self.tail]),
            *(self.table.tolist(), self.added.n, getattr(self, "new", None), self.told()),
            getattr(self.inner, "scale", None),
        )


@pytest.mark.parametrize("is_rebound", [False, True])
@pytest.mark.parametrize("ranks", [(0, 1, 0), (1, 0, 1)])
def test_what_changes_first_in_a_later_call(ranks: tuple[int, ...], is_rebound: bool) -> None:
    def loop(distribute: Distribute, _: Any) -> Iterator[Any]:
        late = Late()
        net = nn.Sequential(nn.Linear(6, 8), gs.opaque(late), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(placed(net, list(net), ranks).parameters(), lr=0.01)
        net = distribute(net)
        for step in range(5):
            late.starts = step in (2, 3)
            if is_rebound and step == 2:
                late.seen, late.counts["nested"] = [7], {"n": [1]}
            optimizer.zero_grad()
            loss = net(torch.randn(5, 6)).square().mean()
            yield late.read()
            (loss * (1 + late.calls)).backward()
            optimizer.step()
        yield late.read(), net.state_dict()

    assert_same_bits(loop, 2)


def split(inputs: torch.Tensor, targets: torch.Tensor, number: int) -> Any:
    return zip(inputs.tensor_split(number), targets.tensor_split(number), strict=True)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_what_changes_first_in_a_later_step_of_a_model(microbatches: int) -> None:
    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        late = Late()
        net = nn.Sequential(nn.Linear(6, 8), gs.opaque(late))
        optimizer = torch.optim.SGD(placed(net, list(net), ranks).parameters(), lr=0.01)
        is_plain = distribute is plain
        model = (
            None if is_plain else gs.Model(net, nn.MSELoss(), optimizer, microbatches=microbatches)
        )
        inputs, targets = torch.ones(4, 6), torch.zeros(4, 4)
        for step in range(5):
            late.starts = step in (2, 3)
            if model is None:
                optimizer.zero_grad()
                for one, target in split(inputs, targets, microbatches):
                    (nn.functional.mse_loss(net(one), target) / microbatches).backward()
                optimizer.step()
            else:
                model.train_step(inputs, targets)
            yield late.read()
        late.starts = True
        if model is None:
            with torch.no_grad():
                yield net.eval()(inputs), late.read()
        else:
            yield model.predict(inputs), late.read()
        yield net.state_dict() if model is None else model.state_dict()

    assert_same_bits(loop, 2)


class Stats(NamedTuple):
    n: int
    mean: torch.Tensor | None


@dataclass(frozen=True)
class Count:
    n: int = 0


class Keeping(nn.Module):
    """Keeps tensors and objects that each call makes anew, and tensors that it writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.stats, self.count = Stats(0, None), Count()
        self.seen: list[torch.Tensor] = []
        self.average, self.rebound = torch.zeros(4), torch.zeros(())

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(values)
        if not hasattr(self, "lazy"):
            self.lazy = torch.zeros(())
        self.lazy.add_(made.detach().sum())
        self.average.mul_(0.9).add_(made.detach().mean(0))
        self.rebound = 0.9 * self.rebound + made.detach().mean()
        self.seen.append(made.detach().max())
        self.stats = Stats(self.stats.n + 1, made.detach().min())
        self.count = replace(self.count, n=self.count.n + 2)
        self.aux = made.mean()
        return made * (1 + self.average)

    def read(self) -> Any:
        assert self.stats.mean is not None
        read = (self.lazy, self.average, self.rebound, *self.seen, self.stats.mean)
        return [one.tolist() for one in read], self.stats.n, self.count.n


def test_tensors_and_objects_that_calls_keep() -> None:
    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        keeping = Keeping()
        net = nn.Sequential(nn.Linear(6, 8), gs.opaque(keeping))
        optimizer = torch.optim.SGD(placed(net, list(net), ranks).parameters(), lr=0.01)
        net = distribute(net)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()
            yield keeping.read()
            with torch.no_grad():
                yield net(torch.ones(2, 6)).sum().item(), keeping.read()
        yield net.state_dict()

    assert_same_bits(loop, 2)


def test_a_tensor_with_a_history_is_not_read_elsewhere() -> None:
    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        keeping = Keeping()
        net = nn.Sequential(nn.Linear(6, 8), gs.opaque(keeping))
        placed(net, list(net), ranks)
        distribute(net)(torch.randn(5, 6))
        yield float(keeping.aux.detach())

    with pytest.raises(OwnershipError, match="has a history"):
        assert_same_bits(loop, 2)


class Part:
    def __init__(self, n: int) -> None:
        self.n = n


class Best:
    """The first one is made in a step."""

    def __init__(self, value: float, step: int) -> None:
        self.value, self.steps = value, [step]


class Choosing(nn.Module):
    """Goes from one of its objects to another, and makes new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.parts, self.rows = [Part(1), Part(2), Part(3)], [[1], [2], [3]]
        self.part, self.row = self.parts[0], self.rows[0]
        self.other: Part | None = None
        self.best: Best | None = None
        self.seen, self.one = [0], {"n": 1}
        self.same = self.one
        self.step = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(values)
        self.step += 1
        self.part, self.row = self.parts[self.step % 3], self.rows[self.step % 3]
        self.part.n += 1
        self.row.append(self.step)
        self.seen = [*self.seen, self.step]
        if self.step == 2:
            self.other = self.parts[1]
            self.one = {"n": 5}
        self.one["n"] += 1
        value = made.sum().item()
        if self.best is None or value < self.best.value:
            self.best = Best(value, self.step)
        self.best.steps.append(self.step)
        return made * self.part.n

    def read(self) -> Any:
        assert self.best is not None
        at = self.step % 3
        return (
            *(
                [part.n for part in self.parts],
                self.part is self.parts[at],
                list(map(len, self.rows)),
            ),
            *(self.row is self.rows[at], self.other is self.parts[1], list(self.seen)),
            *(dict(self.one), dict(self.same), self.one is self.same),
            *(self.best.value, list(self.best.steps)),
        )


def test_objects_that_calls_go_between_are_the_same_ones_on_every_worker() -> None:
    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        choosing = Choosing()
        net = nn.Sequential(nn.Linear(6, 8), gs.opaque(choosing))
        optimizer = torch.optim.SGD(placed(net, list(net), ranks).parameters(), lr=0.01)
        net, lists = distribute(net), [choosing.seen]
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.randn(5, 6)).square().mean().backward()
            optimizer.step()
            lists.append(choosing.seen)
            yield choosing.read(), [list(one) for one in lists]
        yield net.state_dict()

    assert_same_bits(loop, 2)


class Logged(nn.Module):
    """Keeps parts of a loss for the script, and does not read them itself."""

    def __init__(self, as_object: bool) -> None:
        super().__init__()
        self.as_object = as_object
        self.parts: Any = None

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss, size = nn.functional.mse_loss(outputs, targets), outputs.square().mean()
        parts = {"loss": loss.item(), "sizes": [size.item(), round(size.item() * 2, 3)]}
        self.parts = Best(parts, 0) if self.as_object else parts  # type: ignore[arg-type]
        return loss + 0.1 * size


Keeps = tuple[Any, Callable[[], Any]]


def _in_a_dictionary() -> Keeps:
    loss_fn = Logged(as_object=False)
    return loss_fn, lambda: loss_fn.parts


def _in_an_object() -> Keeps:
    loss_fn = Logged(as_object=True)
    return loss_fn, lambda: loss_fn.parts.value


def _on_a_function() -> Keeps:
    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        made = nn.functional.mse_loss(outputs, targets)
        kept.last, kept.rows = made.item(), len(outputs)
        return made

    kept: Any = loss_fn
    return loss_fn, lambda: (kept.last, kept.rows)


def _on_a_class() -> Keeps:
    class Kept:
        last: float

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        made = nn.functional.mse_loss(outputs, targets)
        Kept.last = made.item()
        return made

    return loss_fn, lambda: Kept.last


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("keep", [_in_a_dictionary, _in_an_object, _on_a_function, _on_a_class])
def test_numbers_of_values_that_a_loss_leaves_unread(keep: Any, microbatches: int) -> None:
    """They were dropped, or left as what stands for a number while a step is captured."""

    def loop(distribute: Distribute, ranks: Any) -> Iterator[Any]:
        loss_fn, look = keep()
        net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(placed(net, list(net), ranks).parameters(), lr=0.01)
        is_plain = distribute is plain
        model = None if is_plain else gs.Model(net, loss_fn, optimizer, microbatches=microbatches)
        inputs, targets = torch.randn(4, 6), torch.randn(4, 4)
        for _ in range(3):
            if model is None:
                optimizer.zero_grad()
                for one, target in split(inputs, targets, microbatches):
                    (loss_fn(net(one), target) / microbatches).backward()
                optimizer.step()
            else:
                model.train_step(inputs, targets)
            yield look()

    assert_same_bits(loop, 2)


class Asked(nn.Module):
    """Leaves a tensor in a dictionary, and then asks another one for its value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.table: dict[str, torch.Tensor] = {}

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(values)
        self.table["mean"] = hidden.detach().mean(0)
        out: torch.Tensor = self.last(hidden)
        return out * 0.5 if out.sum() > 0 else out


@pytest.mark.filterwarnings("ignore:network or loss reads")
def test_a_tensor_that_is_left_before_a_question() -> None:
    def loop(distribute: Distribute, _: Any) -> Iterator[Any]:
        net = Asked()
        placed(net, [net.first, net.last], (0, 1))
        net = distribute(net)
        for _ in range(4):
            net(torch.randn(5, 6)).sum().backward()
            yield net.table["mean"].tolist(), net.first.weight.grad.tolist()

    assert_same_bits(loop, 2)


def test_a_value_of_an_earlier_call_in_a_module_that_is_kept_whole() -> None:
    """It was none when it was made: pruning has left it, and a hook then keeps the module whole."""

    def loop(distribute: Distribute, _: Any) -> Iterator[Any]:
        net: Any = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
        net = distribute(placed(net, [net[0], net[1]], [0, 1]))
        for step in range(4):
            if step == 1:
                l1_unstructured(net[1], "weight", 3)
            if step == 2:
                net[1].register_full_backward_hook(lambda module, to, by: (to[0] * 0.5,))
            net(torch.randn(4, 5)).sum().backward()
            yield [p.grad.tolist() for p in net.parameters()]

    assert_same_bits(loop, 2)


def test_an_object_that_is_gone_on_another_worker() -> None:
    """It would be None there."""
    thing = Count()
    holders = {"thing": Holder(vars(thing), "thing", lambda: {}, lambda held: None, of=thing)}
    known = Known(holders, "worker 0", "worker 1")
    sent = told(thing, known)
    assert learned(sent, None, "", known) is thing
    del thing
    gc.collect()
    with pytest.raises(ConfigurationError, match="nobody holds any more on worker 1"):
        learned(sent, None, "", known)
