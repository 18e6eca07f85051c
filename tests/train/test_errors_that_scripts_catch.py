"""An error of network or loss that the script catches: training goes on, as in the plain loop."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alone_helpers import assert_as_alone
from plain_model import PlainModel
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn

import graphsplit as gs
from graphsplit.errors import CaptureError, PlanMismatchError

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")
INPUTS = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(4, 8, 2, generator=torch.Generator().manual_seed(2))
BATCHES = list(zip(INPUTS, TARGETS, strict=True))


class OddError(ValueError):
    """An error of the script's own."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} rows")
        self.size = size


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(4, 5), nn.Dropout(0.0), nn.Linear(5, 2)
        self.calls = 0
        if hasattr(nn.Module, "place"):
            self.first.place("MS_WORKER", 0)
            self.second.place("MS_WORKER", 1)

    def check(self, x: torch.Tensor) -> None:
        if len(x) % 2:
            raise OddError(len(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.check(x)
        made: torch.Tensor = self.second(self.drop(torch.tanh(self.first(x))))
        return made


def mse(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if outputs.shape != target.shape:
        raise KeyError(outputs.shape)
    return F.mse_loss(outputs, target)


BAD: dict[str, tuple[type[Exception], Callable[[Any], Any]]] = {
    "rows": (OddError, lambda batch: (batch[0][:3], batch[1][:3])),
    "width": (RuntimeError, lambda batch: (batch[0][:, :3], batch[1])),
    "targets": (KeyError, lambda batch: (batch[0], batch[1][:, :1])),
}


def train(make: Any, name: str, options: dict[str, Any], drop: float = 0.0) -> Any:
    kind, spoil = BAD[name]
    torch.manual_seed(0)
    net = Net()
    net.drop.p = drop
    model = make(net, mse, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), **options)
    found: list[Any] = []
    for step, batch in enumerate(BATCHES):
        if step != 1:
            with pytest.raises(kind) as caught:
                model.train_step(*spoil(batch))
            found.append(getattr(caught.value, "size", None))
        if name != "targets":
            with pytest.raises(kind):
                model.predict(spoil(batch)[0])
        found.append(model.train_step(*batch).clone())
        found.append(torch.get_rng_state())
    return copy.deepcopy([found, model.state_dict()])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_may_be_skipped(name: str) -> None:
    assert_as_alone(lambda: train(PlainModel, name, {}), lambda: train(gs.Model, name, {}))


class Missing(Net):
    def check(self, x: torch.Tensor) -> None:
        if len(x) % 2:
            raise FileNotFoundError(2, "no such rows", "rows.bin")


class Chained(Net):
    def check(self, x: torch.Tensor) -> None:
        try:
            super().check(x)
        except OddError as error:
            raise LookupError("of another", len(x)) from error


SPOILT = [(Net, "width"), (Missing, "rows"), (Chained, "rows")]


def how_it_is(error: BaseException | None) -> Any:
    """All that a script may decide by."""
    if error is None:
        return None
    lines = [(f.f_code.co_name, n) for f, n in traceback.walk_tb(error.__traceback__)]
    return (
        *(type(error), str(error), repr(error), error.args, vars(error).keys() - {"__notes__"}),
        *(getattr(error, "errno", None), getattr(error, "filename", None), str(lines[-1])),
        *(how_it_is(error.__cause__), how_it_is(error.__context__), error.__suppress_context__),
    )


def sort_out(make: Any, microbatches: int = 1) -> list[Any]:
    """A script that does other things for other errors, in this order."""
    found: list[Any] = []
    for kind, bad in SPOILT:
        torch.manual_seed(0)
        net = kind()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        model = make(net, mse, optimizer, microbatches=microbatches)
        for batch in (BATCHES[0], BAD[bad][1](BATCHES[1]), BATCHES[2]):
            try:
                found.append(model.train_step(*batch).clone())
            except ValueError as error:
                found.append(("a value", how_it_is(error)))
            except RuntimeError as error:
                found.append(("a shape", how_it_is(error)))
            except (OSError, LookupError) as error:
                found.append(how_it_is(error))
                found.append(pickle.loads(pickle.dumps(error)).args)
    return found


@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_error_is_that_of_eager_mode(microbatches: int) -> None:
    def run(make: Any) -> Callable[[], Any]:
        return lambda: sort_out(make, microbatches)

    assert_as_alone(run(PlainModel), run(gs.Model))


def own_loop(distribute: Callable[[nn.Module], Any]) -> Any:
    torch.manual_seed(0)
    net = distribute(Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    found: list[Any] = []
    for batch in (BATCHES[0], BAD["rows"][1](BATCHES[1]), BAD["width"][1](BATCHES[2]), BATCHES[3]):
        try:
            loss = mse(net(batch[0]), batch[1])
        except (OddError, RuntimeError) as error:
            found.append((type(error), str(error), error.args, str(error.__cause__)))
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_so_it_is_in_a_loop_of_the_scripts_own() -> None:
    assert_as_alone(lambda: own_loop(lambda net: net), lambda: own_loop(gs.distribute))


class Tells(Net):
    def check(self, x: torch.Tensor) -> None:
        if len(x) % 2:
            raise ValueError("odd", x)


def test_an_error_that_holds_a_value_ends_the_job() -> None:
    def run(rank: int) -> None:
        net = Tells()
        model = gs.Model(net, mse, torch.optim.SGD(net.parameters(), lr=0.05))
        model.train_step(*BAD["rows"][1](BATCHES[0]))

    with pytest.raises(CaptureError, match="ValueError"):
        ThreadCluster(run, 2, is_recoverable=False).run()


def test_so_may_one_of_several_microbatches() -> None:
    """The generator is left where the loop of the documents leaves it, and gradients are reset."""

    def run() -> Any:
        return train(gs.Model, "width", {"microbatches": 4}, drop=0.3)

    assert_as_alone(run, run)


class Counting(Net):
    """Something has changed before the error comes."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.register_buffer("seen", torch.zeros(()))
        self.last: Any = None
        self.drop.p = 0.3

    def check(self, x: torch.Tensor) -> None:
        if self.case == "python":
            self.calls += 1
        if self.case == "buffer":
            self.seen += 1
        if self.case == "assigned":
            self.seen = self.seen + 1
        if self.case == "data":
            self.seen.data = self.seen.data + 1
        if self.case == "kept":
            self.last = x.mean() if self.last is None else self.last * 0.5 + x.mean()
        if self.case == "seed":
            torch.manual_seed(3)
        if self.case == "draws":
            self.drop(x)
        super().check(x)


def test_an_error_after_what_cannot_be_captured_ends_the_job() -> None:
    def run(rank: int) -> None:
        net = Counting("seed")
        model = gs.Model(net, mse, torch.optim.SGD(net.parameters(), lr=0.05))
        model.train_step(INPUTS[0][:3], TARGETS[0][:3])

    with pytest.raises(CaptureError, match="sets the random generator"):
        ThreadCluster(run, 2, is_recoverable=False).run()


def test_an_error_where_gradients_are_kept_by_microbatch_ends_the_job() -> None:
    def run(rank: int) -> None:
        net, options = Counting("buffer"), {"microbatches": 2, "accumulate_by": "microbatch"}
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        model = gs.Model(net, mse, optimizer, accumulate=2, **options)
        model.train_step(INPUTS[0][:6], TARGETS[0][:6])

    with pytest.raises(CaptureError, match=r"OddError: 3 rows[\s\S]*cannot go on"):
        ThreadCluster(run, 2, is_recoverable=False).run()


def test_an_error_after_replicas_have_changed_something_ends_the_job() -> None:
    def run(rank: int) -> None:
        net = Normed()
        net.norm.place("MS_WORKER", [0, 1])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        model = gs.Model(net, Late(1), optimizer, microbatches=2)
        model.train_step(INPUTS[0][:6], TARGETS[0][:6])

    with pytest.raises(CaptureError, match=r"OddError: 1 rows[\s\S]*cannot go on"):
        ThreadCluster(run, 2, is_recoverable=False).run()


def goes_on(make: Any, net: nn.Module, microbatches: int) -> Any:
    """Errors before the first step, between steps, twice in a row, and of ``predict``."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = make(net, mse, optimizer, microbatches=microbatches)
    found: list[Any] = []
    for step, batch in enumerate(BATCHES):
        for _ in range(2 - step % 2):
            with pytest.raises(OddError) as caught:
                model.train_step(*(part[: 3 * microbatches] for part in batch))
            found.append([str(caught.value), torch.get_rng_state()])
        found.append([model.train_step(*batch).clone(), torch.get_rng_state()])
        if step % 2:
            with pytest.raises(OddError):
                model.predict(batch[0][:3])
        found.append(model.predict(batch[0]))
        found.append(getattr(net, "calls", None))
    return copy.deepcopy([found, model.state_dict()])


@pytest.mark.filterwarnings("ignore:network or loss reads")  # a bad batch takes a capture
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("case", ["python", "buffer", "assigned", "data", "draws", "kept"])
def test_what_runs_before_an_error_counts(case: str, microbatches: int) -> None:
    def run(make: Any) -> Callable[[], Any]:
        def script() -> Any:
            torch.manual_seed(0)
            return goes_on(make, Counting(case), microbatches)

        return script

    assert_as_alone(run(gs.Model if microbatches > 1 else PlainModel), run(gs.Model))


class Late:
    """A loss with an average and a counter, which it raises after."""

    def __init__(self, first_bad: int) -> None:
        self.average: Any = None
        self.calls, self.first_bad = 0, first_bad

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        now = outputs.detach().mean()
        self.average = now if self.average is None else 0.9 * self.average + 0.1 * now
        if len(target) == 3 and self.calls % 2 == self.first_bad:
            raise OddError(self.calls)
        return F.mse_loss(outputs, target) * (1 + self.average)


class Normed(Net):
    """Batch norm and dropout, over two workers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(5), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.drop(self.norm(self.first(x))))
        return made


@pytest.mark.filterwarnings("ignore:network or loss reads")
@pytest.mark.parametrize(("microbatches", "first_bad"), [(1, 1), (2, 1), (2, 0)])
def test_a_loss_may_raise_when_the_network_has_run(microbatches: int, first_bad: int) -> None:
    """In the second microbatch, it may be: the first one has run then, with its gradients."""

    def run(make: Any) -> Callable[[], Any]:
        def script() -> Any:
            torch.manual_seed(0)
            net = Normed()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
            model = make(net, Late(first_bad), optimizer, microbatches=microbatches)
            found: list[Any] = []
            for step, (x, y) in enumerate(BATCHES * 2):
                rows = 3 * microbatches if step % 3 else 8
                try:
                    found.append(model.train_step(x[:rows], y[:rows]).clone())
                except OddError as error:
                    found.append(error.size)
                found.append([model.predict(x), torch.get_rng_state()])
            return copy.deepcopy([found, model.loss_fn.calls, model.state_dict()])

        return script

    assert_as_alone(run(gs.Model if microbatches > 1 else PlainModel), run(gs.Model))


def test_an_error_of_one_worker_alone_ends_the_job() -> None:
    def run(rank: int) -> None:
        net = Net()
        if rank:
            net.check = lambda x: None  # type: ignore[method-assign]
        model = gs.Model(net, mse, torch.optim.SGD(net.parameters(), lr=0.05))
        try:
            model.train_step(INPUTS[0][:3], TARGETS[0][:3])
        except OddError:
            model.train_step(*BATCHES[0])

    with pytest.raises(PlanMismatchError, match=r"raises .*OddError: 3 rows"):
        ThreadCluster(run, 2, is_recoverable=False).run()
