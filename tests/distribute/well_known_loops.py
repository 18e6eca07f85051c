"""Loops as well-known public scripts have them, in their idioms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from loop_helpers import Distribute, Loop
from several_networks import layers
from torch import nn
from torch.autograd import Variable
from torch.nn import functional


def old_names(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """``Variable`` of values and of parameters, with a gradient and without; types by name."""
    net = distribute(layers(8, 16, 4, ranks=ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for kind in (torch.DoubleTensor, "torch.HalfTensor", torch.float64, "torch.FloatTensor"):
        out = net(Variable(torch.randn(6, 8)))
        kept, asked = Variable(out), Variable(out.data, requires_grad=True)
        weights = [Variable(p, requires_grad=True) for p in net.parameters()]
        (asked.sigmoid() * kept).sum().backward()
        sum(w.square().sum() for w in weights).backward()
        yield kept.tolist(), kept.requires_grad, asked.grad, [w.grad for w in weights]
        cast = out.type(kind)
        yield cast.tolist(), cast.type(), out.type(), isinstance(out, Variable)
        optimizer.zero_grad()
        loss = functional.mse_loss(cast.type_as(out), kept.type(out.type()))
        (loss + out.square().mean()).backward()
        optimizer.step()
        yield Variable(loss).item(), (out > 0).type(torch.LongTensor).sum().item()
    yield net.state_dict()


def reformed(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Values that are given another form in place."""
    net = distribute(layers(8, 16, 4, ranks=ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        for write in (
            lambda v: v.unsqueeze_(0),
            lambda v: v.t_(),
            lambda v: v.transpose_(0, 1).unsqueeze_(1).squeeze_(1),
        ):
            optimizer.zero_grad()
            out = net(torch.randn(6, 8))
            value = out * 2
            written = write(value)
            assert written is value
            yield tuple(value.shape), value.stride(), len(value), value.dim(), value.tolist()
            loss = (value * torch.arange(24.0).view(value.shape)).mean()
            loss.backward()
            optimizer.step()
            yield loss.item(), [row.sum().item() for row in value]
        value = out.detach().clone()
        yield value.tolist(), value.resize_(3, 8).tolist(), tuple(value.shape)
        found = torch.add(value, 1, out=value.new_empty(0))
        yield tuple(found.shape), found, nn.functional.pad(value.resize_as_(out), (1, 0))
    yield net.state_dict()


def spectral(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Singular values and eigenvalues of weights and features, with a gradient and without."""
    net = distribute(layers(8, 16, 4, ranks=ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    linalg = torch.linalg
    for _ in range(2):
        optimizer.zero_grad()
        out = net(torch.randn(9, 8))
        loss = out.square().mean() + 0.01 * linalg.matrix_norm(net[2].weight, 2)
        loss.backward()
        optimizer.step()
        for value in (out.detach(), *(p.detach() for p in net.parameters() if p.dim() == 2)):
            square = value.T @ value
            yield linalg.svdvals(value), linalg.eigvalsh(square), linalg.matrix_norm(value, 2)
            yield value.norm("nuc"), torch.norm(value, p="nuc"), linalg.norm(value, -2)
            yield linalg.cond(value), linalg.matrix_rank(value), linalg.pinv(value), value.norm()
        yield loss.item(), linalg.svdvals(net[0].weight).detach(), linalg.svdvals(out).detach()
    yield net.state_dict()


LOOPS: tuple[Loop, ...] = (old_names, reformed, spectral)
