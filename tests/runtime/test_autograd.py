"""Gradients of microbatches add up as AccumulateGrad adds them, and nothing else changes."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from graphsplit.runtime.segments.autograd import accumulate, accumulate_all, keep_apart
from graphsplit.runtime.segments.backward import backward
from graphsplit.torch_ext.attributes import num_hooks


def test_gradients_of_weights_are_added_one_by_one_and_never_all_held() -> None:
    layers = [nn.Linear(4, 4, bias=False) for _ in range(8)]
    weights = [layer.weight for layer in layers]
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def count(gradient: torch.Tensor) -> None:
        made.append(weakref.ref(gradient))
        alive.append(sum(one() is not None for one in made))

    for weight in weights:
        weight.grad = torch.ones(4, 4)
        weight.register_hook(count)
    leaf = torch.ones(2, 4, requires_grad=True)
    output = nn.Sequential(*layers)(leaf)
    expected = torch.autograd.grad(output.sum(), [leaf, *weights], retain_graph=True)
    made.clear()
    alive.clear()
    (found,) = backward([output], [torch.ones(2, 4)], [leaf], weights)
    assert len(alive) == 8 and max(alive) <= 2
    assert found is not None and torch.equal(found, expected[0]) and leaf.grad is None
    for weight, gradient in zip(weights, expected[1:], strict=True):
        assert weight.grad is not None and torch.equal(weight.grad, 1 + gradient)


def test_gradients_of_leaves_come_as_autograd_made_them() -> None:
    leaf, other = torch.ones(3, 4, requires_grad=True), torch.ones(2, requires_grad=True)
    found = backward([leaf.t()], [torch.ones(4, 3)], [None, leaf, other], [])
    assert found[0] is None and found[2] is None
    assert found[1] is not None and found[1].stride() == (1, 3)


def test_a_leaf_where_backward_begins_gets_the_sum() -> None:
    leaf = torch.ones(3, requires_grad=True)
    (found,) = backward([leaf * 2, leaf], [torch.ones(3), torch.full((3,), 5.0)], [leaf], [])
    assert found is not None and found.tolist() == [7] * 3


def test_a_leaf_that_is_all_there_is_gets_what_was_given() -> None:
    leaf, given = torch.ones(3, requires_grad=True), torch.ones(3)
    (found,) = backward([leaf], [given], [leaf], [])
    assert found is given and leaf.grad is None


def test_without_a_beginning_nothing_flows() -> None:
    leaf, weight = torch.ones(3, requires_grad=True), nn.Parameter(torch.ones(3))
    assert backward([], [], [leaf], [weight]) == [None]
    assert weight.grad is None


def test_gradients_taken_from_what_waits_become_copies() -> None:
    waiting, own = torch.ones(6), torch.ones(3)
    shared, alone, without = (nn.Parameter(torch.zeros(n)) for n in (6, 3, 1))
    shared.grad, alone.grad = waiting.view(6), own
    keep_apart([shared, alone, without], [waiting, None])
    shared.grad += 1
    assert waiting.tolist() == [1] * 6 and alone.grad is own


def test_the_first_gradient_is_taken_and_later_ones_are_added_to_it_in_place() -> None:
    parameter, first = nn.Parameter(torch.zeros(3)), torch.ones(3)
    accumulate_all([parameter], [first], ())
    assert parameter.grad is first
    accumulate_all([parameter], [torch.full((3,), 2.0)], ())
    assert parameter.grad is first
    assert parameter.grad.tolist() == [3, 3, 3]


def test_one_gradient_of_two_parameters_is_not_added_to_twice() -> None:
    both = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))]
    for _ in range(2):
        gradient = torch.ones(3)
        accumulate_all(both, [gradient, gradient], ())
    assert [p.grad.tolist() for p in both if p.grad is not None] == [[2, 2, 2]] * 2


def test_a_gradient_that_waits_to_be_added_keeps_its_value() -> None:
    """What goes to a shared parameter may wait while later microbatches are added."""
    parameter, gradient = nn.Parameter(torch.zeros(2, 3)), torch.ones(6)
    waiting = [gradient, torch.ones(()).to_sparse(), None]
    accumulate_all([parameter], [gradient.view(2, 3)], waiting)
    accumulate_all([parameter], [torch.ones(2, 3)], ())
    assert gradient.tolist() == [1] * 6
    assert parameter.grad is not None
    assert parameter.grad.flatten().tolist() == [2] * 6


def test_no_gradient_leaves_none() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    accumulate_all([parameter], [None], ())
    assert parameter.grad is None


def test_hooks_of_a_backward_are_none_that_a_script_has_registered() -> None:
    x = torch.ones(2, requires_grad=True)
    leaf = (x * 2).detach().requires_grad_()
    before = num_hooks()
    (given,) = backward([(leaf * 3).sum()], [torch.ones(())], [leaf], [])
    assert given is not None and given.tolist() == [3.0, 3.0]
    assert num_hooks() == before
    leaf.register_hook(lambda gradient: None)
    assert num_hooks() == before + 1


def test_a_hook_that_returns_something_is_the_error_that_it_is_in_eager_mode():
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_post_accumulate_grad_hook(lambda one: one.grad)  # type: ignore[arg-type, return-value]
    with pytest.raises(RuntimeError, match="hooks should return None") as eager:
        parameter.sum().backward()
    with pytest.raises(RuntimeError, match=str(eager.value)):
        accumulate(parameter, torch.ones(2), is_shared=False)
