"""Splits that bring about other splits are found in a few rounds, not in one round for each."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, settings
from pass_helpers import Op, placed_graph, placed_graphs

from graphsplit.partition import edges
from graphsplit.partition.checks.sound import verify
from graphsplit.partition.dump import describe_plan
from graphsplit.partition.edges import foresee_splits
from graphsplit.placement.resolve import PlacedGraph


def gated_layers(num_layers: int) -> PlacedGraph:
    """What every layer mixes in is made up front; it meets the gate of the layer before."""
    ops = {f"v{i}": Op(0, ("x", "w")) for i in range(num_layers)}
    ops |= {"far": Op(1, ("v0",)), "gate0": Op(0, ("v0",))}
    for i in range(1, num_layers):
        ops[f"mixed{i}"] = Op(0, (f"v{i}", f"gate{i - 1}"))
        ops[f"gate{i}"] = Op(0, (f"v{i}",))
    mixed = tuple(f"mixed{i}" for i in range(1, num_layers))
    ops["loss"] = Op(0, ("far", f"gate{num_layers - 1}", *mixed))
    return placed_graph(ops, parameters={"w": 0})


def layers_that_reach_back(num_layers: int) -> PlacedGraph:
    """As above, but what meets each layer stands before everything that the split moves."""
    ops = {f"v{i}": Op(0, ("x", "w")) for i in range(num_layers)}
    ops |= {f"early{i}": Op(0, (f"v{i}",)) for i in reversed(range(num_layers))}
    ops |= {"far": Op(1, ("v0",)), "late0": Op(0, ("v0",))}
    for i in range(1, num_layers):
        ops[f"mixed{i}"] = Op(0, (f"v{i}", f"early{i - 1}"))
        ops[f"late{i}"] = Op(0, (f"v{i}",))
    mixed = tuple(f"mixed{i}" for i in range(1, num_layers))
    ops["loss"] = Op(0, ("far", f"late{num_layers - 1}", *mixed))
    return placed_graph(ops, parameters={"w": 0})


@pytest.mark.parametrize("make", [gated_layers, layers_that_reach_back])
def test_a_hundred_layers_take_few_rounds_and_give_the_same_plan(make) -> None:
    graph = make(100)
    cut = edges.cut_into_segments
    with mock.patch.object(edges, "cut_into_segments", side_effect=cut) as rounds:
        plan = edges.partition(graph)
    assert rounds.call_count <= 12
    verify(plan)
    with (
        mock.patch.object(edges, "_PATIENCE", 10_000),
        mock.patch.object(edges, "cut_into_segments", side_effect=cut) as rounds,
    ):
        assert describe_plan(edges.partition(graph)) == describe_plan(plan)
    assert rounds.call_count > 90


@settings(max_examples=60, deadline=None)
@given(placed_graphs(max_operations=20))
def test_with_splits_foreseen_from_the_start_any_plan_is_sound(graph: PlacedGraph) -> None:
    with mock.patch.object(edges, "_PATIENCE", 0):
        verify(edges.partition(graph))


def test_a_graph_in_eager_order_needs_no_split() -> None:
    ops = {"a": Op(0, ("x", "w")), "b": Op(1, ("a",)), "c": Op(0, ("a", "b"))}
    graph = placed_graph(ops, parameters={"w": 0})
    assert foresee_splits(graph, frozenset(), frozenset()) == frozenset()
    assert foresee_splits(graph, frozenset({2}), frozenset()) == frozenset({2})
