"""Whatever a value is, it crosses between workers with dtype, strides and bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import (
    Applied,
    assert_same_wherever_placed,
    batches_of,
    rows_against_target,
)
from simulated.equivalence import assert_same_bits
from torch import nn
from torch.utils import _pytree as pytree

from graphsplit import place


def several_outputs(h):
    first, second = h.chunk(2, -1)
    rows = first.unbind(0)
    top, indices = second.topk(2, -1)
    greatest, where = first.max(-1)
    ordered, _ = torch.sort(second, dim=-1)
    _, right = h.split([3, 5], 1)
    return (
        ordered
        + rows[1] * 2
        + top.sum(-1, keepdim=True)
        + greatest[:, None] * where[:, None]
        + right[:, :4]
        + first.gather(1, indices).sum(1, keepdim=True)
    )


def views(h):
    cube = h.view(-1, 4, 2)
    part = cube.narrow(1, 1, 2).permute(2, 0, 1).reshape(-1, 2)
    diagonal = torch.diagonal(cube, 0, 1, 2)
    stacked = torch.stack([h.select(1, 3), h[:, 1]], 1)
    sums = part.sum() + diagonal.sum(1, keepdim=True) + stacked.sum(1, keepdim=True)
    return sums + h.flip(1).roll(1, 0) + h.repeat(1, 2)[:, 4:12] + torch.tril(h)


def reductions_of_odd_strides(h):
    turned = h.t()
    wide = turned[:, :1].expand(-1, 4).mean(1)
    steps = h[:, ::2].sum(1) + h.unfold(1, 3, 2).sum((1, 2)) + h.as_strided((4, 3), (5, 2)).sum(1)
    return h * turned.sum() + wide + steps[:, None]


def number_types(h):
    small = h.bfloat16() * 2
    half = (h.half() * 2).float()
    plane = torch.complex(h, h * 0.5)
    turned = torch.fft.fft(plane * plane.conj())
    picked = (h > 0) * h + h.argmax(-1)[:, None] + h[:0].sum() + h.sum()
    waves = torch.fft.rfft(h).abs().sum() + torch.view_as_real(turned).sum(-1)
    return small.float() + half + turned.abs() + turned.imag + waves + picked + h.double().float()


@pytest.mark.parametrize(
    "function", [several_outputs, views, reductions_of_odd_strides, number_types]
)
def test_values_cross_as_they_are(function) -> None:
    assert_same_wherever_placed(lambda: Applied(function), batches_of(4, 8), placements=range(10))


def test_a_weight_cut_in_pieces_that_are_used_far_apart() -> None:
    class Pieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(24, 8) * 0.3)

        def forward(self, x):
            q, k, v = self.weight.chunk(3, 0)
            return torch.sin(torch.tanh(x @ q.t()) @ k) @ v.t() + x @ v

    assert_same_wherever_placed(Pieces, batches_of(4, 8))


def test_the_gradient_of_a_concatenation_reaches_further_than_its_value() -> None:
    # The backward of `cat` hands out windows onto one wide gradient: their strides span more
    # memory than the value, and the channel refused them.
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(8, 3), nn.Linear(8, 5)

        def forward(self, x):
            return torch.cat([self.left(x), self.right(x)], 1) * 2

    assert_same_wherever_placed(Wide, batches_of(4, 8), placements=range(10))


def test_the_gradient_of_a_real_value_may_be_half_of_a_complex_one() -> None:
    def function(h):
        return torch.fft.rfft(h).abs().sum(1, keepdim=True) * torch.sin(h)

    assert_same_wherever_placed(lambda: Applied(function), batches_of(4, 8), placements=range(10))


def test_a_view_reaches_as_far_as_what_it_is_a_view_of() -> None:
    # Of a permuted tensor, batch_norm makes a contiguous one; capture was told other strides, and
    # the channel of a piece refused it.
    class Pieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

        def forward(self, x):
            found = self.norm(self.first(x).permute(2, 0, 1).contiguous().permute(1, 2, 0))
            return torch.cat(found.chunk(3, 2)[::-1], 2) * 2

    assert_same_wherever_placed(Pieces, batches_of(2, 6, 6), placements=range(10))


def test_zeros_like_a_value_ask_for_no_gradient() -> None:
    # A mask made like a value was taken to carry a gradient; attention then chose another kernel.
    def function(h):
        parts = h.view(h.shape[0], -1, 2, 4).transpose(1, 2)
        mask = torch.zeros_like(parts[..., :1].expand(-1, -1, -1, parts.shape[2]))
        found = F.scaled_dot_product_attention(parts, parts * 2, parts, attn_mask=mask)
        return found.transpose(1, 2).reshape(h.shape)

    assert_same_wherever_placed(
        lambda: Applied(function), batches_of(3, 5, 8), placements=range(10)
    )


def test_a_borrowed_weight_still_asks_for_a_gradient_in_eval_mode() -> None:
    # `linear` chooses its kernel by the weight's requires_grad, which pieces of a parameter keep
    # in eval mode too; what had crossed to another worker had lost it.
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

        def forward(self, x):
            found, _ = self.attention(x, x * 2, x, need_weights=False)
            return found

    assert_same_wherever_placed(Attention, batches_of(3, 5, 8), placements=range(10))


@pytest.fixture
def no_fused_transformer_layers() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)


def test_a_borrowed_parameter_asks_for_a_gradient_in_eval_mode() -> None:
    class Borrowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            with place("MS_WORKER", 0):
                h = torch.tanh(self.linear(x))
            with place("MS_WORKER", 1):
                return self.linear(h.transpose(0, 1)).transpose(0, 1)

    for seed in range(4):
        assert_same_bits(
            Borrowing,
            batches_of(5, 3, 8),
            num_workers=2,
            loss_fn=rows_against_target,
            seed=seed,
        )


def test_encoder_layers_with_dropout_in_attention(no_fused_transformer_layers: None) -> None:
    assert_same_wherever_placed(encoder_layer, batches_of(3, 5, 8))


def test_encoder_layers_take_their_fused_path_in_eval_mode() -> None:
    assert_same_wherever_placed(encoder_layer, batches_of(3, 5, 8))


def test_attention_takes_its_fused_path_in_eval_mode() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    assert_same_wherever_placed(Attending, batches_of(3, 5, 8))


def test_dropout_in_eval_mode_hands_back_its_operand() -> None:
    # Export notes a copy there, with other strides than the operand's, which really cross.
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.3)

        def forward(self, x):
            return torch.sin(self.dropout(torch.cat([self.linear(x), x], 1)[:, ::2])) * 2

    assert_same_wherever_placed(Dropped, batches_of(4, 8), placements=range(10))


def test_long_short_term_memory_with_dropout_between_its_layers() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(5, 6, 2, batch_first=True, dropout=0.3, bidirectional=True)
            self.linear = nn.Linear(12, 3)

        def forward(self, x):
            outputs, (hidden, _) = self.lstm(x)
            return self.linear(outputs) + hidden.sum()

    assert_same_wherever_placed(Recurrent, batches_of(3, 7, 5))


def test_in_place_operations_across_a_cut() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            h = self.relu(self.first(x))
            k = self.second(h).mul_(2).add_(h)
            k = F.dropout(k, 0.3, self.training, inplace=True)
            return k.view(-1, 2, 4).sigmoid_().flatten(1) + x

    assert_same_wherever_placed(InPlace, batches_of(4, 8), placements=range(10))


def test_dropout_in_place_on_another_worker() -> None:
    # The two forms of dropout name their operand differently, and were not taken for one another.
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            h = self.linear(x)
            with place("MS_WORKER", 1):
                return F.dropout(h, 0.3, self.training, inplace=True) * 2

    assert_same_bits(
        Dropped,
        batches_of(4, 8),
        num_workers=2,
        place=lambda net: net.linear.place("MS_WORKER", 0),
        loss_fn=rows_against_target,
    )


def test_in_place_after_a_normalisation_of_the_input() -> None:
    # batch_norm was thought to share memory with its input; an in-place operation after it stayed
    # one, and modified a leaf.
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            return self.linear(self.relu(self.norm(x)))

    assert_same_wherever_placed(Normalised, batches_of(4, 8), placements=range(10))


def test_writing_into_a_part_of_a_value() -> None:
    def function(h):
        made = torch.zeros_like(h)
        made[:, 0] = h[:, 1]
        made[:, 2:4] += h[:, 4:6]
        copy = h.clone()
        copy[:, 3] = 1
        return made + copy.masked_fill_(copy > 1, 0.5) + h

    assert_same_wherever_placed(lambda: Applied(function), batches_of(4, 8), placements=range(10))


@dataclasses.dataclass
class Found:
    loss: torch.Tensor
    scores: torch.Tensor


pytree.register_dataclass(Found, serialized_type_name="graphsplit_tests.Found")


@pytest.mark.parametrize("kind", ["dict", "dataclass", "scalar"])
def test_a_network_that_returns_its_own_loss_takes_batches_as_keywords(kind: str) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, features, labels=None, scale=1.0):
            scores = self.head(torch.tanh(self.body(features))) * scale
            loss = F.mse_loss(scores.sum(1), labels)
            if kind == "scalar":
                return loss
            return {"loss": loss, "scores": scores} if kind == "dict" else Found(loss, scores)

    batches = [{"features": x, "labels": y, "scale": 0.5} for x, y in batches_of(4, 8)]
    assert_same_bits(
        WithLoss,
        batches,
        num_workers=3,
        place=lambda net: (net.body.place("MS_WORKER", 2), net.head.place("MS_WORKER", 1)),
    )


def test_predict_returns_the_networks_own_structure() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("scale", torch.ones(2))

        def forward(self, x, extra):
            h = self.linear(x)
            with place("MS_WORKER", 1):
                return {
                    "a": (h, [torch.tanh(h), None]),
                    "weight": self.linear.weight,
                    "scale": self.scale,
                    "x": x,
                    "number": 3,
                    "extra": extra * 2,
                }

    batches = [(x, x * 3, y) for x, y in batches_of(4, 8)]
    assert_same_bits(
        Nested,
        batches,
        num_workers=3,
        loss_fn=lambda outputs, target: F.mse_loss(outputs["a"][1][0].sum(1), target),
    )


def test_an_input_that_only_the_last_worker_reads() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, late):
            return self.last(self.first(x)) * late

    batches = [(x, x.exp(), y) for x, y in batches_of(4, 8)]
    assert_same_bits(
        Late,
        batches,
        num_workers=3,
        place=lambda net: (net.first.place("MS_WORKER", 0), net.last.place("MS_WORKER", 2)),
        loss_fn=lambda outputs, target: F.mse_loss(outputs.sum(1), target),
    )
