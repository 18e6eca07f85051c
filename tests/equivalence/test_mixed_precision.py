"""Autocast and gradient scaling give the bits of one process, and so do blocks without autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import (
    Tower,
    assert_same_wherever_placed,
    batches_of,
    on_three,
    rows_against_target,
)
from pass_helpers import captured
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures, SimulatedCluster
from torch import nn

import graphsplit as gs
from graphsplit.capture.graph import CapturedGraph, Mode, NodeKind
from graphsplit.errors import CaptureError, ConfigurationError
from graphsplit.optimizers.clip import GlobalNorm, Value
from graphsplit.planning.task import Task
from graphsplit.runtime.segments import region_modes

BATCHES = batches_of(4, 8, num=3)
half = functools.partial(torch.autocast, "cpu", torch.bfloat16)


class Runs(nn.Module):
    """Two linear layers, put together by a function."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.function = function

    def forward(self, x):
        return self.function(self, x).float()


def same(function: Callable[[Any, torch.Tensor], torch.Tensor], **options: Any) -> None:
    assert_same_wherever_placed(lambda: Runs(function), BATCHES, placements=range(4), **options)


def graph_of(function: Callable[[Any, torch.Tensor], torch.Tensor]) -> CapturedGraph:
    return captured(Runs(function), torch.zeros(4, 8), torch.zeros(4), loss_fn=rows_against_target)


def casts_of(graph: CapturedGraph) -> list[str]:
    return [node.name for node in graph.nodes if "_cast" in node.name]


# Blocks of autocast.


def test_a_block_inside_forward() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        with half():
            h = net.two(torch.relu(net.one(x)))
        return h.float() + x

    same(run)


def test_a_weight_used_twice_is_cast_once() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        with half():
            return net.one(torch.relu(net.one(x))) + net.two(x)

    names = casts_of(graph_of(run))
    assert len(names) == 4  # two weights, two biases
    same(run)


def test_every_block_casts_anew() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        with half():
            h = net.one(net.one(x))
        with half():
            return net.one(net.one(h))

    assert len(casts_of(graph_of(run))) == 4
    same(run)


def test_without_its_cache_every_use_casts_anew() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        with half(cache_enabled=False):
            return net.one(torch.relu(net.one(x)))

    assert casts_of(graph_of(run)) == []
    same(run)


def test_activations_used_twice_are_cast_twice() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(net.one(x))
        with half():
            return net.one(h) + net.two(h) + torch.mm(h, h.t()) @ h

    same(run)


def test_a_block_switched_off_inside_a_block() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        with half():
            h = net.one(x)
            with torch.autocast("cpu", enabled=False):
                h = net.one(h.float())
            return net.two(net.one(h))

    same(run)


def test_a_weight_used_inside_and_outside_of_a_block() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.one(x)
        with half():
            h = net.one(h) + net.one(x)
        return net.one(h.float()) * net.one.weight.sum()

    same(run)


def test_operations_that_autocast_runs_in_float32_or_widens() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        with half():
            h = net.one(x)
            wide = torch.cat([h, x]).sum(0) + torch.stack([h, h]).float().sum((0, 1))
            return F.mse_loss(h, x) + net.two(F.gelu(h)).softmax(-1) + wide

    same(run)


def test_a_layer_made_of_many_operations() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(8, 8, batch_first=True)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            with half():
                y, _ = self.gru(x[:, None, :].repeat(1, 3, 1))
                y, _ = self.gru(y)  # its weights, used at six times, are cast once
                y = y + self.attention(y, x[:, None, :], x[:, None, :])[0]
            return y.float().sum(1)

    assert_same_wherever_placed(Recurrent, BATCHES, placements=range(4))


def test_in_place_operations_inside_a_block() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        with half():
            h = net.one(x)
            h += net.two(x)
            return net.two(F.relu(h, inplace=True))

    same(run)


def test_network_and_loss_under_autocast() -> None:
    assert_same_bits(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
        BATCHES,
        num_workers=2,
        place=lambda net: net[2].place("MS_WORKER", 1),
        loss_fn=rows_against_target,
        autocast=torch.bfloat16,
    )


