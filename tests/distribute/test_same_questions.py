"""Questions for values of own loops: each is answered with its own value, or an error names both.

A worker that asks for other values, in another order, or alone, is told apart by what its messages
say that they are about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import small
from recovery_helpers import ThreadCluster, threads_as_workers

import graphsplit as gs
from graphsplit.errors import CollectiveMismatchError

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")


def two_numbers(net: Any, rank: int) -> Any:
    """Two numbers of one worker, of one shape."""
    out = net(torch.ones(6, 8))
    first, second = out.sum() * 2, out.mean() * 3
    return [one.item() for one in ((first, second) if rank else (second, first))]


def two_norms(net: Any, rank: int) -> Any:
    """The same operation of two parameters of one worker."""
    net(torch.ones(6, 8))
    both = net.first.bias, net.norm.weight
    return [one.norm().item() for one in (both if rank else both[::-1])]


def two_parameters(net: Any, rank: int) -> Any:
    """Two parameters of one worker."""
    net(torch.ones(6, 8))
    both = net.first.bias, net.norm.weight
    return [one.tolist() for one in (both if rank else both[::-1])]


def two_parts(net: Any, rank: int) -> Any:
    """Two parts that one operation has made."""
    parts = net(torch.ones(6, 8)).chunk(2)
    return [one.tolist() for one in (parts if rank else parts[::-1])]


def two_gradients(net: Any, rank: int) -> Any:
    """Two gradients, of one shape."""
    net(torch.ones(6, 8)).sum().backward()
    both = net.first.bias.grad, net.norm.weight.grad
    return [one.tolist() for one in (both if rank else both[::-1])]


def a_question_and_backward(net: Any, rank: int) -> Any:
    """A question of one worker alone, while the other one runs backward."""
    loss = net(torch.ones(6, 8)).sum()
    if rank == 1:
        net.first.weight.norm().item()
    loss.backward()


def gradients_of_two_networks(net: Any, rank: int) -> Any:
    """Whether parameters of two networks have gradients."""
    other = gs.distribute(small([0, 1, 0]))
    (net(torch.ones(6, 8)) + other(torch.ones(6, 8))).sum().backward()
    both = net.last.bias, other.last.bias
    return [one.grad is None for one in (both if rank else both[::-1])]


def an_operation_of_one_worker(net: Any, rank: int) -> Any:
    """An operation on values of two workers, which one worker alone runs."""
    number = net(torch.ones(6, 8)).sum()
    both = net.first.weight.detach().sum(), net.second.weight.detach().sum()
    return (both[0] + both[1]).item() if rank == 1 else number.item()


@pytest.mark.parametrize(
    ("script", "texts"),
    [
        (two_numbers, ("item() of value ", "item() of value ")),
        (two_norms, ("item() of value 3 of ()", "item() of value 3 of ()")),
        (two_parameters, ("tolist() of parameter 1 of", "tolist() of parameter 6 of")),
        (two_parts, ("tolist() of value 3 of (3, 4)", "tolist() of part 1 of value 3 of (3, 4)")),
        (two_gradients, ("tolist() of gradient 1 of", "tolist() of gradient 6 of")),
        (a_question_and_backward, ("in item() of value", "in backward()")),
        (an_operation_of_one_worker, ("in item() of value", "in an operation on a value")),
        (gradients_of_two_networks, ("grad of parameters of", "grad of parameters of")),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_questions_that_do_not_fit_together_are_an_error_with_both_lines(
    script: Callable[[Any, int], Any], texts: tuple[str, str]
) -> None:
    def run(rank: int) -> Any:
        torch.manual_seed(3)
        return script(gs.distribute(small([0, 1, 0])), rank)

    with pytest.raises(CollectiveMismatchError) as caught:
        ThreadCluster(run, 2, is_recoverable=False).run()

    told = str(caught.value)
    assert "Fix: every worker asks for the same values in the same order" in told
    lines = 1 if script is an_operation_of_one_worker else 2
    places = told.partition("; the latest operations")[0]
    assert places.count("test_same_questions.py:") == lines
    assert all(text in told for text in texts), told


@pytest.mark.parametrize("of_optimizers", [False, True], ids=["networks", "optimizers"])
def test_states_in_another_order_on_one_worker_are_an_error_and_no_mixture(
    of_optimizers: bool,
) -> None:
    def run(rank: int) -> Any:
        nets = [gs.distribute(small([0, 1, 0])) for _ in range(2)]
        optimizers = [torch.optim.Adam(net.parameters()) for net in nets]
        for net, optimizer in zip(nets, optimizers, strict=True):
            net(torch.ones(6, 8)).sum().backward()
            optimizer.step()
        both: list[Any] = optimizers if of_optimizers else nets
        return [one.state_dict() for one in (both if rank else both[::-1])]

    with pytest.raises(CollectiveMismatchError, match="in the same order"):
        ThreadCluster(run, 2, is_recoverable=False).run()


def test_one_worker_alone_adds_numbers_that_all_know_and_that_live_on_two() -> None:
    def run(rank: int) -> Any:
        torch.manual_seed(3)
        net = gs.distribute(small([0, 1, 0]))
        net(torch.ones(6, 8))
        first, second = net.first.weight.square().sum(), net.second.weight.square().sum()
        (net(torch.ones(6, 8)).sum() + first + second).backward()
        return [(first.detach() + second.detach()).item() for _ in range(rank)]

    alone = ThreadCluster(run, 2, is_recoverable=False).run()[1]
    torch.manual_seed(3)
    net = small([0, 1, 0])
    assert alone == [(net.first.weight.square().sum() + net.second.weight.square().sum()).item()]
