"""Networks whose construction does everything that constructors do, by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8, padding_idx=2)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.head.weight.t()[1].fill_(3)


class RawRandom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(7, 3))
        self.second = nn.Parameter(torch.rand(6).mul(2).add_(1)[1:])
        self.integers = nn.Parameter(torch.randint(0, 9, (4,)), requires_grad=False)
        self.register_buffer("order", torch.randperm(9))
        self.register_buffer("steps", torch.arange(5.0) / 3, persistent=False)
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("full", torch.full((3,), 2.5))
        for piece in self.first.data.chunk(3, 1):
            nn.init.xavier_normal_(piece)
        self.first.data[2:4].copy_(self.first.data[4:6] * 2)


class ReadsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 0.5, 5)]
        self.weight = nn.Parameter(torch.randn(6, 6))
        width = 3 if self.weight.sum().item() > 0 else 5
        self.layer = nn.Linear(width, width)
        self.array = torch.randn(3).numpy()
        self.array *= 2
        self.shared = nn.Parameter(torch.zeros(3))
        self.shared.data.numpy()[:] = self.array
        self.positive = nn.Parameter(torch.randn(9)[torch.randn(9) > 0])
        self.sampled = nn.Parameter(torch.bernoulli(torch.full((4,), 0.5)))
        self.dropped = nn.Parameter(nn.functional.dropout(torch.ones(7)))


class OtherGenerators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.a = nn.Parameter(torch.randn(4, generator=generator))
        self.b = nn.Parameter(torch.randn(4))
        nn.init.normal_(self.a.data[:2], generator=generator)
        with torch.random.fork_rng():
            self.c = nn.Parameter(torch.randn(3))
        torch.manual_seed(11)
        self.d = nn.Parameter(torch.rand(5))
        self.state = torch.get_rng_state()
        self.e = nn.Linear(3, 3)


class RegisteredInAnotherOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        last = nn.Linear(3, 4)
        first = nn.Linear(5, 3)
        nn.init.sparse_(first.weight, 0.4)
        self.first, self.last = first, last
        self.copy = copy.deepcopy(nn.Sequential(last, nn.BatchNorm1d(4)))
        self.double = nn.Linear(3, 3).double()
        self.half = nn.Linear(3, 3).to(torch.bfloat16)


class RunsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(0.5))
        self.head = nn.Linear(self.body(torch.randn(2, 1, 6, 6)).flatten(1).shape[1], 4)


def eye_and_constants() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(3, 3, 3), nn.Linear(3, 5))
    nn.init.eye_(net[0].weight)
    nn.init.constant_(net[0].bias, 0.5)
    nn.init.dirac_(net[1].weight)
    nn.init.kaiming_normal_(net[2].weight)
    nn.init.trunc_normal_(net[2].bias, std=1.0, a=1.0, b=2.0)
    return net


def orthogonal() -> nn.Module:
    net = nn.Sequential(nn.Linear(20, 30), nn.LSTM(4, 4))
    nn.init.orthogonal_(net[0].weight)
    nn.init.orthogonal_(net[1].weight_hh_l0)
    return net


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 7),
    "lenet": LeNet,
    "convolutional": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
    "lstm": lambda: nn.LSTM(5, 6, 2, bidirectional=True, proj_size=3),
    "attention": lambda: nn.MultiheadAttention(16, 4, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(16, 4, 2, 2, 32, batch_first=True),
    "tied": Tied,
    "raw": RawRandom,
    "reads": ReadsValues,
    "generators": OtherGenerators,
    "order": RegisteredInAnotherOrder,
    "runs": RunsItself,
    "constants": eye_and_constants,
    "orthogonal": orthogonal,
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)),
    "orthogonal_parametrization": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 5)),
}