def test_a_parameter_used_as_it_is_and_cast_within_one_operation_is_refused() -> None:
    library = torch.library.Library("graphsplit_test", "FRAGMENT")
    library.define("both(Tensor x, Tensor w) -> Tensor")
    library.impl("both", lambda x, w: x @ w + w.sum(), "CompositeImplicitAutograd")

    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        with half():
            return torch.ops.graphsplit_test.both(x, net.one.weight)

    with pytest.raises(CaptureError, match=r"(?s)both as it is and cast.*cache_enabled=False"):
        graph_of(run)


def test_modes_around_a_step_of_a_cluster_are_refused() -> None:
    task = Task(Runs(lambda net, x: net.one(x)), rows_against_target, None, "affinity", True)
    begin = SimulatedCluster(lambda: task, 1).workers[0].planner.begin_step
    begin(Mode.TRAIN)
    with half(), pytest.raises(ConfigurationError, match=r"Model\(..., autocast=torch.bfloat16\)"):
        begin(Mode.EVAL)
    with torch.no_grad(), pytest.raises(ConfigurationError, match="gradients are switched off"):
        begin(Mode.TRAIN)
    with torch.no_grad():
        begin(Mode.PREDICT)


def test_autocast_is_put_back_when_an_operation_raises() -> None:
    def fail(*arguments: Any) -> Any:
        region_modes.switch_modes(False, ("cpu", torch.bfloat16))
        raise ValueError

    with pytest.raises(ValueError):
        region_modes.keeping_modes(fail, ("cpu",))()
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()


# Blocks without autograd.


def test_a_block_without_autograd_on_several_workers() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.one(x)
        with torch.no_grad():
            target = net.two(torch.relu(net.one(h)))
        return h * target + net.two(h)

    graph = graph_of(run)
    operations = [node for node in graph.nodes if node.kind is NodeKind.OPERATION]
    off = [node for node in operations if node.region.grad_enabled is False]
    assert len(off) == 3
    assert not any(node.requires_grad for node in off)
    same(run)


def test_a_block_without_autograd_inside_a_block_of_autocast() -> None:
    """``torch.export`` by itself loses the inner block, and trains ``two`` without a word."""

    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        with half():
            h = net.one(x)
            with torch.no_grad():
                scale = net.two(h).mean() + net.one(x).mean()
            return net.one(h) * scale

    same(run)


def test_autograd_on_again_inside_a_block_without() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.one(x)
        with torch.set_grad_enabled(False):
            fixed = net.two(h)
            with torch.enable_grad():
                live = net.two(h)
        return h * fixed + live

    same(run)


def test_a_decorated_function_without_autograd() -> None:
    @torch.no_grad()
    def momentum(net: Any, h: torch.Tensor) -> torch.Tensor:
        net.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return net.average.clone()

    same(lambda net, x: net.two(net.one(x) - momentum(net, net.one(x))))


def test_inference_mode_inside_forward() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.one(x)
        with torch.inference_mode():
            fixed = F.relu(net.two(h), inplace=True) * 2
            with torch.inference_mode(False):
                pass
        return h * fixed.clone() + net.two(h)

    same(run)


def test_what_is_modified_without_autograd_keeps_its_gradient() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.one(x)
        with torch.no_grad():
            h.mul_(2.0)
        return net.two(h)

    same(run)


def test_weights_clipped_in_forward() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            net.one.weight.clamp_(-0.1, 0.1)
        return net.two(torch.relu(net.one(x)))

    assert_same_bits(lambda: Runs(run), BATCHES, num_workers=1, loss_fn=rows_against_target)


# Scaling of the loss.


def scaler(**settings: Any) -> Callable[[], torch.amp.GradScaler]:
    return functools.partial(torch.amp.GradScaler, "cpu", **settings)


same_over_three = functools.partial(
    assert_same_bits,
    Tower,
    batches_of(4, 8, num=4),
    num_workers=3,
    place=on_three,
    loss_fn=rows_against_target,
    captures=Captures(),
    evaluate_after=(),
)


