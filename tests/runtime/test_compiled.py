"""Segments that are compiled give what the plain loop gives, within the stated tolerances."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from simulated.simulate import SimulatedCluster
from torch import nn

import graphsplit as gs
from graphsplit.batches.microbatches import Divider
from graphsplit.capture.graph import Mode
from graphsplit.errors import ConfigurationError
from graphsplit.planning.task import Task
from graphsplit.runtime.segments.compiled import compiler_of

needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="left out: torch.compile's own backend needs a C++ compiler",
)


class Branches(nn.Module):
    """Two workers, there and back, with dropout and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16).place("MS_WORKER", 0)
        self.norm = nn.BatchNorm1d(16).place("MS_WORKER", 1)
        self.last = nn.Linear(16, 4).place("MS_WORKER", 0)

    def forward(self, x):
        hidden = F.gelu(self.first(x))
        return self.last(F.dropout(self.norm(hidden), 0.3, self.training) + hidden)


class Replicated(Branches):
    """The same on two replicas."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.first, self.norm, self.last):
            module.place("MS_WORKER", [1, 0])


def task(compile: bool | Mapping[str, Any] = False, make: Any = Branches, parts: int = 1) -> Task:
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loss, divider = nn.CrossEntropyLoss(), Divider(parts)
    return Task(
        net, loss, optimizer, "affinity", False, compiler=compiler_of(compile), divider=divider
    )


def batches(sizes: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 8, generator=generator), torch.arange(size) % 4) for size in sizes]


def trained(
    compile: bool | Mapping[str, Any], sizes: tuple[int, ...]
) -> tuple[list[torch.Tensor], SimulatedCluster]:
    """Every loss, then the outputs of predict."""
    cluster = SimulatedCluster(lambda: task(compile), num_workers=2)
    torch.manual_seed(2)
    losses = [cluster.train_step((batch, {}))[0] for batch in batches(sizes)]
    return [*losses, cluster.predict(((torch.ones(3, 8),), {}))[0]], cluster


def test_segments_are_compiled_once_for_each_shape() -> None:
    compiled = []

    def count(graph_module, inputs):
        compiled.append(graph_module)
        return graph_module.forward

    sizes = (6, 6, 6, 5, 6, 5)
    found, cluster = trained({"backend": count}, sizes)

    num_segments = {
        mode: len(cluster.latest(mode).plan.segments) for mode in (Mode.TRAIN, Mode.PREDICT)
    }
    assert len(compiled) == 2 * num_segments[Mode.TRAIN] + num_segments[Mode.PREDICT]
    expected, _ = trained(False, sizes)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Wired(Branches):
    """Values that are rounded on their way to the next worker."""

    def forward(self, x):
        hidden = gs.wire(F.gelu(self.first(x)), torch.bfloat16)
        return self.last(gs.wire(self.norm(hidden), torch.float16))


def test_a_compiler_that_changes_no_bit_keeps_wired_values() -> None:
    found: list[list[torch.Tensor]] = []
    for compile in (False, {"backend": "aot_eager"}):
        cluster = SimulatedCluster(functools.partial(task, compile, Wired), num_workers=2)
        torch.manual_seed(2)
        losses = [cluster.train_step((batch, {}))[0] for batch in batches((6, 6))]
        norm = cluster.owner_of("norm.bias").task.network.norm
        found.append([*losses, norm.bias, norm.running_var])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("order", ["left", "pairs"])
def test_replicas_are_compiled(order: Any) -> None:
    """With a compiler that changes no bit: the statistics of norms are folded beside it."""

    def trained(compile: bool | Mapping[str, Any], place: bool) -> list[Any]:
        make = Replicated if place else Branches
        options = {"gradient_order": order}
        cluster = SimulatedCluster(
            lambda: replace(task(compile, make, parts=4), **options), num_workers=2
        )
        torch.manual_seed(2)
        losses = [cluster.train_step(divided)[0] for divided in pairs]
        norms = [
            value
            for name, value in cluster.owner_of("norm.running_mean").task.network.named_buffers()
        ]
        return [*losses, *norms, cluster.predict(((torch.ones(3, 8),), {}))[0]]

    pairs = [(batch, {}) for batch in batches((8, 8, 10))]
    found, expected = trained({"backend": "aot_eager"}, True), trained(False, False)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@needs_a_compiler
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_the_compiler_of_torch_gives_close_results_and_draws_the_same_numbers() -> None:
    def losses(compile: bool) -> list[torch.Tensor]:
        def make_task() -> Task:
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.3))
            net[1].place("MS_WORKER", 1)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
            return Task(
                net, lambda y, t: (y * t).mean(), optimizer, "affinity", False,
                compiler=compiler_of(compile),
            )  # fmt: skip

        cluster = SimulatedCluster(make_task, num_workers=2)
        torch.manual_seed(2)
        batch = torch.ones(6, 8), torch.arange(24.0).reshape(6, 4)
        return [cluster.train_step((batch, {}))[0] for _ in range(2)]

    from torch._inductor import config

    with config.patch(compile_threads=1):
        found = losses(True)

    for one, other in zip(found, losses(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_one_process_compiles_the_network() -> None:
    compiled = []

    def count(graph_module, inputs):
        compiled.append(graph_module)
        return graph_module.forward

    def losses(compile: bool | Mapping[str, Any]) -> list[torch.Tensor]:
        mine = task()
        model = gs.Model(mine.network, mine.loss_fn, mine.optimizer, compile=compile)
        torch.manual_seed(2)
        return [model.train_step(*batch) for batch in batches((6, 6))]

    found, expected = losses({"backend": count}), losses(False)

    assert compiled
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_what_torch_compile_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"compile='max'; expected True, False, or a dict"):
        gs.Model(Branches(), compile="max")
    with pytest.raises(ConfigurationError, match=r"compile has 'modes'; expected some of backend"):
        gs.Model(Branches(), compile={"modes": "max"})
