"""Replicas, and what is beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import graphsplit as gs
from recovery_features.parts import adam, all_of, batches, feature, trained


def normed(ranks: list[int], *, place: bool) -> nn.Module:
    """A body with batch norm and dropout, shared among workers, and a head on the last of them."""
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU()
    )
    net = nn.Sequential(body, nn.Linear(8, 3))
    if place:
        net.place("MS_WORKER", ranks)
        net[1].place("MS_WORKER", ranks[-1])
    return net


@feature
def replicas(place: bool = True) -> Any:
    net = normed([0, 1, 2], place=place)
    model = gs.Model(
        net, nn.CrossEntropyLoss(), adam(net), {"Loss": gs.metrics.Loss()}, microbatches=4
    )
    found = trained(model, is_end=False)
    data = batches(7)
    return found, model.eval(data), model.predict(data), all_of(model)


@feature
def replicas_in_pairs(place: bool = True) -> Any:
    net = normed([2, 0, 1], place=place)
    model = gs.Model(
        net, nn.CrossEntropyLoss(), adam(net), microbatches=4, accumulate=2,
        clip=gs.clip.GlobalNorm(0.1), gradient_order="pairs",
    )  # fmt: skip
    return trained(model, batches(12)), model.last_gradient_norm


@feature
def replicas_that_exchange_once_in_a_step(place: bool = True) -> Any:
    """A step of two batches, the last of an epoch with another number of rows; nine in all."""
    net = normed([1, 2, 0], place=place)
    model = gs.Model(
        net, nn.CrossEntropyLoss(), adam(net), microbatches=4, accumulate=2,
        accumulate_by="microbatch", clip=gs.clip.GlobalNorm(0.1), gradient_order="pairs",
    )  # fmt: skip
    found = trained(model, batches(12, 33))
    losses = [model.train_step(*batch) for batch in list(batches(12, 33))]
    return found, losses, all_of(model), model.last_gradient_norm