def spoil(name: str) -> Callable[[nn.Module], None]:
    """Makes the gradient of one parameter infinite, in the loop and on its owner."""

    def make_infinite(gradient: torch.Tensor) -> torch.Tensor:
        return torch.full_like(gradient, float("inf"))

    def change(network: nn.Module) -> None:
        network.get_parameter(name).register_hook(make_infinite)

    return change


def scales(cluster: SimulatedCluster) -> set[float]:
    found = [worker.task.scaler for worker in cluster.workers]
    return {scaler.get_scale() for scaler in found if scaler is not None}


def test_the_scale_grows_on_every_worker() -> None:
    cluster = same_over_three(make_scaler=scaler(init_scale=2.0**10, growth_interval=2))
    assert scales(cluster) == {2.0**12}


@pytest.mark.parametrize("clip", [None, GlobalNorm(0.1), Value(0.01)])
def test_gradients_are_unscaled_before_they_are_clipped(clip: Any) -> None:
    same_over_three(make_scaler=scaler(init_scale=2.0**10, growth_interval=1), clip=clip)


@pytest.mark.parametrize("name", ["first.weight", "second.bias", "third.weight"])
def test_an_infinite_gradient_on_one_worker_makes_all_skip_the_step(name: str) -> None:
    def make(network: nn.Module) -> torch.optim.Optimizer:
        spoil(name)(network)
        return torch.optim.AdamW(network.parameters(), lr=0.1)

    cluster = same_over_three(
        make_optimizer=make, make_scaler=scaler(init_scale=2.0**10), clip=GlobalNorm(0.1)
    )
    assert scales(cluster) == {2.0**6}
    for worker in cluster.workers:
        assert not worker.task.optimizers[0].state  # never stepped


def test_a_scale_that_overflows_backs_off_until_steps_are_taken() -> None:
    cluster = same_over_three(
        make_scaler=scaler(init_scale=2.0**127, backoff_factor=2.0**-32), steps=4
    )
    assert scales(cluster) < {2.0**127, 2.0**95, 2.0**63}


def test_only_the_optimizer_with_an_infinite_gradient_skips() -> None:
    def make(network: Any) -> Any:
        spoil("second.weight")(network)
        return (
            torch.optim.SGD(network.first.parameters(), lr=0.05, momentum=0.9),
            torch.optim.Adam([*network.second.parameters(), *network.third.parameters()]),
        )

    cluster = same_over_three(make_optimizer=make, make_scaler=scaler(init_scale=2.0**10))
    assert cluster.owner_of("first.weight").task.optimizers[0].state
    assert not cluster.owner_of("third.weight").task.optimizers[1].state


@pytest.mark.parametrize("init_scale", [2.0**10, 2.0**127])
def test_optimizers_that_skip_by_themselves(init_scale: float) -> None:
    same_over_three(
        make_optimizer=lambda net: torch.optim.AdamW(net.parameters(), fused=True),
        make_scaler=scaler(init_scale=init_scale, growth_interval=1),
    )


def test_scaling_with_microbatches_and_half_precision() -> None:
    same_over_three(
        make_scaler=scaler(init_scale=2.0**10, growth_interval=1),
        clip=GlobalNorm(0.1),
        microbatches=2,
        autocast=torch.bfloat16,
        captures=Captures(),
    )


def test_a_scaler_that_is_switched_off_does_nothing() -> None:
    same_over_three(make_scaler=scaler(enabled=False), clip=GlobalNorm(0.1))


def test_one_process_scales_too() -> None:
    torch.manual_seed(0)
    network = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    used = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    model = gs.Model(network, rows_against_target, optimizer, scaler=used, autocast=torch.bfloat16)
    model.train_step(*BATCHES[0])
    assert used.get_scale() == 8.0
    assert model.predict(BATCHES[0][0]).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaler": 2.0}, "scaler is a float; expected a torch.amp.GradScaler"),
        ({"autocast": "bfloat16"}, "autocast='bfloat16'; expected a dtype"),
        ({"autocast": torch.int8}, "autocast=torch.int8; expected a dtype"),
    ],
)
def test_what_cannot_scale_or_cast_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        gs.Model(nn.Linear(2, 2), **options)
