"""Tensors over one memory, of which one changes, are refused on two workers."""

from __future__ import annotations

import pytest
import torch
from simulated.equivalence import assert_same_bits
from torch import nn

from graphsplit.errors import PlacementError
from graphsplit.planning.overlap import overlapping

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


class Viewed(nn.Module):
    """Two buffers over one memory; one is modified, if asked for."""

    def __init__(self, *, modifies: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.modifies = modifies
        memory = torch.zeros(8)
        self.first.register_buffer("part", memory[:4])
        self.second.register_buffer("whole", memory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.modifies:
            self.first.part.add_(h.detach().mean(0)[:4])
        found: torch.Tensor = self.second(h) + self.second.whole
        return found


class Reading(AutoEncoder):
    """Reads a parameter by a view in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight = nn.Parameter(torch.randn(8, 8))
        self.second.view = self.first.weight.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.second.view.sum()  # type: ignore[operator]


def test_memory_that_forward_modifies_is_used_on_one_worker() -> None:
    def run(ranks: tuple[int, int], *, modifies: bool) -> None:
        assert_same_bits(
            lambda: Viewed(modifies=modifies),
            BATCHES,
            num_workers=2,
            loss_fn=nn.MSELoss(),
            place=lambda net: placed(net, ranks),
            plan_everywhere=True,
        )

    run((0, 1), modifies=False)
    run((1, 1), modifies=True)
    with pytest.raises(PlacementError, match="different tensors over the same memory"):
        run((0, 1), modifies=True)


def test_a_trained_parameter_is_not_read_by_a_view_in_an_attribute() -> None:
    with pytest.raises(PlacementError, match=r"first.weight and .*view are different tensors over"):
        assert_same_bits(
            Reading,
            BATCHES,
            num_workers=2,
            loss_fn=nn.MSELoss(),
            place=lambda net: placed(net, (1, 1)),
        )


def test_only_numbers_that_are_shared_count() -> None:
    flat = torch.zeros(8, 4)
    rows = {name: nn.Parameter(flat[i : i + 2]) for i, name in ((0, "top"), (2, "next"))}
    columns = {name: nn.Parameter(flat[4:, i::2]) for i, name in enumerate(("even", "odd"))}
    assert overlapping({**rows, **columns}) == ()
    tied = {"one": rows["top"], "again": rows["top"]}
    assert overlapping(tied) == ()
    masks = {"mask": flat[:3], "part": flat[3:]}
    assert overlapping(masks) == ()
    assert overlapping({**rows, "part": flat[1]}) == (("top", "part"),)
    assert overlapping({"even": columns["even"], "other": flat[4:6]}) == (("even", "other"),)
    away = {"here": nn.Parameter(torch.zeros(3, device="meta")), "empty": torch.zeros(0)}
    assert overlapping(away) == ()
