"""A resolved placement, written out and applied again, gives the same plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pass_helpers import captured
from torch import nn

import graphsplit as gs
from graphsplit.capture.graph import CapturedGraph, NodeKind
from graphsplit.marks.annotations import annotations_of
from graphsplit.marks.rules import kept_rules
from graphsplit.partition.dump import describe_plan
from graphsplit.partition.edges import partition
from graphsplit.placement.resolve import PlacedGraph, PlacementRules, resolve
from graphsplit.placement.written import WrittenPlacement, write_placement

X = torch.zeros(2, 4)
WORKERS = 3


class Block(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.norm, self.fc, self.shared = nn.LayerNorm(4), nn.Linear(4, 4), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shared(self.fc(self.norm(x)).relu())


class Net(nn.Module):
    """Repeating layers, one of them called from all the others, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        shared = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block(shared) for _ in range(5))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        low, high = self.head(x).chunk(2, -1)
        return low * high


def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs - target[:, :2]).square().mean()


@pytest.fixture(scope="module")
def graph() -> CapturedGraph:
    return captured(Net(), X, X, loss_fn=loss_fn)


def rules_of(network: nn.Module) -> PlacementRules:
    kept = kept_rules(network)
    return PlacementRules(
        WORKERS, annotations_of(network), "affinity", {}, kept.operations, kept.parameters
    )


def written(graph: CapturedGraph, network: nn.Module) -> tuple[PlacedGraph, WrittenPlacement]:
    rules = rules_of(network)
    placed = resolve(graph, rules)
    return placed, write_placement(placed, rules, network)


def assert_same_plan(placed: PlacedGraph, mapping: Any, network: nn.Module) -> None:
    again = resolve(placed.graph, rules_of(gs.apply_placement(network, mapping)))
    assert again.workers == placed.workers
    assert describe_plan(partition(again)) == describe_plan(partition(placed))


def by_layer(network: nn.Module) -> None:
    for i, layer in enumerate(network.layers):
        layer.place("MS_WORKER", i // 2)


def by_slice(network: nn.Module) -> None:
    network.layers[1:4].place("MS_WORKER", 2)
    network.place("MS_WORKER", 1)


def by_rules(network: nn.Module) -> None:
    gs.apply_placement(
        network,
        {
            "modules": {"layers.{0..2}": 1, "layers.*.norm": 2, "head": 0},
            "operations": {"layers.3": {"relu": 2}, "(network)": {"chunk": 1}},
            "parameters": {"embed.weight": 2},
        },
    )


def nothing(network: nn.Module) -> None:
    pass


@pytest.mark.parametrize("place", [nothing, by_layer, by_slice, by_rules])
def test_a_written_placement_gives_the_same_plan(
    graph: CapturedGraph, place: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    network = Net()
    place(network)
    placed, found = written(graph, network)
    assert_same_plan(placed, found.as_mapping(), Net())
    for name in ("placement.yaml", "placement.json"):
        found.save(tmp_path / name)
        assert yaml.safe_load((tmp_path / name).read_text()) == found.as_mapping()
        assert_same_plan(placed, tmp_path / name, Net())
    if place is not by_rules:  # beside the code that placed it at first, too
        place(again := Net())
        assert_same_plan(placed, found.as_mapping(), again)


@pytest.mark.parametrize("seed", range(20))
def test_any_placement_of_operations_can_be_written(graph: CapturedGraph, seed: int) -> None:
    choices = random.Random(seed)
    workers: list[int] = []
    for node in graph.nodes:
        if node.kind is NodeKind.OPERATION or node.is_state:
            worker = choices.randrange(WORKERS)
            workers.append(workers[node.reads[0]] if node.with_producer else worker)
        else:
            workers.append(-1)
    placed = PlacedGraph(graph, tuple(workers), ("drawn",) * len(workers), WORKERS)
    found = write_placement(placed, PlacementRules(WORKERS), Net())
    assert_same_plan(placed, found.as_mapping(), Net())


def test_blocks_in_the_code_stay_in_force() -> None:
    class Blocks(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with gs.place("MS_WORKER", 2):
                x = self.layers[0](x)
            return super().forward(x)

    graph = captured(Blocks(), X, X, loss_fn=loss_fn)
    network = Blocks()
    network.place("MS_WORKER", 1)
    placed, found = written(graph, network)
    assert 2 not in found.modules.values()
    assert_same_plan(placed, found.as_mapping(), Blocks())


def test_repeating_layers_are_written_once_with_a_remark(graph: CapturedGraph) -> None:
    network = Net()
    by_layer(network)
    _, found = written(graph, network)
    text = found.as_yaml()
    assert "  layers.{2..3}: 1  # in the code at placement/test_written.py:" in text
    assert text.startswith("# Placement of the train graph over 3 worker(s).\n")


def test_a_network_that_is_a_sequence_is_written_in_quotes() -> None:
    network = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for i, layer in enumerate(network):
        layer.place("MS_WORKER", i // 2)
    graph = captured(network, X, X[:, :1].sum(), loss_fn=nn.MSELoss())
    _, found = written(graph, network)
    assert "'{2..3}': 1" in found.as_yaml()


def test_a_model_writes_its_placement_and_plans_the_same_again(tmp_path: Path) -> None:
    def model(network: nn.Module) -> gs.Model:
        return gs.Model(network, loss_fn=loss_fn)

    network = Net()
    by_layer(network)
    first, path = model(network), tmp_path / "placement.yaml"
    mapping = first.placement(X, X)
    first.save_placement(path, X, X)
    assert yaml.safe_load(path.read_text()) == mapping
    again = model(gs.apply_placement(Net(), path))
    assert again.placement(X, X) == mapping
