"""Which operations touch memory that changes in forward, however they come to it."""

from __future__ import annotations

import torch
from pass_helpers import captured
from torch import nn

from graphsplit.capture.graph import CapturedGraph, Mode


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(2, 4))
        self.register_buffer("fixed", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.seen[0] + x  # a view, read before
        self.seen.mul_(0.9)
        second = self.seen.t() + x.sum()  # a view, read after
        return first.sum() + second.sum() + (x * self.fixed).sum()


def touched(graph: CapturedGraph) -> dict[str, list[str]]:
    names = {
        graph.nodes[value].target: [graph.nodes[p].target for p in sorted(positions)]
        for value, positions in graph.touching.items()
    }
    return {name: [t.removeprefix("aten.") for t in found] for name, found in names.items()}


def test_reads_and_writes_are_found_through_views_before_and_after() -> None:
    graph = captured(Counting(), torch.zeros(4), mode=Mode.PREDICT)
    assert {graph.nodes[value].target for value in graph.modified} == {"seen"}
    assert touched(graph) == {
        "seen": ["select.int", "add.Tensor", "mul_.Tensor", "t.default", "add.Tensor"]
    }


def test_batch_normalisation_touches_its_statistics() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    graph = captured(network, torch.zeros(3, 4), torch.zeros(()), loss_fn=lambda y, _: y.sum())
    found = touched(graph)
    assert sorted(found) == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    assert found["1.running_mean"] == ["batch_norm.default"]
    assert found["1.num_batches_tracked"] == ["add_.Tensor"]


def test_without_modification_there_is_nothing() -> None:
    graph = captured(nn.Linear(4, 4), torch.zeros(4), mode=Mode.PREDICT)
    assert (graph.modified, graph.touching) == (frozenset(), {})
