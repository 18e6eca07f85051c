"""What calls there are."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import graphsplit as gs
from graphsplit.job import joined
from recovery_features.parts import adam, all_of, batches, feature, plain_net, put, trained


@feature
def two_models_in_turn(place: bool = True) -> Any:
    """Two networks that train each other, as those of a GAN."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
    judge = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    put(maker, "0", "2", place=place)
    put(judge, "2", "0", place=place)
    score = nn.BCEWithLogitsLoss()
    making = gs.Model(maker, nn.MSELoss(), adam(maker))
    judging = gs.Model(judge, score, torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.5))
    found: list[Any] = []
    for real, _ in list(batches()) * 3:
        made = making.predict(torch.randn(8, 2))
        found.append(judging.train_step(made, torch.zeros(8, 1)))
        found.append(judging.train_step(real, torch.ones(8, 1)))
        verdict = judging.predict(made)
        found.append(making.train_step(torch.randn(8, 2), real * torch.sigmoid(verdict)))
    return found, all_of(making, judging)


class Adversaries(nn.Module):
    """The maker through the judge: trains what its optimizer has."""

    def __init__(self, maker: nn.Module, judge: nn.Module) -> None:
        super().__init__()
        self.maker, self.judge = maker, judge

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.judge(self.maker(noise))
        return found


@feature
def two_models_of_the_same_modules(place: bool = True) -> Any:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
    judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    put(maker, "0", "2", place=place)
    put(judge, "0", "2", place=place)
    score = nn.BCEWithLogitsLoss()
    judging = gs.Model(judge, score, adam(judge))
    making = gs.Model(Adversaries(maker, judge), score, adam(maker))
    found: list[Any] = []
    for real, _ in list(batches()) * 3:
        found.append(judging.train_step(real, torch.ones(8, 1)))
        found.append(making.train_step(torch.randn(8, 2), torch.ones(8, 1)))
    return found, all_of(making, judging)


@feature
def values_exchanged_between(place: bool = True) -> Any:
    """All workers pass the same values: one process knows what comes of them."""
    net = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    found: list[Any] = []
    for x, y in list(batches()) * 3:
        loss = model.train_step(x, y)
        found.append(gs.all_reduce(loss, "max"))
        found.append(gs.broadcast_object({"rate": [float(loss)]}, src=2 * place))
        found.append(gs.all_gather(x, ranks=[0]).clone())
        found += [gs.broadcast(loss, src=int(place)), gs.reduce(loss, dst=0, op="min", ranks=[0])]
        found += [gs.gather(x, ranks=[0]).clone(), gs.scatter(x, ranks=[0]).clone()]
        x.zero_()  # the script may: what is remembered stays
    return found, all_of(model)


@feature
def evaluation_and_prediction_between(place: bool = True) -> Any:
    net = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()})
    found: list[Any] = []
    for x, y in list(batches()) * 2:
        found.append(model.train_step(x, y))
        found.append(model.predict(x + torch.rand(1)))
        found.append(model.eval(batches()))
        if len(found) == 9:
            kept = copy.deepcopy((model.state_dict(), model.optimizer_state_dict()))
    part = {("unknown" if key == "0.bias" else key): value for key, value in kept[0].items()}
    found.append(model.load_state_dict(part, strict=False))
    model.load_optimizer_state_dict(kept[1])
    for x, y in batches():
        found.append(model.train_step(x, y))
    return found, all_of(model)


@feature
def changed_between_calls(place: bool = True) -> Any:
    """The script itself writes to a parameter, on the worker that has it."""
    net: Any = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    losses = []
    for x, y in list(batches()) * 3:
        losses.append(model.train_step(x, y))
        if joined.get_rank() == 1 or not place:
            with torch.no_grad():
                net[2].weight.clamp_(-0.1, 0.1)
    return losses, all_of(model)


class Averages(gs.callbacks.Callback):
    """A running mean of what lives here; its own state is what it knows."""

    def __init__(self) -> None:
        self.means: dict[str, torch.Tensor] = {}

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        for name, value in context.owned_parameters():
            mean = self.means.setdefault(name, torch.zeros_like(value).detach())
            mean.lerp_(value.detach(), 0.1)

    def on_train_end(self, context: gs.callbacks.RunContext) -> None:
        with torch.no_grad():
            for name, value in context.owned_parameters():
                value.copy_(self.means[name])

    def state_dict(self) -> dict[str, Any]:
        return {"means": dict(self.means)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means = dict(state["means"])


@feature
def callback_that_keeps_what_lives_here(place: bool = True) -> Any:
    net = plain_net(place=place)
    return trained(gs.Model(net, nn.CrossEntropyLoss(), adam(net)), None, 3, Averages())


class Late(gs.callbacks.Callback):
    """Has no state before it has seen something."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        if context.epoch == 2:
            self.seen["count"] = self.seen.get("count", 0) + 1

    def state_dict(self) -> dict[str, Any]:
        return dict(self.seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = dict(state)


@feature
def callback_whose_state_begins_late(place: bool = True) -> Any:
    net = plain_net(place=place)
    late = Late()
    found = trained(gs.Model(net, nn.CrossEntropyLoss(), adam(net)), None, 3, late)
    return found, late.seen
