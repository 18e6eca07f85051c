"""What steps it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import graphsplit as gs
from recovery_features.parts import adam, all_of, batches, feature, plain_net, trained


@feature
def several_optimizers_and_groups(place: bool = True) -> Any:
    net: Any = plain_net(place=place)
    first = torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(
        [{"params": [net[2].weight]}, {"params": [net[2].bias], "lr": 0.3}], amsgrad=True
    )
    third = torch.optim.Adagrad(net[4].parameters(), lr=0.05)
    model = gs.Model(net, nn.CrossEntropyLoss(), [first, second, third])
    return trained(model)


@feature
def groups_that_are_added(place: bool = True) -> Any:
    net: Any = plain_net(place=place)
    for name in ("0", "2"):
        net.get_submodule(name).requires_grad_(False)
    optimizer = torch.optim.SGD(net[4].parameters(), lr=0.1, momentum=0.9)
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer)
    losses = []
    for index, (x, y) in enumerate(list(batches()) * 3):
        if index in (4, 5):
            module = net[2] if index == 4 else net[0]
            module.requires_grad_(True)
            optimizer.add_param_group({"params": list(module.parameters()), "lr": 0.01 * index})
        losses.append(model.train_step(x, y))
    return losses, all_of(model)


class Unfreezes(gs.callbacks.Callback):
    """Trains the first layer from the second epoch on."""

    def on_epoch_begin(self, context: gs.callbacks.RunContext) -> None:
        if context.epoch == 2 and context.step == 0:
            context.model.network.get_submodule("0").requires_grad_(True)


@feature
def unfrozen_by_a_callback(place: bool = True) -> Any:
    net: Any = plain_net(place=place)
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer)
    return trained(model, None, 3, Unfreezes()), [p.requires_grad for p in net.parameters()]


@feature
def schedulers_of_rates(place: bool = True) -> Any:
    net = plain_net(place=place)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=40)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer, {"Loss": gs.metrics.Loss()})
    data = batches()
    rates = [
        gs.callbacks.LearningRateScheduler(cycle, "step"),
        gs.callbacks.LearningRateScheduler(
            plateau, metric=lambda context: context.model.eval(data)["Loss"]
        ),
    ]
    found = trained(model, data, 3, *rates, is_end=False)
    for x, y in data:
        model.train_step(x, y)
        cycle.step()
    return found, all_of(model), cycle.state_dict(), plateau.state_dict()


@feature
def first_steps_only(place: bool = True) -> Any:
    """Short: deaths fall before or into the first step of a lazy optimizer."""
    net = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    return [model.train_step(x, y) for x, y in batches()], all_of(model)


class Counted:
    """A loss that keeps count of its calls."""

    def __init__(self, by: float) -> None:
        self.by, self.calls = by, 0

    def __call__(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(outputs, target) * (1 + self.by * self.calls)


@feature
def loss_and_optimizer_given_anew(place: bool = True) -> Any:
    net: Any = plain_net(place=place)
    first, second = Counted(0.1), Counted(-0.01)
    model = gs.Model(net, first, adam(net))
    losses = []
    for index, (x, y) in enumerate(list(batches()) * 3):
        if index in (3, 8):
            model.loss_fn = first if index == 8 else second
        if index == 4:
            model.optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        if index == 7:
            model.optimizer = adam(net, 0.01)
        losses.append(model.train_step(x, y))
    return losses, all_of(model), first.calls, second.calls


class Notes(gs.callbacks.Callback):
    """Keeps what it has seen in attributes of the network, which no step reads."""

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        net: Any = context.model.network
        net.steps.append(context.step)
        net.by_epoch[context.epoch] = len(net.steps)
        net.last = (context.epoch, [context.step])


@feature
def attributes_that_no_step_reads(place: bool = True) -> Any:
    net: Any = plain_net(place=place)
    net.steps, net.by_epoch, net.last = [], {}, None
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    first = trained(model, None, 2, Notes())
    net.steps.append("between")
    return first, trained(model, None, 1, Notes()), net.steps, net.by_epoch, net.last


class Flags(gs.callbacks.Callback):
    """Sets an attribute of the network for the script, which puts it back."""

    def on_train_end(self, context: gs.callbacks.RunContext) -> None:
        context.model.network.rounds = (*context.model.network.rounds, context.epoch)


@feature
def attributes_that_a_call_left_before_a_second_model(place: bool = True) -> Any:
    net: Any = plain_net(place=place)
    net.rounds = ()
    first = trained(gs.Model(net, nn.CrossEntropyLoss(), adam(net)), None, 1, Flags())
    model = gs.Model(net, nn.CrossEntropyLoss(label_smoothing=0.1), adam(net))
    found = [trained(model, None, 2, Flags())]
    net.rounds = ()
    return first, *found, trained(model, None, 1), net.rounds
