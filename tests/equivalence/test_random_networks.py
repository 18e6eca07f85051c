"""Random networks, cut at random, give the bits of the plain eager loop.

Every network is a list of steps; each step reads values made before it. In CI the same few examples
run every time. ``GS_TEST_LONG=<minutes>`` looks for new ones for about that long.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import batches_of, rows_against_target, splitting_all
from hypothesis import HealthCheck, Phase, assume, event, given, settings
from hypothesis import strategies as st
from simulated.equivalence import assert_same_bits
from simulated.scattered import scattered
from simulated.simulate import Captures
from torch import nn

import graphsplit as gs
from graphsplit.batches.microbatches import split_microbatches

WIDTH = 6
LONG_MINUTES = float(os.environ.get("GS_TEST_LONG") or 0)
LATEST = time.monotonic() + LONG_MINUTES * 60 if LONG_MINUTES else float("inf")

# What a step does with one value, with two, and with a layer of its own. Every value has the shape
# (batch, WIDTH, WIDTH), so that anything can follow anything.
ONE: dict[str, Callable[[Any], Any]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "relu_": lambda x: (x * 0.9).relu_(),
    "in place": lambda x: x.clone().mul_(0.5).add_(1).sigmoid_(),
    "square": lambda x: x * x * 0.1,
    "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "contiguous": lambda x: x.contiguous(),
    "same": lambda x: x.to(torch.float32),
    "flip": lambda x: x.flip(1),
    "narrow": lambda x: x[:, 1:].repeat(1, 2, 1)[:, :WIDTH],
    "expand": lambda x: x.mean(1, keepdim=True).expand(-1, WIDTH, -1),
    "reduce": lambda x: x * torch.tanh(x.sum()) + x.sum(2, keepdim=True) * 0.1,
    "softmax": lambda x: x.softmax(-1),
    "normalise": lambda x: F.layer_norm(x, (WIDTH,)),
    "chunk": lambda x: torch.cat(x.chunk(3, 2)[::-1], 2),
    "unbind": lambda x: torch.stack(x.unbind(1)[1:] + x.unbind(1)[:1], 1),
    "topk": lambda x: x + x.topk(2, -1)[0].sum(-1, keepdim=True),
    "greatest": lambda x: x - x.max(1)[0][:, None],
    "detach": lambda x: x.detach() * 0.5,
    "no grad": lambda x: _without_grad(x),
    "half": lambda x: x.bfloat16().mul(2).float(),
    "wire": lambda x: gs.wire(x, torch.bfloat16),
    "turned wire": lambda x: gs.wire(x.transpose(1, 2), torch.float16),
    "complex": lambda x: torch.fft.fft(x).abs() * 0.1,
    "dropout": lambda x: F.dropout(x, 0.3),
    "noise": lambda x: x + torch.randn_like(x) * 0.1,
    "masked": lambda x: x.masked_fill(x > 1, 0.5),
    "zeros": lambda x: torch.zeros_like(x) + 0.1,
    "matmul": lambda x: torch.matmul(x, x) * 0.1,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "part": lambda x: _write_part(x),
    "rows": lambda x: _write_rows(x),
    "views": lambda x: _write_through_views(x),
    "detached write": lambda x: _write_through_detached(x),
    "own write": lambda x: _read_own_write(x),
    "complex write": lambda x: _write_as_complex(x),
    "dropout_": lambda x: F.dropout(x * 1.5, 0.3, inplace=True),
}
TWO: dict[str, Callable[[Any, Any], Any]] = {
    "add": torch.add,
    "multiply": lambda x, y: x * y * 0.3,
    "subtract": torch.sub,
    "concat": lambda x, y: torch.cat([x, y], 2)[:, :, 2 : WIDTH + 2],
    "weave": lambda x, y: torch.stack([x, y], 3).flatten(2)[:, :, ::2],
    "matmul": lambda x, y: x @ y * 0.2,
    "product": lambda x, y: torch.einsum("bij,bjk->bik", x, y) * 0.1,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "cosine": lambda x, y: x + F.cosine_similarity(x, y, -1)[..., None] * y,
    "attention": lambda x, y: F.scaled_dot_product_attention(x, y, x),
    "add_": lambda x, y: (x * 1.1).add_(y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "like": lambda x, y: x.view_as(y) if x.is_contiguous() else x.reshape(y.shape),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "conv": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "averaging": lambda: Averaging(),
    "dropout": lambda: nn.Dropout(0.3),
    "relu": lambda: nn.ReLU(inplace=True),
    "gru": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
}


def _without_grad(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x.norm() + 1
    return x / scale


def _write_part(x: torch.Tensor) -> torch.Tensor:
    made = x * 2
    made[:, 0] = 1
    made[:, 1:3] += 0.5
    return made


def _write_rows(x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(x)
    for row in range(3):
        made[:, row] = x[:, row].tanh() * (row + 1)
    return made + x


def _write_through_views(x: torch.Tensor) -> torch.Tensor:
    made = x * 1.0
    first, rest, turned = made[:, 0], made[:, 1:], made.transpose(0, 2)
    first.add_(1)
    with torch.no_grad():
        made[:, 2].mul_(0.5)
    made.mul_(1.1)
    rest.sub_(first[:, None] * 0.1)
    turned.add_(torch.rand_like(turned))
    return made + rest.sum(1, keepdim=True) * 0.1


def _write_through_detached(x: torch.Tensor) -> torch.Tensor:
    made = x * 1.0
    detached = made.detach()
    detached.clamp_(-1, 1)
    made.data[:, 0].zero_()
    return made + detached


def _read_own_write(x: torch.Tensor) -> torch.Tensor:
    made = x * 1.0
    made.add_(made)
    made[:, 0].add_(made[:, 1])
    made[:, 1:].sub_(made[:, :-1] * 0.3)
    return made


def _write_as_complex(x: torch.Tensor) -> torch.Tensor:
    made = (x * 1.0).contiguous()
    plane = torch.view_as_complex(made.view(-1, 2))
    made.add_(1)
    plane.mul_(1j)
    return made


class Averaging(nn.Module):
    """Buffers that change in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("latest", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
            self.count += 1
        self.latest = self.latest * 0.9 + self.mean
        self.mean[0] = self.count * 0.01
        return x - self.mean + self.latest * 0.1


@dataclass(frozen=True)
class Step:
    """One step of a random network.

    Attributes:
        kind: ``"one"``, ``"two"``, ``"layer"``, ``"again"`` (an earlier layer) or ``"weight"``
            (a parameter of the network itself).
        name: What to do, or which layer or parameter.
        reads: Which of the latest values to read: 0 is the last one.
    """

    kind: str
    name: str
    reads: tuple[int, int]


class RandomNetwork(nn.Module):
    """The steps as a network. What no later step reads is added to the output, with one exception.

    The last value that nobody read stays unread, so that some operations are for nothing.
    """

    def __init__(self, steps: tuple[Step, ...]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(LAYERS[s.name]() for s in steps if s.kind == "layer")
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.4 for _ in range(2))
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, num_layers = [x, self.first(x)], 0
        for step in self.steps:
            a, b = (values[-1 - index % len(values)] for index in step.reads)
            if step.kind == "one":
                made = ONE[step.name](a)
            elif step.kind == "two":
                made = TWO[step.name](a, b)
            elif step.kind == "weight":
                weight: torch.Tensor = self.weights[step.reads[1] % 2]
                weight = gs.wire(weight, torch.bfloat16) if step.name == "wired" else weight
                made = a @ weight + weight.sum(0) if step.name == "twice" else F.linear(a, weight)
            else:
                if step.kind == "layer":
                    layer, num_layers = self.layers[num_layers], num_layers + 1
                else:
                    layer = self.layers[step.reads[1] % num_layers] if num_layers else self.first
                made = layer(a)
                made = made[0] if isinstance(made, tuple) else made
            values.append(made)
        return values[-1] + values[-2] * 0.5 + values[len(values) // 2]


def steps() -> st.SearchStrategy[Step]:
    reads = st.tuples(st.integers(0, 4), st.integers(0, 4))
    return st.one_of(
        st.builds(Step, st.just("one"), st.sampled_from(sorted(ONE)), reads),
        st.builds(Step, st.just("two"), st.sampled_from(sorted(TWO)), reads),
        st.builds(Step, st.just("layer"), st.sampled_from(sorted(LAYERS)), reads),
        st.builds(Step, st.just("again"), st.just(""), reads),
        st.builds(Step, st.just("weight"), st.sampled_from(["once", "twice", "wired"]), reads),
    )


def drawn(
    examples: int, **strategies: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on so many examples, the same in every run, or on new ones while there is time."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def while_there_is_time(**values: Any) -> None:
            if time.monotonic() > LATEST:
                event("not tried: the time was over")
                return
            test(**values)

        settled = settings(
            max_examples=int(LONG_MINUTES * 60) or examples,
            derandomize=not LONG_MINUTES,
            deadline=None,
            database=None,
            phases=[Phase.generate],  # shrinking takes minutes: one example takes a second
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )(given(**strategies)(while_there_is_time))
        timed: Callable[..., None] = pytest.mark.timeout(0 if LONG_MINUTES else 240)(settled)
        return timed

    return decorate


def runs_in_eager(network: tuple[Step, ...], batch: int, microbatches: int) -> bool:
    """Whether plain PyTorch trains it: some modify in place what autograd still needs.

    That may depend on the number of rows: of one row, a turned view is contiguous already.
    """
    torch.manual_seed(0)
    made = RandomNetwork(network)
    try:
        for pair in batches_of(batch, WIDTH, WIDTH):
            for (inputs, target), _ in split_microbatches(pair, microbatches):
                rows_against_target(made(inputs), target).backward()
    except RuntimeError:
        return False
    return True


@drawn(
    12,
    network=st.lists(steps(), min_size=3, max_size=14).map(tuple),
    batch=st.integers(2, 4),
    microbatches=st.sampled_from([1, 1, 2, 3, 4]),
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "zero_bubble"]),
    placements=st.lists(
        st.tuples(st.integers(0, 10_000), st.integers(2, 5)), min_size=4, max_size=4
    ),
)
def test_random_networks_cut_at_random(
    network: tuple[Step, ...],
    batch: int,
    microbatches: int,
    schedule: str,
    placements: list[tuple[int, int]],
) -> None:
    assume(runs_in_eager(network, batch, microbatches))
    first, *others = scattered(Captures(), placements)
    with splitting_all():
        assert_same_bits(
            lambda: RandomNetwork(network),
            batches_of(batch, WIDTH, WIDTH),
            beside=others,
            loss_fn=rows_against_target,
            microbatches=microbatches,
            schedule=schedule,
            **first,
        )
