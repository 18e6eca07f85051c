"""Parts of a network that are swapped, replaced or written to between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import graphsplit as gs
from recovery_features.parts import all_of, batches, feature, pairs, plain_net, put, trained

Change = Callable[[Any, gs.Model], object]


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def swapped(net: Any, model: gs.Model) -> None:
    net[2] = nn.Linear(8, 8)
    model.optimizer = sgd(net)


def wrapped(net: Any, model: gs.Model) -> None:
    net[2] = nn.Sequential(net[2], nn.Tanh())


def replaced(net: Any, model: gs.Model) -> None:
    net[4].weight = nn.Parameter(torch.eye(8)[:3] * 0.5)
    model.optimizer = sgd(net)


def given_data(net: Any, model: gs.Model) -> None:
    net[2].weight.data = net[2].weight.data * 0.9 + torch.randn(8, 8) * 0.01


def by_script(change: Change) -> None:
    def script(place: bool = True) -> Any:
        net = plain_net(place=place)
        model = gs.Model(net, nn.CrossEntropyLoss(), sgd(net))
        losses = []
        for step, (x, y) in enumerate([*batches(6), *batches(6)]):
            if step in (3, 6):
                change(net, model)
            losses.append(model.train_step(x, y).clone())
        return losses, all_of(model)

    script.__name__ = f"{change.__name__}_by_the_script"
    feature(script)


for _change in (swapped, wrapped, replaced, given_data):
    by_script(_change)


class Replacing(gs.callbacks.Callback):
    """Gives a buffer and a parameter other tensors, twice."""

    def __init__(self, net: Any) -> None:
        self.net = net
        self.step = 0

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        self.step += 1
        if self.step in (3, 5):
            self.net[1].running_mean = torch.full((8,), 0.1 * self.step)
            self.net[4].bias.data = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


@feature
def replaced_by_a_callback(place: bool = True) -> Any:
    net: Any = plain_net(place=place)
    net[1] = nn.BatchNorm1d(8)
    return trained(gs.Model(net, nn.CrossEntropyLoss(), sgd(net)), None, 3, Replacing(net))


class Writing(Dataset[Any]):
    """Writes to parameters, to a number that forward reads, and to a learning rate."""

    def __init__(self, net: Any, model: gs.Model) -> None:
        self.net, self.model = net, model

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if index % 4 == 0:
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter.mul_(0.99)
            self.net[1].p *= 0.9
            self.model.optimizer.param_groups[0]["lr"] *= 0.9
        return pairs()[index]


@feature
def written_to_by_the_data_set(place: bool = True) -> Any:
    net = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), sgd(net))
    return trained(model, DataLoader(Writing(net, model), batch_size=4), 2)


class Weighing(nn.Module):
    """Reads a list, and so does its loss: the same one, or another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.row = [1.0, 0.5]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.third(self.second(torch.tanh(self.first(x))) * self.row[-1])
        return made


class Weighed:
    def __init__(self) -> None:
        self.row = [0.25, 2.0]

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, target) * self.row[-1]


class Sharing(gs.callbacks.Callback):
    """Makes one list of two and two of one, and writes to what the network has."""

    def __init__(self, net: Any, loss_fn: Any) -> None:
        self.net, self.loss_fn = net, loss_fn
        self.step = 0

    def change(self) -> None:
        if self.step % 3 == 0:
            self.net.row = self.loss_fn.row
        if self.step % 3 == 2:
            self.net.row = list(self.net.row)
        self.net.row[-1] *= 0.9
        self.step += 1

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        self.change()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def sharing_lists(place: bool, by_callback: bool) -> Any:
    torch.manual_seed(0)
    net: Any = put(Weighing(), "first", "second", "third", place=place)
    loss_fn = Weighed()
    sharing, model = Sharing(net, loss_fn), gs.Model(net, loss_fn, sgd(net))
    losses: list[Any] = []
    if by_callback:
        losses += trained(model, None, 3, sharing)
    for x, y in () if by_callback else [*batches(4), *batches(6)]:
        sharing.change()
        losses.append(model.train_step(x, y).clone())
    return losses, all_of(model), net.row, loss_fn.row, net.row is loss_fn.row


@feature
def lists_in_one_and_two_places_by_the_script(place: bool = True) -> Any:
    return sharing_lists(place, by_callback=False)


@feature
def lists_in_one_and_two_places_by_a_callback(place: bool = True) -> Any:
    return sharing_lists(place, by_callback=True)
