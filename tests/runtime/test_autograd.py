"""Gradients of microbatches add up as AccumulateGrad adds them, and nothing else changes."""

from __future__ import annotations

import torch
from torch import nn

from graphsplit.runtime.autograd import accumulate_all


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


def test_a_gradient_that_waits_to_be_folded_keeps_its_value() -> None:
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
