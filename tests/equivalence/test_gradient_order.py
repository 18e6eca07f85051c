"""Gradients added in pairs: the bits of the loop that ``docs/how-to/microbatches.md`` prints."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures
from test_lenet import LeNet, images
from test_microbatches import Everything, Tied, num_tokens, placed, tokens
from torch import nn

import graphsplit as gs
from graphsplit.capture.graph import Mode
from graphsplit.errors import ConfigurationError
from graphsplit.partition import splitting
from graphsplit.program.instruction import Opcode
from graphsplit.runtime.segments.part_sums import PartSum

_lenet, _tied = Captures(), Captures()
EVERYTHING = {"stem": 0, "left": 1, "right": 2, "norm": 2, "head": 0}


def tree(parts: list[Any], first: int, size: int) -> Any:
    """The sum that a full binary tree gives, in which missing parts add nothing."""
    if size == 1:
        return parts[first] if first < len(parts) else None
    one, other = (tree(parts, f, size // 2) for f in (first, first + size // 2))
    return one + other if one is not None and other is not None else other if one is None else one


@pytest.mark.parametrize("missing", [(), (2,), (0, 1), (1, 3, 4)])
@pytest.mark.parametrize("num_parts", range(1, 18))
def test_parts_are_added_as_a_binary_tree_and_few_are_held(
    num_parts: int, missing: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(num_parts)
    parts: list[Any] = [torch.randn(7, generator=generator) for _ in range(num_parts)]
    for number in missing:
        parts[number : number + 1] = [None] if number < num_parts else []
    expected = tree(parts, 0, 2 ** math.ceil(math.log2(num_parts)))
    one = PartSum(torch.zeros(7))
    for number, part in enumerate(parts):
        if part is not None:  # a parameter may be in no plan of some microbatches
            one.add(number, part.clone())
        assert len(one.blocks) <= math.ceil(math.log2(num_parts)) + 1
    total = one.total()
    assert (total is None) == (expected is None)
    assert total is None or torch.equal(total, expected)


@pytest.mark.parametrize("microbatches", range(2, 9))
def test_lenet_and_everything(microbatches: int) -> None:
    names = ("conv1", "conv2", "fc1", "fc2", "fc3")
    assert_same_bits(
        LeNet,
        images(8, 7),
        num_workers=3,
        loss_fn=nn.CrossEntropyLoss(),
        place=placed(**dict(zip(names, (2, 0, 1, 0, 1), strict=True))),
        microbatches=microbatches,
        gradient_order="pairs",
        captures=_lenet,
    )
    assert_same_bits(
        Everything,
        batches_of(microbatches + 3, 6, 6, num=2),
        num_workers=3,
        loss_fn=rows_against_target,
        place=placed(**EVERYTHING),
        microbatches=microbatches,
        gradient_order="pairs",
    )


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble", "interleaved_1f1b", "auto"])
def test_schedules_and_weight_gradients_apart(schedule: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splitting, "_LEAST_WORK", 1)
        patch.setattr(splitting, "_LEAST_CONVOLUTION", 1)
        cluster = assert_same_bits(
            LeNet,
            images(8, 8),
            num_workers=2,
            loss_fn=nn.CrossEntropyLoss(),
            place=placed(conv1=0, conv2=1, fc1=0, fc2=1, fc3=1),
            microbatches=6,
            gradient_order="pairs",
            schedule=schedule,
            captures=_lenet,
        )
    planned = cluster.latest(Mode.TRAIN)
    assert planned is not None
    opcodes = {i.opcode for program in planned.programs for i in program.instructions}
    assert (Opcode.BACKWARD_WEIGHT in opcodes) >= (schedule == "zero_bubble")


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 3},
        {"accumulate": 2, "set_to_none": False},
        {"clip": gs.clip.GlobalNorm(0.05), "make_scaler": lambda: torch.amp.GradScaler("cpu")},
        {"clip": gs.clip.Value(0.01), "set_to_none": False},
    ],
    ids=["accumulate", "zeros", "clip and scale", "values"],
)
def test_tied_parameters_with_all_that_comes_between_backward_and_step(options: Any) -> None:
    assert_same_bits(
        Tied,
        tokens(8, 8, 5, 3, 8, 8),
        num_workers=3,
        place=placed(embedding=0, body=1, drop=2, head=2),
        microbatches=4,
        loss_weight=num_tokens,
        make_optimizer=lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
        gradient_order="pairs",
        captures=_tied,
        **options,
    )


def test_frozen_parameters_hooks_and_parameters_that_nothing_uses() -> None:
    seen: list[torch.Tensor] = []

    def make() -> nn.Module:
        net = Everything()
        net.unused = nn.Linear(2, 2)
        net.left.weight.requires_grad_(False)
        net.right.weight.register_hook(lambda gradient: gradient * 0.3)
        net.stem.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        return net

    assert_same_bits(
        make,
        batches_of(8, 6, 6, num=2),
        num_workers=3,
        loss_fn=rows_against_target,
        place=placed(**EVERYTHING),
        microbatches=4,
        gradient_order="pairs",
    )
    of_loop, of_owner = (seen[i] for i in (0, 4))  # a hook sees the part of one microbatch
    assert torch.equal(of_loop, of_owner)


def _model(net: nn.Module, **options: Any) -> gs.Model:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    return gs.Model(net, rows_against_target, optimizer, **options)


def test_the_order_changes_bits_from_four_microbatches_on_and_one_process_knows_it() -> None:
    torch.manual_seed(0)
    start, batches = Everything(), batches_of(8, 6, 6, num=3)
    for microbatches, is_same in ((1, True), (2, True), (3, True), (4, False), (8, False)):
        states = []
        for order in ("left", "pairs"):
            torch.manual_seed(1)
            net = copy.deepcopy(start)
            model = _model(net, microbatches=microbatches, gradient_order=order)
            for batch in batches:
                model.train_step(*batch)
            states.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
        assert torch.equal(*states) == is_same, microbatches


def test_forward_backward_adds_the_sum_of_a_batch_to_what_is_there() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    plain, batches = copy.deepcopy(net), batches_of(10, 6, 6, num=3)
    model = _model(net, microbatches=5, gradient_order="pairs")
    model.zero_grad()
    for x, y in batches:
        model.forward_backward(x, y, scale=0.5)
        parts: list[list[torch.Tensor]] = []
        for rows, target in zip(x.tensor_split(5), y.tensor_split(5), strict=True):
            loss = rows_against_target(plain(rows), target) * (len(rows) / len(x)) * 0.5
            parts.append(list(torch.autograd.grad(loss, list(plain.parameters()))))
        for parameter, own in zip(plain.parameters(), zip(*parts, strict=True), strict=True):
            total = tree(list(own), 0, 8)
            parameter.grad = total if parameter.grad is None else parameter.grad + total
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_another_order_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="gradient_order='right'; expected 'left' or 'pa"):
        _model(Everything(), gradient_order="right")


@pytest.mark.parametrize("order", ["left", "pairs"])
@pytest.mark.parametrize("shared", [(), (0,), (1, 2), (0, 1, 2, 3, 4)])
def test_parts_that_others_hold_are_left_as_they_are(order: Any, shared: tuple[int, ...]) -> None:
    parts = [torch.full((3,), 10.0**n) for n in range(5)]
    before = [part.clone() for part in parts]
    one = PartSum(torch.zeros(3), order)
    for number, part in enumerate(parts):
        one.add(number, part, is_shared=number in shared)
    assert torch.equal(one.total(), torch.full((3,), 11111.0))  # type: ignore[arg-type]
    assert all(torch.equal(parts[n], before[n]) for n in shared)
    alone = PartSum(torch.zeros(3), order)
    alone.add(0, parts[0], is_shared=True)
    assert alone.total(is_read=True) is parts[0]
    assert alone.total() is not parts[0]
