"""What people read about a plan; the files under tests/golden/ are reviewed by a person."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pass_helpers import captured, lenet_plan, placed
from torch import nn

from graphsplit.partition.dump import describe_plan
from graphsplit.partition.edges import partition
from graphsplit.partition.explain import explain_plan
from graphsplit.partition.folding import Row, fold_repetitions
from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.lower import describe_programs, lower
from graphsplit.schedule.gpipe import gpipe

Golden = Callable[[str, str], None]


@pytest.fixture(scope="module")
def lenet() -> PartitionPlan:
    return lenet_plan()


def test_lenet_on_five_workers_explained(lenet: PartitionPlan, golden: Golden) -> None:
    golden("lenet_explain.txt", explain_plan(lenet))


def test_lenet_on_five_workers_as_a_plan(lenet: PartitionPlan, golden: Golden) -> None:
    golden("lenet_plan.txt", describe_plan(lenet))


def test_lenet_on_five_workers_as_programs(lenet: PartitionPlan, golden: Golden) -> None:
    golden("lenet_programs.txt", describe_programs(lower(lenet, gpipe)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc(self.norm(x)).relu()


class Repeating(nn.Module):
    """Eight layers, the last three on worker 1, and a head that shares the first weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(8))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        for i, layer in enumerate(self.layers):
            layer.place("MS_WORKER", i // 5)
        self.embed.place("MS_WORKER", 0)
        self.head.place("MS_WORKER", 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.dropout(x)).sum()


def test_a_model_that_repeats_is_explained_once_per_worker(golden: Golden) -> None:
    network = Repeating()
    graph = captured(network, torch.zeros(2, 4))
    golden("repeating_explain.txt", explain_plan(partition(placed(network, graph, num_workers=2))))


def paths(*rows: tuple[str, str]) -> list[tuple[str, str]]:
    made = [Row(path, (cell,), frozenset({0})) for path, cell in rows]
    return [(row.path, row.cells[0]) for row in fold_repetitions(made)]


def test_modules_that_differ_by_their_number_are_one() -> None:
    rows = [(f"net.layers.{i}.fc", f"linear_{i} in net.layers.{i}") for i in range(12)]
    assert paths(*rows) == [("net.layers.{0..11}.fc", "linear in net.layers.{0..11}")]


def test_a_module_that_differs_stands_alone() -> None:
    rows = [(f"h.{i}", "worker 1" if i == 2 else "worker 0") for i in range(5)]
    assert paths(*rows) == [
        ("h.{0..1}", "worker 0"),
        ("h.2", "worker 1"),
        ("h.{3..4}", "worker 0"),
    ]


def test_a_module_shown_alone_keeps_the_names_of_its_nodes() -> None:
    assert paths(("h.3", "beside relu_3")) == [("h.3", "beside relu_3")]


def test_layers_with_more_rows_than_others_stand_alone() -> None:
    rows = [("h.0", "a"), ("h.1", "a"), ("h.1", "b"), ("h.2", "a")]
    assert paths(*rows) == rows


def test_a_gap_in_the_numbers_or_another_module_between_ends_a_repetition() -> None:
    rows = [("h.0", "a"), ("h.2", "a"), ("other", "a"), ("h.3", "a")]
    assert paths(*rows) == rows


def test_repetitions_inside_repetitions_are_folded_first() -> None:
    rows = [(f"h.{i}.experts.{k}", "a") for i in range(3) for k in range(4)]
    assert paths(*rows) == [("h.{0..2}.experts.{0..3}", "a")]


def test_a_number_is_replaced_as_a_whole_only() -> None:
    rows = [(f"h.{i}", f"like h.{i}0 and fh.{i}") for i in range(1, 3)]
    assert paths(*rows) == rows


def test_a_network_that_is_a_sequence_is_folded_too() -> None:
    assert paths(("0", "a"), ("1", "a")) == [("{0..1}", "a")]


def test_no_rows_fold_to_none() -> None:
    assert paths() == []
