"""What people read about a plan; the files under tests/golden/ are reviewed by a person."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from pass_helpers import Op, captured, lenet_plan, placed, placed_graph
from torch import nn

import graphsplit as gs
from graphsplit.capture.graph import Mode
from graphsplit.partition.dump import describe_plan
from graphsplit.partition.edges import partition
from graphsplit.partition.explain.folding import Row, fold_repetitions
from graphsplit.partition.explain.modules import module_lines
from graphsplit.partition.explain.plan import explain_plan
from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.lower import describe_programs, lower
from graphsplit.schedule.named import gpipe

Golden = Callable[[str, str], None]


@pytest.fixture(scope="module")
def lenet() -> PartitionPlan:
    return lenet_plan()


def test_lenet_on_five_workers_explained(lenet: PartitionPlan, golden: Golden) -> None:
    golden("lenet_explain.txt", explain_plan(lenet, optimizer_copies=1))


def test_every_operation_of_lenet_explained(lenet: PartitionPlan, golden: Golden) -> None:
    golden("lenet_operations.txt", explain_plan(lenet, detail="operations"))


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
    plan = partition(placed(network, graph, num_workers=2))
    golden("repeating_explain.txt", explain_plan(plan))
    golden("repeating_operations.txt", explain_plan(plan, detail="operations"))


def test_sizes_of_a_plan_for_microbatches_are_told_of_one(lenet: PartitionPlan) -> None:
    whole = explain_plan(lenet)
    split = explain_plan(replace(lenet, is_microbatched=True))
    assert "per step" not in split
    assert split == whole.replace("per step", "per microbatch")


def llama_plan(num_layers: int, num_workers: int) -> PartitionPlan:
    """A Llama whose layers are spread evenly over the workers; nothing else is placed."""
    import transformers  # only where it is needed: it takes seconds

    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
        tie_word_embeddings=True,
    )
    network = transformers.LlamaForCausalLM(config)
    size = num_layers // num_workers
    for worker in range(num_workers):
        layers = network.model.layers[worker * size : (worker + 1) * size]
        layers.place("MS_WORKER", worker)
    network.lm_head.place("MS_WORKER", num_workers - 1)
    ids = torch.zeros(2, 6, dtype=torch.int64)
    graph = captured(network, input_ids=ids, labels=ids)
    return partition(placed(network, graph, num_workers=num_workers))


def without_numbers(lines: list[str]) -> str:
    """The first two columns and the last: what is where, and why."""
    header, *rows = lines
    end, start = header.index("parameters"), header.index("why")
    return "\n".join(f"{row[:end]:40}{row[start:]}".rstrip() for row in rows)


@pytest.mark.parametrize(("num_layers", "num_workers"), [(2, 2), (12, 4)])
def test_a_llama_is_explained_on_two_screens(
    num_layers: int, num_workers: int, golden: Golden
) -> None:
    plan = llama_plan(num_layers, num_workers)
    golden(f"llama_{num_layers}_modules.txt", without_numbers(module_lines(plan)))
    lines = explain_plan(plan, optimizer_copies=2).splitlines()
    assert len(lines) < 75
    assert max(map(len, lines)) <= 120
    title = lines.index("Borrowed parameters and buffers")
    assert lines[title + 2].split()[:3] == ["parameter", "model.embed_tokens.weight", "0"]
    assert max(map(len, explain_plan(plan, detail="operations").splitlines())) <= 120


def test_what_is_placed_but_decides_nothing_is_noted() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    network[1].place("MS_WORKER", 1)
    graph = captured(network, torch.zeros(2, 4), torch.zeros(2, 4), loss_fn=nn.MSELoss())
    text = explain_plan(partition(placed(network, graph, num_workers=2)))
    assert "Notes\n  module '1' is placed on worker 1, but nothing in this graph is placed" in text


def test_like_crossings_are_shown_together_and_the_smallest_are_counted() -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(())
            for size in range(1, 20):
                with gs.place("MS_WORKER", 0):
                    made = x.new_ones(size) * x.sum()
                with gs.place("MS_WORKER", 1):
                    total = total + made.sum()
            return total

    graph = captured(Wide(), torch.zeros(2, 4), mode=Mode.PREDICT)
    text = explain_plan(partition(placed(nn.Module(), graph, num_workers=2)))
    assert re.search(r"\.\.\. and 8 smaller ones, \d+ B; detail='operations' shows all", text)


def test_the_longest_chain_of_workers_is_shortened_in_the_middle() -> None:
    names = [f"op{i}" for i in range(40)]
    ops = {
        name: Op(i % 2, (names[i - 1] if i else "x",), requires_grad=False)
        for i, name in enumerate(names)
    }
    text = explain_plan(partition(placed_graph(ops, mode=Mode.PREDICT)))
    assert "39 changes: worker 0 -> 1 -> 0 -> 1 -> 0 -> 1 -> 0 -> 1 -> 0 -> ... -> 0 -> 1" in text


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
