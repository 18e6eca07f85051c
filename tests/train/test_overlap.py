"""Trained parameters over one memory are refused on two workers, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphsplit.errors import PlacementError
from graphsplit.testing.equivalence import assert_same_bits
from graphsplit.train.overlap import overlapping

BATCHES = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(2)]


class AutoEncoder(nn.Module):
    """The decoder's parameter is another one over the encoder's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight = nn.Parameter(self.first.weight.data.t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x).relu())
        return found


def placed(net: nn.Module, ranks: tuple[int, int]) -> None:
    for layer, rank in zip((net.first, net.second), ranks, strict=True):
        layer.place("MS_WORKER", rank)


def test_two_parameters_over_one_memory_live_on_one_worker() -> None:
    loss_fn = nn.MSELoss()
    assert_same_bits(
        AutoEncoder, BATCHES, num_workers=2, loss_fn=loss_fn, place=lambda net: placed(net, (1, 1))
    )
    with pytest.raises(PlacementError, match=r"first.weight and second.weight are different ten"):
        assert_same_bits(
            AutoEncoder,
            BATCHES,
            num_workers=2,
            loss_fn=loss_fn,
            place=lambda net: placed(net, (0, 1)),
        )


def test_only_numbers_that_are_shared_and_trained_count() -> None:
    flat = torch.zeros(8, 4)
    rows = {name: nn.Parameter(flat[i : i + 2]) for i, name in ((0, "top"), (2, "next"))}
    columns = {name: nn.Parameter(flat[4:, i::2]) for i, name in enumerate(("even", "odd"))}
    assert overlapping({**rows, **columns}) == ()
    tied = {"one": rows["top"], "again": rows["top"]}
    assert overlapping(tied) == ()
    masks = {"mask": flat[:3], "part": flat[:2]}
    assert overlapping(masks) == ()
    assert overlapping({**rows, "part": flat[1]}) == (("top", "part"),)
    assert overlapping({"even": columns["even"], "other": flat[4:6]}) == (("even", "other"),)
    away = {"here": nn.Parameter(torch.zeros(3, device="meta")), "empty": torch.zeros(0)}
    assert overlapping(away) == ()
