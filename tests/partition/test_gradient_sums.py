"""Gradients of a value are summed in eager's order: from left to right, latest use first.

Sums are compared as trees, in which the two sides of one addition may change places (a + b is
b + a in floating point) but nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_helpers import Op, placed_graph, placed_graphs

from graphsplit.capture.graph import NodeKind
from graphsplit.partition.edges import partition
from graphsplit.partition.plan import EdgeKind, PartitionPlan, SumTerm
from graphsplit.placement.resolve import PlacedGraph

Tree = Any
Term = tuple[int, int, int]  # operation, operand, and which of the terms that it adds


def total(terms: Sequence[Tree]) -> Tree:
    return reduce(lambda left, right: frozenset({left, right}), terms)


def terms_of(plan: PartitionPlan, value: int) -> list[Term]:
    """The terms of a value's gradient in the order in which eager adds them."""
    nodes = plan.placed.graph.nodes
    return [
        (position, index, part)
        for position in reversed(range(len(nodes)))
        if nodes[position].requires_grad and nodes[position].kind is NodeKind.OPERATION
        for index, operand in enumerate(nodes[position].reads)
        if operand == value
        for part in range(2 if value in nodes[position].repeated else 1)
    ]


def sum_as_planned(plan: PartitionPlan, value: int) -> Tree:
    """The sum that running the plan gives: leaves, edges, sums, then autograd's own uses."""
    terms = terms_of(plan, value)
    by_leaf = {use: c.index for c in plan.contributions for use in c.uses if c.value == value}

    def leaf(contribution: int) -> Tree:
        own = [term for term in terms if by_leaf.get(term[:2]) == contribution]
        return total([*received(plan.seeds.get(contribution, ())), *own])

    def received(terms: Sequence[SumTerm]) -> list[Tree]:
        found: list[Tree] = []
        for term in terms:
            edge = plan.edges[term.edge] if term.edge is not None else None
            parts = edge.contributions if edge is not None else (term.contribution,)
            found.append(total([leaf(c) for c in parts if c is not None]))
        return [total(found)] if found else []

    own = [term for term in terms if term[:2] not in by_leaf]
    return total([*received(plan.gradient_sums.get(value, ())), *own])


def check(graph: PlacedGraph) -> PartitionPlan:
    plan = partition(graph)
    if not graph.graph.has_gradients:
        assert plan.contributions == ()
        return plan
    for value, node in enumerate(graph.graph.nodes):
        if node.requires_grad and (terms := terms_of(plan, value)):
            assert sum_as_planned(plan, value) == total(terms), node.name
    return plan


def uses(*workers: int, producer: int = 0) -> PlacedGraph:
    """A value ``v`` and one use of it after the other, each also reading the one before."""
    ops = {"v": Op(producer, ("x", "w"))}
    before = "x"
    for i, worker in enumerate(workers):
        ops[f"use{i}"] = Op(worker, ("v", before))
        before = f"use{i}"
    return placed_graph(ops, parameters={"w": producer})


def fold_of(plan: PartitionPlan, name: str) -> list[list[str]]:
    """For each term of a value's sum, the operations whose gradients it holds."""
    nodes = plan.placed.graph.nodes
    value = next(p for p, n in enumerate(nodes) if n.name == name)
    terms = []
    for term in plan.gradient_sums.get(value, ()):
        if term.contribution is not None:
            contributions: tuple[int, ...] = (term.contribution,)
        else:
            assert term.edge is not None
            contributions = plan.edges[term.edge].contributions
        terms.append([nodes[u[0]].name for c in contributions for u in plan.contributions[c].uses])
    return terms


@settings(max_examples=120, deadline=None)
@given(placed_graphs())
def test_any_graph_on_any_placement_sums_in_eagers_order(graph: PlacedGraph) -> None:
    check(graph)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(0, 2))
def test_uses_on_any_workers_sum_in_eagers_order(workers: list[int], producer: int) -> None:
    check(uses(*workers, producer=producer))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=8))
def test_uses_that_do_not_wait_for_each_other_sum_in_eagers_order(
    branches: list[tuple[int, bool]],
) -> None:
    ops = {"v": Op(0, ("x", "w"))}
    for i, (worker, is_twice) in enumerate(branches):
        ops[f"use{i}"] = Op(worker, ("v", "v") if is_twice else ("v",))
    ops["end"] = Op(1, tuple(f"use{i}" for i in range(len(branches))))
    check(placed_graph(ops, parameters={"w": 0}))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=7), st.integers(0, 2))
def test_shared_parameters_sum_in_eagers_order(workers: list[int], owner: int) -> None:
    ops: dict[str, Op] = {}
    before = "x"
    for i, worker in enumerate(workers):
        ops[f"use{i}"] = Op(worker, ("w", before))
        before = f"use{i}"
    check(placed_graph(ops, parameters={"w": owner}))


def test_uses_in_one_segment_need_no_leaf() -> None:
    assert check(uses(0, 0, 0)).contributions == ()


def test_the_first_terms_of_a_fold_share_a_leaf() -> None:
    plan = check(uses(1, 1, 1))
    assert fold_of(plan, "v") == [["use0", "use1", "use2"]]


def test_contributions_later_than_all_own_uses_keep_the_segment_whole() -> None:
    plan = check(uses(0, 0, 1, 1))
    assert [s.worker for s in plan.segments] == [0, 1]
    assert fold_of(plan, "v") == [["use2", "use3"]]


