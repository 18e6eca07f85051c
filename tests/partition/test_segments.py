"""Segments are convex and never wait for each other in a circle, whatever the placement."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from pass_helpers import Op, captured, placed, placed_graph, placed_graphs
from torch import nn

import graphsplit as gs
from graphsplit.capture.graph import NodeKind
from graphsplit.errors import PlacementError
from graphsplit.partition.checks.sound import segment_graph, verify
from graphsplit.partition.edges import partition
from graphsplit.partition.plan import EdgeKind, PartitionPlan
from graphsplit.placement.resolve import PlacedGraph

EXAMPLES = settings(max_examples=60, deadline=None)


def segments(plan: PartitionPlan) -> list[tuple[int, str]]:
    """Worker of each segment, and what it runs."""
    nodes = plan.placed.graph.nodes
    return [(s.worker, " ".join(nodes[p].name for p in s.nodes)) for s in plan.segments]


def chain(*workers: int) -> PlacedGraph:
    names = ["x", *(f"op{i}" for i in range(len(workers)))]
    ops = {f"op{i}": Op(w, (names[i],), requires_grad=False) for i, w in enumerate(workers)}
    return placed_graph(ops)


@EXAMPLES
@given(placed_graphs())
def test_any_graph_on_any_placement_makes_a_sound_plan(graph: PlacedGraph) -> None:
    verify(partition(graph))


@EXAMPLES
@given(placed_graphs())
def test_no_path_leaves_a_segment_and_comes_back(graph: PlacedGraph) -> None:
    plan = partition(graph)
    segment_of = plan.segmentation.segment_of
    wires = nx.DiGraph()
    for position, node in enumerate(graph.graph.nodes):
        wires.add_edges_from((before, position) for before in (*node.reads, *node.runs_after))
    nx.add_path(wires, plan.segmentation.random_chain)
    for segment in plan.segments:
        inside = set(segment.nodes)
        after = set().union(*(nx.descendants(wires, p) for p in inside if p in wires)) - inside
        before = set().union(*(nx.ancestors(wires, p) for p in inside if p in wires)) - inside
        assert not after & before
    assert all(
        (segment_of[p] >= 0) == (node.kind is NodeKind.OPERATION)
        for p, node in enumerate(graph.graph.nodes)
    )


@EXAMPLES
@given(placed_graphs())
def test_the_graph_of_segments_has_no_cycle(graph: PlacedGraph) -> None:
    assert nx.is_directed_acyclic_graph(segment_graph(partition(graph)))


@EXAMPLES
@given(placed_graphs())
def test_only_tensors_pass_between_segments(graph: PlacedGraph) -> None:
    plan = partition(graph)
    nodes = graph.graph.nodes
    assert all(nodes[c.value].meta is not None for c in plan.contributions)
    assert all(nodes[v].meta is not None for io in plan.io for v in (*io.values, *io.outputs))


def test_one_worker_is_one_segment() -> None:
    assert segments(partition(chain(0, 0, 0))) == [(0, "op0 op1 op2")]


def test_every_change_of_worker_begins_a_segment() -> None:
    found = segments(partition(chain(0, 0, 1, 0, 2)))
    assert found == [(0, "op0 op1"), (1, "op2"), (0, "op3"), (2, "op4")]


def test_branches_on_two_workers_do_not_wait_for_each_other() -> None:
    ops = {
        "left0": Op(0, ("x", "w")),
        "right0": Op(1, ("x",)),
        "left1": Op(0, ("left0",)),
        "right1": Op(1, ("right0",)),
        "join": Op(0, ("left1", "right1")),
    }
    plan = partition(placed_graph(ops, parameters={"w": 0}))
    assert segments(plan) == [(0, "left0 left1"), (1, "right0 right1"), (0, "join")]


def test_an_operation_on_a_parameter_alone_runs_where_its_result_is_used() -> None:
    ops = {
        "a": Op(0, ("x", "w")),
        "b": Op(1, ("a",)),
        "transposed": Op(0, ("w",)),
        "c": Op(0, ("b", "transposed")),
    }
    plan = partition(placed_graph(ops, parameters={"w": 0}))
    assert segments(plan) == [(0, "a"), (1, "b"), (0, "transposed c")]


def test_an_operation_on_inputs_alone_runs_where_its_result_is_used() -> None:
    ops = {
        "a": Op(0, ("x", "w")),
        "b": Op(1, ("a",)),
        "mask": Op(0, ("x",), requires_grad=False),
        "c": Op(0, ("b", "mask")),
    }
    plan = partition(placed_graph(ops, parameters={"w": 0}))
    assert segments(plan) == [(0, "a"), (1, "b"), (0, "mask c")]


def test_elements_of_a_tuple_stay_in_its_segment_though_used_much_later() -> None:
    ops = {
        "split": Op(0, ("w",), makes_tuple=True),
        "first": Op(0, ("split",)),
        "second": Op(0, ("split",)),
        "a": Op(0, ("x", "first")),
        "b": Op(1, ("a",)),
        "c": Op(0, ("b", "second")),
    }
    plan = partition(placed_graph(ops, parameters={"w": 0}))
    assert segments(plan) == [(0, "split first second a"), (1, "b"), (0, "c")]


def test_random_operations_run_in_program_order() -> None:
    ops = {
        "r0": Op(0, ("x",), is_random=True),
        "r1": Op(1, ("x",), is_random=True),
        "r2": Op(0, ("x",), is_random=True),
        "end": Op(0, ("r0", "r1", "r2")),
    }
    plan = partition(placed_graph(ops))
    assert segments(plan) == [(0, "r0"), (1, "r1"), (0, "r2 end")]


def test_an_operation_runs_after_the_write_that_it_must_see() -> None:
    ops = {
        "read": Op(1, ("w",), requires_grad=False),
        "write": Op(0, ("w",), requires_grad=False, changes_inputs=True, runs_after=("read",)),
        "end": Op(0, ("x",), requires_grad=False),
    }
    plan = partition(placed_graph(ops, parameters={"w": 0}))
    assert segments(plan) == [(0, "end"), (1, "read"), (0, "write")]


@EXAMPLES
@given(placed_graphs())
def test_a_value_goes_once_to_every_other_worker_that_uses_it(graph: PlacedGraph) -> None:
    plan = partition(graph)
    workers, nodes = graph.workers, graph.graph.nodes
    needed = {
        (operand, workers[position])
        for position, node in enumerate(nodes)
        for operand in node.reads
        if workers[operand] not in (-1, workers[position])
    }
    loss = graph.graph.loss_node
    assert loss is not None
    needed |= {(loss, w) for w in range(graph.num_workers) if w != workers[loss]}
    edges = [e for e in plan.edges if e.kind is EdgeKind.VALUE]
    assert sorted((e.value, e.destination) for e in edges) == sorted(needed)
    assert all(e.source == workers[e.value] for e in edges)


def test_several_uses_on_one_worker_are_one_edge() -> None:
    ops = {"a": Op(0, ("x",)), "b": Op(1, ("a", "a")), "c": Op(1, ("a", "b"))}
    plan = partition(placed_graph(ops, num_workers=2))
    edges = [(e.value, e.destination) for e in plan.edges if e.kind is EdgeKind.VALUE]
    assert edges == [(1, 1), (3, 0)]  # the value, and the loss back


def test_borrowed_parameters_travel_once_per_step() -> None:
    plan = partition(placed_graph({"a": Op(1, ("x", "w"))}, parameters={"w": 0}))
    (edge,) = [e for e in plan.edges if e.value == 1 and e.kind is EdgeKind.VALUE]
    assert edge.per_step


@EXAMPLES
@given(placed_graphs())
def test_the_generator_travels_along_the_draws_and_then_to_everybody(graph: PlacedGraph) -> None:
    plan = partition(graph)
    drawn = [p for p, node in enumerate(graph.graph.nodes) if node.is_random]
    expected = []
    holder = None
    for position in drawn:
        worker = graph.workers[position]
        if holder is not None and graph.workers[holder] != worker:
            expected.append((holder, graph.workers[holder], worker))
        holder = position
    if holder is not None:
        home = graph.workers[holder]
        expected += [(holder, home, w) for w in range(graph.num_workers) if w != home]
    edges = [e for e in plan.edges if e.kind is EdgeKind.GENERATOR]
    assert [(e.value, e.source, e.destination) for e in edges] == expected


def test_a_tuple_cannot_be_sent() -> None:
    ops = {
        "split": Op(0, ("x",), makes_tuple=True),
        "user": Op(1, ("split",)),
    }
    with pytest.raises(PlacementError, match=r"split .* is no tensor, and would have to be sent"):
        partition(placed_graph(ops))


class WritesAfterACut(nn.Module):
    def __init__(self, writer: int) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.writer = writer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with gs.place("MS_WORKER", 0):
            y = self.fc(x)
            row = y[0]
        with gs.place("MS_WORKER", self.writer):
            row.add_(1)
        with gs.place("MS_WORKER", 0):
            return y.sum()


def test_memory_modified_on_another_worker_is_refused_with_the_users_line() -> None:
    network = WritesAfterACut(1)
    plan = partition(placed(network, captured(network, torch.zeros(2, 4))))
    with pytest.raises(PlacementError, match="share memory that is modified in place") as caught:
        verify(plan)
    line = network.forward.__func__.__code__.co_firstlineno + 5
    assert f"{__file__}:{line}" in str(caught.value)
    assert "Fix: place both on one worker" in str(caught.value)


def test_memory_modified_on_its_own_worker_is_fine() -> None:
    network = WritesAfterACut(0)
    verify(partition(placed(network, captured(network, torch.zeros(2, 4)))))


def test_a_gradient_written_in_place_comes_back_over_the_cut() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with gs.place("MS_WORKER", 0):
                y = torch.zeros_like(x)
                y[:, 0] = self.first(x)[:, 0]
                y = y.relu()
            with gs.place("MS_WORKER", 1):
                return self.second(y).sum()

    network = Writes()
    plan = partition(placed(network, captured(network, torch.zeros(2, 4))))
    back = [e for e in plan.edges if e.kind is EdgeKind.GRADIENT]
    assert [(plan.placed.graph.nodes[e.value].name, e.destination) for e in back] == [("relu", 0)]
