"""Scripts' own loops on workers that are threads give the bits of the same loops in one process."""

from __future__ import annotations

from typing import Any

import example_loops
import frozen_late
import kinds_of_loops
import loops
import pytest
import several_networks
import torch
import well_known_loops
from loop_helpers import Loop, assert_same_bits
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn
from torch.nn import functional

import graphsplit as gs
from graphsplit.distribute.following.forms import Following

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")


@pytest.mark.parametrize("num_workers", [2, 3, 5])
@pytest.mark.parametrize(
    "loop",
    [*loops.LOOPS, *several_networks.LOOPS, *frozen_late.LOOPS, *example_loops.LOOPS],
    ids=lambda loop: loop.__name__,
)
def test_a_loop_has_the_bits_of_one_process(loop: Loop, num_workers: int) -> None:
    assert_same_bits(loop, num_workers)


@pytest.mark.parametrize(
    "loop",
    [*kinds_of_loops.LOOPS, *several_networks.MORE, *well_known_loops.LOOPS],
    ids=lambda loop: loop.__name__,
)
def test_a_loop_that_does_more_has_them_too(loop: Loop) -> None:
    assert_same_bits(loop, 3)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attention_draws_where_it_drops(dropout: float) -> None:
    values = torch.randn(2, 2, 5, 4)
    with Following(has_values=True) as following:
        functional.scaled_dot_product_attention(values, values, values, dropout_p=dropout)
    assert following.draws == bool(dropout)


def test_a_layer_that_the_script_calls_takes_the_fused_path(monkeypatch) -> None:
    fused, calls = torch._transformer_encoder_layer_fwd, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return fused(*args, **kwargs)

    def script(rank: int) -> Any:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        net = gs.distribute(nn.Sequential(nn.Linear(8, 8), layer))
        net(torch.randn(6, 5, 8)).sum().backward()
        net.eval()
        with torch.no_grad():
            return net[1](net[0](torch.randn(6, 5, 8))).sum().item()

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    ThreadCluster(script, 2, is_recoverable=False).run()
    assert len(calls) == 2  # on each worker


@pytest.mark.parametrize("asks", ["grad", "backward"])
def test_the_gradient_of_a_parameter_frozen_meanwhile_is_torchs_error(asks: str) -> None:
    def script(rank: int) -> Any:
        net = gs.distribute(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
        loss = net(torch.randn(6, 8)).sum()
        weight = net[0].weight.requires_grad_(False)
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.grad(loss, weight) if asks == "grad" else loss.backward(inputs=[weight])

    ThreadCluster(script, 2, is_recoverable=False).run()
