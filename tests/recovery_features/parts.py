"""What all scripts are made of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import graphsplit as gs

FEATURES: dict[str, Callable[..., Any]] = {}


def feature(script: Callable[..., Any]) -> Callable[..., Any]:
    FEATURES[script.__name__] = script
    return script


def pairs(rows: int = 24, columns: int = 4) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(rows, columns, generator=generator)
    return TensorDataset(values, torch.arange(rows) % 3)


def batches(size: int = 8, rows: int = 24) -> DataLoader[Any]:
    return DataLoader(pairs(rows), batch_size=size, shuffle=True)


def put(net: nn.Module, *names: str, place: bool = True) -> nn.Module:
    """Each named module on the next of three workers."""
    for index, name in enumerate(names):
        if place:
            net.get_submodule(name).place("MS_WORKER", index % 3)
    return net


def plain_net(*, place: bool, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, width), nn.Dropout(0.3), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 3),
    )  # fmt: skip
    return put(net, "0", "2", "4", place=place)


def all_of(*models: gs.Model, is_end: bool = True) -> Any:
    """All that a run leaves behind, of every Model.

    A worker that comes back has the generator's state again where the script goes on, not before.
    """
    found: list[Any] = []
    for model in models:
        optimizers = model.optimizer_state_dict()
        for state in optimizers if isinstance(optimizers, list) else [optimizers]:
            state["state"] = dict(sorted(state["state"].items()))
        found += [model.state_dict(), optimizers, model.position]
    return copy.deepcopy([*found, torch.get_rng_state() if is_end else None])


def adam(net: nn.Module, rate: float = 0.02) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=rate)


class Last(gs.callbacks.Callback):
    """Keeps what it sees; all losses that count, whoever was lost."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        assert context.loss is not None
        self.losses.append(context.loss.clone())

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


def trained(
    model: gs.Model,
    loader: Any = None,
    epochs: int = 3,
    *callbacks: gs.callbacks.Callback,
    is_end: bool = True,
) -> Any:
    last = Last()
    model.train(epochs, batches() if loader is None else loader, [last, *callbacks])
    return last.losses, all_of(model, is_end=is_end)
