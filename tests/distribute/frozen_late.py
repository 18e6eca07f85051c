"""Loops that freeze parameters between a network's call and ``backward()``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from loop_helpers import Distribute, Loop, placed
from several_networks import layers
from torch import nn
from torch.nn import functional


class Tied(nn.Module):
    """Uses one weight in two layers, on two workers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass through the first layer's weight once more, beside the second layer's bias."""
        x = self.norm(torch.relu(self.first(x)))
        x = torch.relu(self.second(x))
        return self.last(functional.linear(x, self.first.weight, self.second.bias))


def _tied(distribute: Distribute, ranks: list[int]) -> Any:
    net = Tied()
    return distribute(placed(net, [net.first, net.norm, net.second, net.last], ranks))


def toggled(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A GAN that freezes the other network once its loss has been computed, as a toggle does."""
    generator = layers(4, 16, 8, ranks=ranks, end=nn.Tanh())
    judge = layers(8, 16, 16, 1, ranks=ranks[::-1])
    its, own = (torch.optim.Adam(net.parameters(), lr=0.01) for net in (generator, judge))
    generator, judge = distribute(generator), distribute(judge)
    for _ in range(3):
        fake, real = generator(torch.randn(6, 4)), torch.randn(6, 8)
        loss = functional.softplus(-judge(fake)).mean()
        judge.requires_grad_(False)
        its.zero_grad()
        loss.backward()
        its.step()
        yield loss.item(), [p.grad for p in judge.parameters()]
        judge.requires_grad_(True)
        told = functional.softplus(judge(fake.detach())).mean() + functional.softplus(-judge(real))
        generator.requires_grad_(False)
        own.zero_grad()
        told.mean().backward()
        own.step()
        generator.requires_grad_(True)
        yield [p.grad for p in generator.parameters()], [p.grad for p in judge.parameters()]
    yield generator.state_dict(), judge.state_dict(), its.state_dict(), own.state_dict()


def some_frozen(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Some parameters, shared ones too; over one call and several, beside earlier gradients."""
    net = _tied(distribute, ranks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for num_calls in (1, 2):
        for frozen in ("first.weight", "bias", "norm", "second", "."):
            losses = [net(torch.randn(6, 8)).square().mean() for _ in range(num_calls)]
            penalty = net.last.weight.square().sum() if num_calls > 1 else 0
            chosen = [p for name, p in net.named_parameters() if frozen in name]
            for parameter in chosen:
                parameter.requires_grad_(False)
            torch.stack(losses).sum().add(penalty).backward(retain_graph=True)
            losses[0].backward()
            yield [p.grad for p in net.parameters()]
            for parameter in chosen:
                parameter.requires_grad_(True)
            optimizer.step()
            if frozen == "bias":
                optimizer.zero_grad()
    yield net.state_dict(), optimizer.state_dict()


def frozen_between(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Frozen for one of two calls, or thawed too late; inputs, and hooks, which run anyway."""
    net = _tied(distribute, ranks)
    net.first.weight.register_hook(lambda gradient: gradient * 2)
    net.last.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for is_frozen in (True, False):
        x = torch.randn(6, 8, requires_grad=True)
        net.second.requires_grad_(False)
        first = net(x).square().mean()
        net.requires_grad_(not is_frozen)
        first.backward()
        yield x.grad, [p.grad for p in net.parameters()]
        net.first.requires_grad_(True)
        net.second.requires_grad_(True)
        loss = net(x).square().mean()
        net.second.requires_grad_(False)
        yield torch.autograd.grad(loss, (x, net.norm.weight) if not is_frozen else (x,))
        net.requires_grad_(True)
    yield net.state_dict()


LOOPS: tuple[Loop, ...] = (toggled, some_frozen, frozen_between)
