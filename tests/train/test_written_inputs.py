"""Forward and loss may write into their inputs: every worker that holds the batch sees it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from alone_helpers import assert_as_alone
from recovery_helpers import threads_as_workers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import graphsplit as gs
from graphsplit.errors import ConfigurationError

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")
INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(16) % 3


def scale(x: torch.Tensor) -> None:
    x.mul_(0.9)


def write_a_column(x: torch.Tensor) -> None:
    x[:, 0] = x[:, 1] * 2


def nothing(x: torch.Tensor) -> None:
    pass


def next_class(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    target.add_(1).remainder_(3)
    return nn.functional.cross_entropy(outputs, target)


class Net(nn.Module):
    def __init__(self, write: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.write, self.name = write, write.__name__  # graphs are kept by plain attributes
        self.first, self.dropout, self.last = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(x)
        return self.last(self.dropout(torch.relu(self.first(x))))


Make = Callable[[tuple[int, int]], gs.Model]


def batches() -> list[Any]:
    return [(INPUTS[:8].clone(), TARGETS[:8].clone()), (INPUTS[8:].clone(), TARGETS[8:].clone())]


def over_the_same_tensors(make: Make) -> Any:
    model, loader, losses = make((0, 1)), batches(), Losses()
    model.train(3, loader, callbacks=[losses])
    found = [model.eval(loader)]
    model.train(1, loader, callbacks=[losses])
    return [losses.seen, found, model.state_dict()]


def over_new_tensors(make: Make) -> Any:
    model, losses = make((0, 1)), Losses()
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), 8, shuffle=True)
    model.train(2, loader, callbacks=[losses])
    return [losses.seen, model.eval(loader), model.state_dict()]


def of_one_worker_then_of_another(make: Make) -> Any:
    loader, losses = batches(), Losses()
    for ranks in ((0, 0), (1, 1), (0, 1)):
        make(ranks).train(2, loader, callbacks=[losses])
    return losses.seen


def passed_again_and_again(make: Make) -> Any:
    model, (batch, _) = make((0, 1)), batches()
    losses = [model.train_step(*batch) for _ in range(3)]
    outputs = [model.predict(batch[0]) for _ in range(2)]
    return [losses, outputs, batch]


class Losses(gs.callbacks.Callback):
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        assert context.loss is not None
        self.seen.append(context.loss.clone())


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    ("write", "loss_fn"),
    [
        (scale, nn.CrossEntropyLoss()),
        (write_a_column, nn.CrossEntropyLoss()),
        (nothing, next_class),
    ],
)
@pytest.mark.parametrize(
    "script",
    [
        over_the_same_tensors,
        over_new_tensors,
        of_one_worker_then_of_another,
        passed_again_and_again,
    ],
)
def test_what_was_written_is_seen_as_in_one_process(script, write, loss_fn, microbatches) -> None:
    check(script, write, loss_fn, microbatches)


def check(script: Any, write: Any, loss_fn: Any, microbatches: int) -> None:
    def run(place: bool) -> Any:
        def make(ranks: tuple[int, int]) -> gs.Model:
            net = Net(write)
            if place:
                net.first.place("MS_WORKER", ranks[0])
                net.last.place("MS_WORKER", ranks[1])
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            metrics = {"Loss": gs.metrics.Loss(), "Accuracy": gs.metrics.Accuracy()}
            return gs.Model(net, loss_fn, optimizer, metrics, microbatches=microbatches)

        torch.manual_seed(0)
        return copy.deepcopy(script(make))

    assert_as_alone(lambda: run(False), lambda: run(True))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_inputs_over_one_memory(microbatches: int) -> None:
    def apart(make: Make, begin: int = 4) -> Any:
        whole = torch.cat((INPUTS[:8], INPUTS[8:]), 1)
        x, y = whole[:, :4], whole[:, begin : begin + 3]
        return [make((0, 1)).train_step(x, y), whole]

    check(apart, scale, nn.MSELoss(), microbatches)
    with pytest.raises(ConfigurationError, match=r"shares memory with another one[^~]*y\.clone"):
        check(functools.partial(apart, begin=1), scale, nn.MSELoss(), microbatches)
