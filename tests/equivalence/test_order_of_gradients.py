"""Sums of gradients come out in eager's order, however the uses of a value are scattered.

Each test that names a story was once a counterexample: other bits than the eager loop.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import Applied, assert_same_wherever_placed, batches_of
from simulated.equivalence import assert_same_bits
from torch import nn

from graphsplit import place
from graphsplit.capture.graph import Mode


def residual(h):
    return h + torch.tanh(h + torch.sin(h))


def fan_out_and_back(h):
    return torch.sin(h) + torch.cos(h) * torch.tanh(h) + torch.exp(h * 0.1)


def to_and_fro(h):
    for _ in range(6):
        h = torch.sin(h) + h
    return h


def twice_in_one_operation(h):
    return torch.sin(h) + h * h + torch.addcmul(h, h, h) + torch.where(h > 0, h, h * 2)


def many_uses(h):
    for function in (torch.sin, torch.tanh, torch.sigmoid, torch.exp, torch.cos, F.gelu, F.silu):
        h = h + function(h)
    return h + sum(f(h) for f in (torch.sin, torch.tanh, torch.cos, F.gelu, F.silu))


@pytest.mark.parametrize(
    "function", [residual, fan_out_and_back, to_and_fro, twice_in_one_operation, many_uses]
)
def test_uses_in_any_order_are_summed_as_in_eager(function) -> None:
    assert_same_wherever_placed(lambda: Applied(function), batches_of(4, 8))


def test_uses_that_alternate_between_two_workers() -> None:
    class Alternating(Applied):
        def forward(self, x):
            h = self.linear(x)
            total = torch.zeros_like(h)
            for index, function in enumerate((torch.sin, torch.cos, torch.tanh, torch.exp)):
                with place("MS_WORKER", index % 2):
                    total = total + function(h)
            return total

    cluster = assert_same_bits(
        lambda: Alternating(None), batches_of(4, 8, num=3), num_workers=2, loss_fn=_loss
    )
    planned = cluster.latest(Mode.TRAIN)
    assert planned is not None and len(planned.plan.segments) > 2


def _loss(outputs, target):
    return F.mse_loss(outputs.sum(1), target)


# An operation that autograd sees as several may use an operand more than once. Its terms used to
# be added up before they joined the total: x + (c + b) instead of (x + c) + b.


def cosine(h):
    u = torch.tanh(h) * 0.3
    return u + torch.sin(h) * F.cosine_similarity(h, u, dim=-1)[:, None] + h


@pytest.mark.parametrize(
    "function",
    [
        cosine,
        lambda h: torch.sin(h) + torch.einsum("bi,bi->b", h, h)[:, None] + torch.cos(h),
        lambda h: torch.sin(h) + F.poisson_nll_loss(h, h.abs()) + torch.cos(h),
        lambda h: torch.sin(h) + F.triplet_margin_loss(h, torch.sin(h), h * 2) + torch.cos(h),
        lambda h: torch.sin(h) + F.kl_div(h, h.softmax(-1), reduction="sum") + torch.cos(h),
    ],
    ids=["cosine_similarity", "einsum", "poisson_nll_loss", "triplet_margin_loss", "kl_div"],
)
def test_an_operation_that_uses_its_operand_several_times_inside(function) -> None:
    assert_same_wherever_placed(lambda: Applied(function), batches_of(4, 8), placements=range(10))


def test_a_product_of_a_matrix_with_itself() -> None:
    def function(h):
        return torch.tanh(h) + torch.matmul(h, h) + torch.sin(h)

    assert_same_wherever_placed(
        lambda: Applied(function, 4), batches_of(3, 4, 4), placements=range(10)
    )


def test_a_recurrent_layer_used_twice_adds_every_time_step_by_itself() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.GRU(5, 6, batch_first=True)
            self.linear = nn.Linear(6, 3)

        def forward(self, x):
            first, _ = self.recurrent(x)
            second, _ = self.recurrent(torch.tanh(x))
            return self.linear(first) + self.linear(second * 1.5)

    assert_same_wherever_placed(Twice, batches_of(3, 7, 5), placements=range(10))


def test_attention_of_a_value_to_itself() -> None:
    def function(h):
        parts = h.view(h.shape[0], -1, 2, 4).transpose(1, 2)
        attended = F.scaled_dot_product_attention(parts, parts, parts, dropout_p=0.2)
        mixed = F.scaled_dot_product_attention(parts, torch.tanh(parts), parts)
        return (torch.sin(parts) + attended + mixed).transpose(1, 2).reshape(h.shape)

    assert_same_wherever_placed(
        lambda: Applied(function), batches_of(3, 5, 8), placements=range(10)
    )


def test_an_operation_with_nothing_to_do_hands_back_the_same_tensor() -> None:
    # `contiguous` returned its operand, of which there were then two values whose gradients were
    # summed one after the other: those of both belong into one sum.
    def function(h):
        first = torch.tanh(h)
        same, also = torch.broadcast_tensors(h.contiguous(), first.to(torch.float32))
        loss = F.smooth_l1_loss(same, also) + F.huber_loss(also, h)
        return first + torch.sin(same) + F.normalize(h.float()) + loss + same * 0.3

    assert_same_wherever_placed(lambda: Applied(function), batches_of(4, 8), placements=range(30))


def test_a_sum_takes_the_strides_of_its_first_term() -> None:
    # Of two terms, that of the later use was added second where it came from the worker itself:
    # the same numbers, but in the strides of the other term, and then another sum for the bias.
    class Turned(Applied):
        def forward(self, x):
            h = self.linear(x)
            with place("MS_WORKER", 1):
                turned = torch.sin(h.permute(2, 0, 1).contiguous()).permute(1, 2, 0)
            with place("MS_WORKER", 0):
                return turned * torch.exp(h) + torch.cos(h)

    for seed in range(5):
        assert_same_bits(
            lambda: Turned(None), batches_of(5, 7, 8), num_workers=2, loss_fn=_flat, seed=seed
        )
    assert_same_wherever_placed(lambda: Turned(None), batches_of(5, 7, 8), placements=range(10))


def _flat(outputs, target):
    return F.mse_loss(outputs.flatten(1).sum(1), target)


def test_a_parameter_used_directly_on_three_workers() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

        def forward(self, x):
            for rank in (1, 0, 2, 1):
                with place("MS_WORKER", rank):
                    x = torch.tanh(x @ self.weight) + self.weight.sum(0)
            return x

    assert_same_bits(Shared, batches_of(4, 8, num=3), num_workers=3, loss_fn=_loss)


def test_one_module_used_several_times() -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            for _ in range(4):
                x = torch.tanh(self.linear(x)) + x * x
            return x

    assert_same_wherever_placed(Reused, batches_of(4, 8))


def test_tied_embeddings() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 8)
            self.linear = nn.Linear(8, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            words = (x.abs() * 3).long().clamp(max=10)
            h = self.linear(self.embedding(words))
            return self.head(h) + self.embedding(words) @ self.head.weight.t()

    assert_same_wherever_placed(Tied, batches_of(4, 8))
    assert_same_bits(
        Tied,
        batches_of(4, 8),
        num_workers=2,
        place=lambda net: (
            net.embedding.place("MS_WORKER", 0),
            net.linear.place("MS_WORKER", 1),
            net.head.place("MS_WORKER", 1),
        ),
        loss_fn=lambda outputs, target: F.mse_loss(outputs.flatten(1).sum(1), target),
    )