def branches(*workers: int) -> PlacedGraph:
    """A value ``v`` on worker 0, uses that do not wait for each other, and where they meet."""
    ops = {"v": Op(0, ("x", "w"))}
    ops |= {f"use{i}": Op(worker, ("v",)) for i, worker in enumerate(workers)}
    ops["end"] = Op(2, tuple(f"use{i}" for i in range(len(workers))))
    return placed_graph(ops, parameters={"w": 0})


def test_an_own_use_before_a_contribution_moves_to_a_later_segment() -> None:
    # a + b = b + a, but the sum takes the strides of its first term.
    plan = check(branches(0, 1, 0))
    assert [s.worker for s in plan.segments] == [0, 0, 1, 2]
    assert fold_of(plan, "v") == [["use2"], ["use1"], ["use0"]]


def test_two_own_uses_before_a_contribution_move_to_a_later_segment() -> None:
    plan = check(branches(1, 0, 0))
    assert [s.worker for s in plan.segments] == [0, 0, 1, 2]
    assert fold_of(plan, "v") == [["use1", "use2"], ["use0"]]


def test_an_own_use_between_contributions_moves_to_a_later_segment() -> None:
    plan = check(branches(1, 0, 1))
    assert fold_of(plan, "v") == [["use2"], ["use1"], ["use0"]]


def test_alternating_uses_come_back_one_by_one() -> None:
    plan = check(uses(1, 0, 1, 0, producer=2))
    assert fold_of(plan, "v") == [["use3"], ["use2"], ["use1"], ["use0"]]


def test_both_operands_of_a_square_are_one_leaf_where_they_come_first() -> None:
    ops = {"v": Op(0, ("x", "w")), "square": Op(1, ("v", "v"))}
    plan = check(placed_graph(ops, parameters={"w": 0}))
    assert fold_of(plan, "v") == [["square", "square"]]


def test_both_operands_of_a_square_are_two_terms_where_they_come_later() -> None:
    ops = {
        "v": Op(0, ("x", "w")),
        "square": Op(1, ("v", "v")),
        "late": Op(2, ("v", "square")),
    }
    plan = check(placed_graph(ops, parameters={"w": 0}))
    assert fold_of(plan, "v") == [["late"], ["square"], ["square"]]


def test_what_may_be_added_where_it_is_made_travels_as_one_gradient() -> None:
    plan = check(uses(1, 1, 0, 1, 1, producer=2))
    sizes = [
        len(e.contributions)
        for e in plan.edges
        if e.kind is EdgeKind.GRADIENT and plan.placed.graph.nodes[e.value].name == "v"
    ]
    assert fold_of(plan, "v") == [["use3", "use4"], ["use2"], ["use1"], ["use0"]]
    assert sizes == [1, 1, 1, 1]


def test_prefixes_from_two_segments_of_one_worker_are_added_there() -> None:
    # Worker 1 uses v, then again after worker 2: two leaves, but the first two terms.
    ops = {
        "v": Op(0, ("x", "w")),
        "use0": Op(1, ("v",)),
        "elsewhere": Op(2, ("use0",)),
        "use1": Op(1, ("v", "elsewhere")),
    }
    plan = check(placed_graph(ops, parameters={"w": 0}))
    (edge,) = [e for e in plan.edges if e.kind is EdgeKind.GRADIENT and e.destination == 0]
    assert len(edge.contributions) == 2


@pytest.mark.parametrize("owner", [0, 1])
def test_a_parameter_used_in_one_segment_is_its_own_leaf_on_its_owner_only(owner: int) -> None:
    plan = check(placed_graph({"use": Op(0, ("x", "w"))}, parameters={"w": owner}))
    assert len(plan.contributions) == owner


def test_a_loss_without_gradient_sends_none_back() -> None:
    ops = {"v": Op(0, ("x", "w")), "loss": Op(1, ("v",), requires_grad=False)}
    plan = partition(placed_graph(ops, parameters={"w": 0}))
    assert plan.contributions == ()
    assert all(edge.kind is EdgeKind.VALUE for edge in plan.edges)


def test_uses_without_gradient_need_no_leaf() -> None:
    ops = {
        "v": Op(0, ("x", "w")),
        "metric": Op(1, ("v",), requires_grad=False),
        "end": Op(0, ("v",)),
    }
    plan = check(placed_graph(ops, parameters={"w": 0}))
    assert plan.contributions == ()


def test_an_operation_that_adds_several_terms_begins_with_the_total_so_far() -> None:
    ops = {
        "v": Op(0, ("x", "w")),
        "attend": Op(1, ("v",), repeated=("v",)),
        "late": Op(2, ("v", "attend")),
    }
    plan = check(placed_graph(ops, parameters={"w": 0}))
    assert len(plan.seeds) == 1
    assert fold_of(plan, "v") == [["attend"]]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=7))
def test_operations_that_add_several_terms_sum_in_eagers_order(
    branches: list[tuple[int, bool]],
) -> None:
    ops = {"v": Op(0, ("x", "w"))}
    for i, (worker, is_whole) in enumerate(branches):
        ops[f"use{i}"] = Op(worker, ("v",), repeated=("v",) if is_whole else ())
    ops["end"] = Op(1, tuple(f"use{i}" for i in range(len(branches))))
    check(placed_graph(ops, parameters={"w": 0}))
