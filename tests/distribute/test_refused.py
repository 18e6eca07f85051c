"""What own loops are refused, alike on all workers, with the way out; never another number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from loop_helpers import Distribute, Loop, placed, raised
from loops import small
from recovery_helpers import ThreadCluster, threads_as_workers
from several_networks import Twice

import graphsplit as gs

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")


def input_used_beside(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """An input that the network uses several times, and the script too."""
    net = Twice()
    net = distribute(placed(net, [net.first, net.second, net.last], ranks))
    x = torch.randn(6, 8) * torch.ones(8, requires_grad=True)
    (net(x, torch.ones(8))[0].sum() + x.sum()).backward()
    yield None


def written_into_a_tensor(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A backward that begins at an ordinary tensor which values were written into."""
    net = distribute(small(ranks))
    losses = torch.zeros(2)
    losses[0], losses[1] = net(torch.randn(6, 8)).sum(), net(torch.randn(6, 8)).sum()
    losses.sum().backward()
    yield None


def hook_and_penalty(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A hook on a parameter that the script uses as well."""
    net = distribute(small(ranks))
    net.last.weight.register_hook(lambda gradient: gradient * 2)
    (net(torch.randn(6, 8)).sum() + net.last.weight.sum()).backward()
    yield None


def second_derivative(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A gradient penalty outside of the network."""
    net = distribute(small(ranks))
    x = torch.randn(6, 8, requires_grad=True)
    yield torch.autograd.grad(net(x).sum(), x, create_graph=True)


def backward_while_casting(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A backward inside the block."""
    net = distribute(small(ranks))
    with torch.autocast("cpu", torch.bfloat16):
        net(torch.randn(6, 8)).sum().backward()
    yield None


def calls_while_casting(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Two calls that share casts in eager, under one backward."""
    net = distribute(small(ranks))
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(torch.randn(6, 8)).sum() + net(torch.randn(6, 8)).sum()
    loss.backward()
    yield None


def parameter_while_casting(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A parameter that the script uses inside the block."""
    net = distribute(small(ranks))
    with torch.autocast("cpu", torch.bfloat16):
        yield (net(torch.randn(6, 8)) @ net.last.weight).sum()


def functional(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A call with other parameters; the transforms end alike, and a loop afterwards is as ever."""
    net = distribute(small(ranks))
    x = torch.randn(6, 8)
    forms: list[Any] = [
        lambda: torch.vmap(net)(x),
        lambda: torch.func.grad(lambda x: net(x).sum())(x),
    ]
    for form in forms:
        with pytest.raises(gs.errors.ConfigurationError, match=r"torch\.func"):
            form()
    net(x).sum().backward()
    assert net.first.weight.grad.norm().item() > 0
    yield torch.func.functional_call(net, dict(small(ranks).named_parameters()), (x,))


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        (input_used_beside, "uses an input several times"),
        (written_into_a_tensor, "from an ordinary tensor"),
        (hook_and_penalty, "has a hook"),
        (second_derivative, "create_graph=True"),
        (functional, "torch.func (functional_call"),
        (backward_while_casting, "backward under torch.autocast"),
        (calls_while_casting, "by several calls under one backward()"),
        (parameter_while_casting, "casts it once for the whole block"),
    ],
)
def test_a_loop_is_refused_with_the_way_out(loop: Loop, text: str) -> None:
    assert text in raised(loop)


def test_a_job_that_waits_for_lost_workers_refuses_own_loops() -> None:
    def run(rank: int) -> str:
        with pytest.raises(gs.errors.ConfigurationError) as caught:
            gs.distribute(small([0, 1, 0]))
        return str(caught.value)

    found = ThreadCluster(run, 2, is_recoverable=True).run()
    assert all(
        "GS_RECOVERY=wait_rejoin" in text and "Fix: train with Model" in text for text in found
    )
