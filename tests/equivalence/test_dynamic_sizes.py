"""One plan for batches of many sizes, with the bits of one process for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from simulated.equivalence import assert_same_bits
from simulated.simulate import SimulatedCluster
from torch import nn

import graphsplit as gs
from graphsplit.capture.graph import Mode


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return mixed.transpose(1, 2).flatten(2)


class _Tagger(nn.Module):
    """Embedding, attention over the sequence, and a loss per token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.attention = _Attention()
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        batch, length = ids.shape
        x = self.embedding(ids)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        x = self.dropout(x + self.attention(x, mask)).reshape(batch * length, -1)
        logits = self.head(x) * (0.1 * length * 0.3)
        loss = nn.functional.cross_entropy(logits, labels.reshape(-1))
        return {"loss": loss, "logits": logits, "length": length}


def _batches(shapes: list[tuple[int, int]]) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "ids": torch.randint(0, 50, shape, generator=generator),
            "labels": torch.randint(0, 50, shape, generator=generator),
        }
        for shape in shapes
    ]


def _place(net: nn.Module) -> None:
    net.embedding.place("MS_WORKER", 0)
    net.attention.place("MS_WORKER", 1)
    net.head.place("MS_WORKER", 2)


def _num_plans(cluster: SimulatedCluster, mode: Mode) -> int:
    plans = cluster.workers[0].planner._plans.values()
    return sum(planned.plan.placed.graph.mode is mode for planned in plans)


def test_fifty_lengths_are_planned_once() -> None:
    shapes = [(2 + length % 3, length) for length in range(3, 53)]
    cluster = assert_same_bits(
        _Tagger,
        _batches(shapes),
        num_workers=3,
        place=_place,
        evaluate_after={0, 20, 49},
        dynamic_dims={0: 8, 1: 64},
    )
    assert _num_plans(cluster, Mode.TRAIN) == 1


def test_a_size_of_one_is_planned_apart() -> None:
    cluster = assert_same_bits(
        _Tagger,
        _batches([(2, 5), (1, 5), (2, 1), (3, 7), (1, 9)]),
        num_workers=3,
        place=_place,
        evaluate_after=range(5),
        dynamic_dims={0: 8, 1: 64},
    )
    assert 1 < _num_plans(cluster, Mode.TRAIN) <= 3


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.long if x.shape[0] > 6 else self.short
        return layer(x).square().mean()


def test_a_branch_on_a_size_makes_one_plan_per_side() -> None:
    generator = torch.Generator().manual_seed(2)
    batches = [(torch.randn(n, 4, generator=generator),) for n in (3, 9, 4, 12, 6, 7)]
    cluster = assert_same_bits(
        _Branching,
        batches,
        num_workers=2,
        place=lambda net: net.long.place("MS_WORKER", 1),
        evaluate_after=range(6),
        dynamic_dims={0: 16},
    )
    assert _num_plans(cluster, Mode.TRAIN) == 2


@pytest.mark.parametrize("seed", range(3))
def test_any_dimension_of_a_convolution_may_change(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(2, 9, 9), (3, 12, 9), (5, 8, 16), (2, 16, 16), (4, 11, 13)]
    batches = [
        (torch.randn(n, 3, h, w, generator=generator), torch.randn(n, generator=generator))
        for n, h, w in sizes
    ]

    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3)
            self.norm = nn.BatchNorm2d(8)
            self.second = nn.Conv2d(8, 4, 3, padding=1)
            self.head = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.norm(self.first(x)))
            return self.head(self.second(x).mean((2, 3))).squeeze(-1)

    cluster = assert_same_bits(
        Convolutions,
        batches,
        num_workers=3,
        loss_fn=nn.MSELoss(),
        place=lambda net: (
            net.first.place("MS_WORKER", seed % 3),
            net.norm.place("MS_WORKER", (seed + 1) % 3),
            net.second.place("MS_WORKER", (seed + 2) % 3),
        ),
        evaluate_after=range(5),
        dynamic_dims={0: 8, 2: 16, 3: 16},
    )
    assert _num_plans(cluster, Mode.TRAIN) == 1


class _Masked(nn.Module):
    """Leaves its mask out where that masks nothing, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        positions = torch.arange(ids.shape[1])
        if (positions >= 20).any():
            x = x * 0.5
        if not mask.all():
            x = x * mask.unsqueeze(-1)
        return self.head(x).square().mean()


class _AskedBefore(_Masked):
    """Asks for two sizes before it turns out that they are one, as GPT-2 does."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        is_long = all((torch.arange(one.shape[1]) >= 20).any() for one in (ids, mask))
        x = self.embedding(ids) * mask.unsqueeze(-1)
        return self.head(x * 0.5 if is_long else x).square().mean()


@pytest.mark.parametrize("kind", [_Masked, _AskedBefore])
def test_what_was_asked_of_known_values_is_asked_again_for_other_sizes(kind: type[_Masked]) -> None:
    batches = [
        {"ids": batch["ids"], "mask": torch.ones_like(batch["ids"])}
        for batch in _batches([(3, 5), (2, 9), (3, 30), (4, 12), (2, 25)])
    ]
    cluster = assert_same_bits(
        kind,
        batches,
        num_workers=2,
        place=lambda net: net.head.place("MS_WORKER", 1),
        evaluate_after=range(len(batches)),
        dynamic_dims={0: 8, 1: 64},
    )
    assert _num_plans(cluster, Mode.TRAIN) == 2  # short and long


class _Recurrent(nn.Module):
    """A GRU, whose first state has the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(10, 8), nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.gru(self.embed(tokens))[0][:, -1])
        return made


def test_a_recurrent_layer_takes_batches_of_other_sizes() -> None:
    def place(net: Any) -> None:
        for rank, name in enumerate(("embed", "gru", "head")):
            getattr(net, name).place("MS_WORKER", rank)

    generator = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randint(0, 10, (rows, 5), generator=generator),
            torch.randint(0, 3, (rows,), generator=generator),
        )
        for rows in (16, 10, 16, 7)
    ]
    assert_same_bits(
        _Recurrent,
        batches,
        num_workers=3,
        place=place,
        loss_fn=F.cross_entropy,
        dynamic_dims={0: 16},
    )


class _NextToken(nn.Module):
    """Reads its batch as it lies, and turned round on another worker."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        with gs.place("MS_WORKER", 2):
            turned = scale.t()
        x = self.embed(tokens) * turned.sin().t().unsqueeze(-1)
        made: torch.Tensor = self.head(x).flatten(0, 1)
        return made


def test_batches_that_are_views_of_longer_ones_share_a_plan() -> None:
    def place(net: nn.Module) -> None:
        net.embed.place("MS_WORKER", 0)
        net.head.place("MS_WORKER", 1)

    def batch(length: int, beyond: int) -> tuple[torch.Tensor, ...]:
        tokens = torch.randint(0, 50, (4, length + beyond), generator=generator)
        scale = torch.randn(4, length + beyond, generator=generator)
        return tokens[:, :length], scale[:, :length], tokens[:, 1 : length + 1]

    def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, target.flatten())

    generator = torch.Generator().manual_seed(1)
    cluster = assert_same_bits(
        _NextToken,
        [batch(*sizes) for sizes in ((7, 1), (30, 1), (2, 1), (12, 60), (9, 500), (5, 40))],
        num_workers=3,
        place=place,
        loss_fn=loss_fn,
        dynamic_dims={1: 32},
    )
    assert _num_plans(cluster, Mode.TRAIN) == 2  # a stride of 509 is beyond what buffers hold
