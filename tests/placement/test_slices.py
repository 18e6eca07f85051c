"""Slices of containers, and modules that have several names."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from pass_helpers import captured, placed
from torch import nn

from graphsplit.capture.graph import NodeKind
from graphsplit.errors import PlacementError
from graphsplit.marks.annotations import annotations_of, mark_planned

X = torch.zeros(2, 4)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def ranks(network: nn.Module) -> dict[str, int]:
    return {path: found.rank for path, found in annotations_of(network).items()}


def workers(network: nn.Module) -> list[int]:
    result = placed(network, captured(network, X))
    kinds = [node.kind for node in result.graph.nodes]
    return [w for w, kind in zip(result.workers, kinds, strict=True) if kind is NodeKind.OPERATION]


def test_placing_a_slice_places_its_modules() -> None:
    network = Tower()
    network.layers[0:3].place("MS_WORKER", 1)
    network.layers[3:].place("MS_WORKER", 2)
    assert ranks(network) == {f"layers.{i}": 1 + i // 3 for i in range(6)}
    assert workers(network) == [1, 1, 1, 2, 2, 2, 2]


def test_placing_a_slice_returns_the_slice() -> None:
    network = Tower()
    assert len(network.layers[1:3].place("MS_WORKER", 1)) == 2


def test_a_slice_of_a_sequence_is_placed_too() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    network[0:2].place("MS_WORKER", 1)
    assert ranks(network) == {"0": 1, "1": 1}


@pytest.mark.parametrize("whole_first", [True, False])
def test_a_slice_is_nearer_than_the_whole_list(whole_first: bool) -> None:
    network = Tower()
    steps = [
        lambda: network.layers.place("MS_WORKER", 0),
        lambda: network.layers[4:].place("MS_WORKER", 1),
    ]
    for step in steps if whole_first else reversed(steps):
        step()
    for found in (network, copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert workers(found) == [0, 0, 0, 0, 1, 1, 1]


def test_a_modules_own_placement_wins_over_a_slice() -> None:
    network = Tower()
    network.layers[1].place("MS_WORKER", 2)
    network.layers[0:3].place("MS_WORKER", 1)
    assert ranks(network) == {"layers.0": 1, "layers.1": 2, "layers.2": 1}


def test_the_latest_of_several_slices_wins() -> None:
    network = Tower()
    network.layers[0:4].place("MS_WORKER", 1)
    network.layers[2:6].place("MS_WORKER", 2)
    assert [ranks(network)[f"layers.{i}"] for i in range(6)] == [1, 1, 2, 2, 2, 2]


def test_placing_a_slice_of_a_planned_network_is_refused() -> None:
    network = Tower()
    mark_planned(network)
    with pytest.raises(PlacementError, match="already planned"):
        network.layers[0:2].place("MS_WORKER", 1)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Sharing(nn.Module):
    """One layer, called under two names."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.left, self.right = Outer(shared), Outer(shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.left(x) * self.right(x)).sum()


def test_a_shared_module_runs_with_the_name_that_it_is_called_by() -> None:
    network = Sharing()
    network.left.place("MS_WORKER", 1)
    network.right.place("MS_WORKER", 2)
    assert workers(network)[:2] == [1, 2]


def test_a_shared_modules_own_placement_holds_under_all_its_names() -> None:
    network = Sharing()
    network.left.place("MS_WORKER", 1)
    network.right.inner.place("MS_WORKER", 2)
    assert workers(network)[:2] == [2, 2]
