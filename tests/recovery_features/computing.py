"""How a step is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import graphsplit as gs
from recovery_features.parts import adam, all_of, batches, feature, pairs, plain_net, put, trained


def scheduled(schedule: str, microbatches: int) -> Callable[..., Any]:
    def script(place: bool = True) -> Any:
        net = plain_net(place=place)
        model = gs.Model(
            net, nn.CrossEntropyLoss(), adam(net), microbatches=microbatches, schedule=schedule
        )
        return trained(model)

    script.__name__ = f"schedule_{schedule}"
    return feature(script)


for _name in ("1f1b", "gpipe", "zero_bubble"):
    scheduled(_name, 3)


@feature
def schedule_interleaved_1f1b(place: bool = True) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    put(net, *"012345", place=place)
    model = gs.Model(
        net, nn.CrossEntropyLoss(), adam(net), microbatches=4, schedule="interleaved_1f1b"
    )
    return trained(model)


@feature
def schedule_auto(place: bool = True) -> Any:
    net = plain_net(place=place)
    model = gs.Model(
        net, nn.CrossEntropyLoss(), adam(net), microbatches=2, schedule="auto", accumulate=2
    )
    return trained(model, None, 5)


@feature
def accumulated_uneven_microbatches(place: bool = True) -> Any:
    net = plain_net(place=place)
    model = gs.Model(
        net, nn.CrossEntropyLoss(), adam(net), microbatches=4, accumulate=3,
        clip=gs.clip.GlobalNorm(0.1), gradient_order="pairs",
    )  # fmt: skip
    found = trained(model, batches(10))
    return found, model.last_gradient_norm


@feature
def accumulated_zeros(place: bool = True) -> Any:
    net = plain_net(place=place)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = gs.Model(
        net, nn.CrossEntropyLoss(), optimizer, accumulate=2, set_to_none=False,
        clip=gs.clip.Value(0.01),
    )  # fmt: skip
    losses = [model.train_step(x, y) for _ in range(3) for x, y in batches(8)]
    return losses, all_of(model)


class Exploding(nn.Module):
    """A loss that is infinite for one batch."""

    def forward(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(outputs, target)
        return loss * torch.where(target[0] == 1, torch.inf, 1.0)


@feature
def scaled_and_clipped(place: bool = True) -> Any:
    net = plain_net(place=place)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    model = gs.Model(
        net, Exploding(), adam(net), scaler=scaler, clip=gs.clip.GlobalNorm(0.5), microbatches=2
    )
    found = trained(model)
    return found, scaler.state_dict(), model.last_gradient_norm


@feature
def autocast(place: bool = True) -> Any:
    net = plain_net(place=place)
    return trained(gs.Model(net, nn.CrossEntropyLoss(), adam(net), autocast=torch.bfloat16))


@feature
def compiled(place: bool = True) -> Any:
    net = plain_net(place=place)
    options = {"backend": "eager"}
    return trained(gs.Model(net, nn.CrossEntropyLoss(), adam(net), compile=options))


@feature
def recomputed(place: bool = True) -> Any:
    net = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), recompute=True, microbatches=2)
    return trained(model)


@feature
def sizes_that_change(place: bool = True) -> Any:
    net = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), dynamic_dims={0: 32})
    data = [pairs()[:size] for size in (8, 5, 7, 8, 3)]
    return trained(model, data, 2)


class Remembering(nn.Module):
    """Keeps tensors where the script had some."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.memory = {"mean": torch.ones(8)}
        self.notes: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) + 0.1 * self.memory["mean"]
        self.memory = {**self.memory, "mean": hidden.detach().mean(0)}
        found: torch.Tensor = self.second(hidden)
        return found


@feature
def kept_where_the_script_had_tensors(place: bool = True) -> Any:
    torch.manual_seed(0)
    net: Any = put(Remembering(), "first", "second", place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net))
    found: list[Any] = []
    for epoch in range(2):
        net.notes = [torch.full((2,), epoch)]  # no step reads it
        for x, y in batches():
            found.append(model.train_step(x, y))
    return found, all_of(model), net.notes
