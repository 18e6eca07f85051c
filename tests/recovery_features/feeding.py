"""What it is fed with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

import graphsplit as gs
from recovery_features.parts import Last, adam, all_of, feature, pairs, plain_net, trained


class Own(Sampler[int]):
    """Another order in every epoch, counted by itself."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(self.length, generator=generator).tolist()

    def __len__(self) -> int:
        return self.length


@feature
def sampler_that_counts_epochs(place: bool = True) -> Any:
    net = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()})
    data = DataLoader(pairs(), batch_size=8, sampler=Own(24))
    found = trained(model, data, 4, is_end=False)
    return found, model.eval(data), trained(model, data, 2)


class SetsEpoch(gs.callbacks.Callback):
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, context: gs.callbacks.RunContext) -> None:
        self.sampler.set_epoch(context.epoch)


@feature
def sampler_with_set_epoch(place: bool = True) -> Any:
    net = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()})
    sampler: Any = torch.utils.data.DistributedSampler(pairs(), 1, 0, seed=3)
    data = DataLoader(pairs(), batch_size=8, sampler=sampler)
    found: list[Any] = [trained(model, data, 3, SetsEpoch(sampler), is_end=False)]
    for epoch in range(10, 13):
        sampler.set_epoch(epoch)
        found.append(model.eval(data))
        sampler.set_epoch(epoch + 10)
        model.train(1, data)
    return found, all_of(model)


@feature
def generators_of_loaders(place: bool = True) -> Any:
    """The loaders of training and of evaluation in a callback each have a generator."""
    net = plain_net(place=place)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()})
    data, validation = (
        DataLoader(
            pairs(), batch_size=8, sampler=RandomSampler(
                pairs(), num_samples=16, generator=torch.Generator().manual_seed(seed)
            ),
        )
        for seed in (5, 6)
    )  # fmt: skip

    class Validates(Last):
        def on_step_end(self, context: gs.callbacks.RunContext) -> None:
            self.losses.append(torch.tensor(context.model.eval(validation)["Loss"]))

    validates = Validates()
    model.train(3, data, [validates])
    found = [model.eval(validation), model.eval(data)]
    return validates.losses, found, all_of(model)


class Augmented(Dataset[Any]):
    """Transforms its samples by the numbers of Python and NumPy, as many libraries do."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        x, y = pairs()[index]
        return x * random.random() + float(np.random.rand()) * torch.rand(4), y


@feature
def numbers_of_python_and_numpy(place: bool = True) -> Any:
    net = plain_net(place=place)
    random.seed(3)
    np.random.seed(4)
    model = gs.Model(net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()})
    data = DataLoader(Augmented(), batch_size=8, shuffle=True)
    last = Last()
    model.train(3, data, [last])
    return last.losses, all_of(model, is_end=False), model.eval(data)
