"""A program that calls functions on a Ray cluster: ADDRESS RESOURCES."""

from __future__ import annotations

import sys

import torch
from torch import nn

import graphsplit as gs
from graphsplit.integrations import ray as on_ray

State = dict[str, torch.Tensor]


def made() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 2))


def train(steps: int) -> tuple[torch.Tensor, State]:
    network = made()
    network[0].place("MS_WORKER", gs.get_world_size() - 1)
    network[3].place("MS_WORKER", 0)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    model = gs.Model(network, nn.CrossEntropyLoss(), optimizer)
    for _ in range(steps):
        loss = model.train_step(torch.randn(16, 8), torch.randint(2, (16,)))
    return loss, model.state_dict()


def plainly(steps: int) -> tuple[torch.Tensor, State]:
    network = made()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        inputs, target = torch.randn(16, 8), torch.randint(2, (16,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(inputs), target)
        loss.backward()
        optimizer.step()
    return loss.detach(), network.state_dict()


def fail() -> None:
    if gs.get_rank() == 1:
        raise FileNotFoundError("no such thing")
    gs.barrier()


if __name__ == "__main__":
    where = {"address": sys.argv[1], "resources": sys.argv[2]}
    torch.manual_seed(0)
    results = on_ray.run(train, 2, (5,), **where)
    torch.manual_seed(0)
    wanted_loss, wanted = plainly(5)
    for own_loss, own in results:
        same = torch.equal(own_loss, wanted_loss) and own.keys() == wanted.keys()
        print("equal", same and all(torch.equal(own[name], wanted[name]) for name in wanted))
    try:
        on_ray.run(fail, 2, **where)
    except FileNotFoundError as error:
        print("raised", error)
