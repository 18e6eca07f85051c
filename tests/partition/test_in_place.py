"""Modified memory stays as it is where it lies together, and gets versions where it is torn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_helpers import captured, placed
from torch import nn

from graphsplit import place
from graphsplit.capture.graph import Mode
from graphsplit.partition.checks.sound import verify
from graphsplit.partition.edges import partition
from graphsplit.placement.resolve import PlacedGraph
from graphsplit.rewrite.keep_together import keep_memory_together

X = torch.zeros(4, 4)


class Runs(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("buffer", torch.zeros(4))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def placed_by_blocks(
    function: Any, *, num_workers: int = 3, mode: Mode = Mode.TRAIN
) -> PlacedGraph:
    network = Runs(function)
    return placed(network, captured(network, X, mode=mode), num_workers=num_workers)


def normalised(net: Runs, x: torch.Tensor) -> torch.Tensor:
    with place("MS_WORKER", 1):
        y = net.norm(x)
    return net.fc(y).sum()


def written_in_one_segment(net: Runs, x: torch.Tensor) -> torch.Tensor:
    with place("MS_WORKER", 0):
        y = torch.zeros_like(x)
        y[:, 0] = net.fc(x)[:, 0]
        total = (y * 2).sum(1)
    with place("MS_WORKER", 1):
        return total.sum()


def buffer_used_on_its_worker_only(net: Runs, x: torch.Tensor) -> torch.Tensor:
    with place("MS_WORKER", 1):
        net.buffer.add_(1)
    with place("MS_WORKER", 0):
        y = net.fc(x)
    with place("MS_WORKER", 1):
        return (y + net.buffer).sum()


@pytest.mark.parametrize(
    "function", [normalised, written_in_one_segment, buffer_used_on_its_worker_only]
)
def test_memory_that_lies_together_is_left_alone(function: Any) -> None:
    before = placed_by_blocks(function)
    assert keep_memory_together(before)[0] is before


def written_on_two_workers(net: Runs, x: torch.Tensor) -> torch.Tensor:
    with place("MS_WORKER", 0):
        y, kept = torch.zeros_like(x), torch.zeros_like(x)
        y[:, 0] = net.fc(x)[:, 0]
        kept[:, 0] = net.fc(x)[:, 1]
        total = kept.sum()
    with place("MS_WORKER", 1):
        y[:, 1] = net.fc(x)[:, 1]
    return y.sum() + total


def test_only_what_is_torn_gets_versions() -> None:
    before = placed_by_blocks(written_on_two_workers)
    after = keep_memory_together(before)[0]
    found = [node.target for node in after.graph.nodes if "copy" in node.target]
    assert found.count("write_to_copy[aten.copy_.default]") == 2
    assert found.count("aten.copy_.default") == 1
    verify(partition(after))


def test_work_elsewhere_between_two_writes_tears_memory() -> None:
    def function(net: Runs, x: torch.Tensor) -> torch.Tensor:
        with place("MS_WORKER", 0):
            y = torch.zeros_like(x)
            y[:, 0] = x[:, 0]
        with place("MS_WORKER", 1):
            z = net.fc(y)
        with place("MS_WORKER", 0):
            y[:, 1] = z[:, 1]
            return y.sum()

    after = keep_memory_together(placed_by_blocks(function))[0]
    assert not any(node.shares_modified for node in after.graph.nodes)
    verify(partition(after))


def test_operations_stay_where_they_were_placed() -> None:
    before = placed_by_blocks(written_on_two_workers)
    after = keep_memory_together(before)[0]
    workers = dict(zip((n.name for n in after.graph.nodes), after.workers, strict=True))
    for node, worker in zip(before.graph.nodes, before.workers, strict=True):
        assert workers.get(node.name, worker) == worker
    writes = [n for n in after.graph.nodes if n.target.startswith("write_to_copy")]
    assert [workers[node.name] for node in writes] == [0, 1]


def test_versions_of_a_buffer_go_back_to_its_owner() -> None:
    def function(net: Runs, x: torch.Tensor) -> torch.Tensor:
        y = net.fc(x) + net.buffer
        with place("MS_WORKER", 2):
            net.buffer.add_(1)
        return y.sum()

    after = keep_memory_together(placed_by_blocks(function))[0]
    workers = dict(zip((n.target for n in after.graph.nodes), after.workers, strict=True))
    assert workers["write_to_copy[aten.add_.Tensor]"] == 2
    assert workers["keep_version"] == workers["buffer"] == 0


def test_a_modified_buffer_that_all_workers_are_handed_gets_versions() -> None:
    def function(net: Runs, x: torch.Tensor) -> torch.Tensor:
        net.buffer.add_(1)
        return net.buffer

    alone = placed_by_blocks(function, num_workers=1, mode=Mode.PREDICT)
    assert keep_memory_together(alone)[0] is alone
    shared = keep_memory_together(placed_by_blocks(function, mode=Mode.PREDICT))[0]
    (output,) = shared.graph.outputs
    assert output.node is not None
    assert shared.graph.nodes[output.node].target == "write_to_copy[aten.add_.Tensor]"


def test_equal_graphs_give_equal_graphs() -> None:
    first = keep_memory_together(placed_by_blocks(written_on_two_workers))[0]
    second = keep_memory_together(placed_by_blocks(written_on_two_workers))[0]
    assert first.graph.describe() == second.graph.describe()
    assert (first.workers, first.reasons) == (second.workers, second.reasons)
