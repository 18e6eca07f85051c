"""Which worker runs an operation, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_helpers import META, Op, captured, graph_of, placed, placed_graph
from torch import nn

import graphsplit as gs
from graphsplit.capture.graph import CapturedGraph, Node, NodeKind
from graphsplit.errors import PlacementError
from graphsplit.marks.annotations import Annotation
from graphsplit.placement.resolve import (
    EVERYWHERE,
    PlacedGraph,
    PlacementRules,
    UnplacedRule,
    resolve,
)
from graphsplit.placement.whole import nearest
from graphsplit.tensor_meta import TensorMeta

X = torch.zeros(2, 4)
BIG = TensorMeta(torch.float32, (64, 64), (64, 1))
HERE = Annotation(1, "train.py:7")


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x)).sum()


def where(network: nn.Module, **rules: Any) -> dict[str, int]:
    result = placed(network, captured(network, X), **rules)
    return {
        node.name: worker
        for node, worker in zip(result.graph.nodes, result.workers, strict=True)
        if node.kind is NodeKind.OPERATION
    }


def resolved(
    graph: CapturedGraph,
    modules: dict[str, Annotation] | None = None,
    unplaced: UnplacedRule = "affinity",
    owners: dict[str, int] | None = None,
) -> PlacedGraph:
    return resolve(graph, PlacementRules(3, modules or {}, unplaced, owners or {}))


def by_name(result: PlacedGraph) -> dict[str, tuple[int, str]]:
    return {
        node.name: (worker, reason)
        for node, worker, reason in zip(
            result.graph.nodes, result.workers, result.reasons, strict=True
        )
    }


def operation(name: str, *reads: int, **more: Any) -> Node:
    return Node(name, NodeKind.OPERATION, name, reads=reads, **{"meta": META, **more})


def test_the_nearest_placed_ancestor_wins() -> None:
    network = Tower()
    network.place("MS_WORKER", 0)
    network.block.place("MS_WORKER", 1)
    network.block[1].place("MS_WORKER", 2)
    assert where(network) == {"linear": 1, "relu": 2, "linear_1": 0, "sum_1": 0}


def test_placing_a_module_again_replaces_its_placement() -> None:
    network = Tower()
    network.place("MS_WORKER", 0).place("MS_WORKER", 2)
    assert set(where(network).values()) == {2}


def test_a_block_wins_over_every_module_around_it() -> None:
    class Inside(Tower):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with gs.place("MS_WORKER", 2):
                return self.head(x).sum()

    network = Inside()
    network.place("MS_WORKER", 0)
    network.head.place("MS_WORKER", 1)
    assert where(network) == {"linear": 2, "sum_1": 2}


def test_a_part_of_a_name_is_no_ancestor() -> None:
    assert nearest({"fc1": HERE}, "fc10.weight") is None
    assert nearest({"fc1": HERE}, "fc1.inner.deep") == ("fc1", HERE)


def test_the_networks_own_placement_does_not_reach_the_loss() -> None:
    assert nearest({"": HERE}, "(loss).inner") is None
    assert nearest({"": HERE}, "deep.inside") == ("", HERE)


def test_the_loss_is_placed_by_placing_its_module() -> None:
    network, loss_fn = nn.Linear(4, 4), nn.MSELoss()
    network.place("MS_WORKER", 0)
    loss_fn.place("MS_WORKER", 2)
    graph = captured(network, X, X, loss_fn=loss_fn)
    result = placed(network, graph, loss_fn=loss_fn)
    assert graph.loss_node is not None
    assert result.workers[graph.loss_node] == 2
    assert result.reasons[graph.loss_node] == "module (loss) is placed there"


def test_inputs_and_constants_are_everywhere() -> None:
    result = placed_graph({"a": Op(0, ("x",))})
    assert by_name(resolved(result.graph))["x"] == (EVERYWHERE, "every worker has it")


def test_affinity_stays_beside_the_operand_that_costs_most_to_move() -> None:
    nodes = [
        Node("x", NodeKind.INPUT, "0", meta=META),
        operation("small", 0, annotation=Annotation(1, "a.py:1")),
        operation("big", 0, annotation=Annotation(2, "a.py:2"), meta=BIG),
        operation("free", 1, 2),
    ]
    found = by_name(resolved(graph_of(nodes, loss=3)))
    assert found["free"] == (2, "affinity: beside big")
    assert found["big"] == (2, "gs.place at a.py:2")


def test_affinity_counts_parameters_of_placed_modules() -> None:
    nodes = [
        Node("x", NodeKind.INPUT, "0", meta=META),
        operation("made", 0, annotation=Annotation(2, "a.py:1")),
        Node("w", NodeKind.PARAMETER, "fc.weight", meta=BIG, module_path="fc"),
        operation("free", 1, 2),
    ]
    found = by_name(resolved(graph_of(nodes, loss=3), {"fc": HERE}))
    assert found["free"] == (1, "affinity: beside w")


def test_affinity_without_a_placed_operand_goes_where_the_result_is_used_first() -> None:
    nodes = [
        Node("x", NodeKind.INPUT, "0", meta=META),
        operation("first", 0),
        operation("second", 1),
        operation("user", 2, annotation=HERE),
    ]
    found = by_name(resolved(graph_of(nodes, loss=3)))
    assert found["second"] == (1, "affinity: first used by user")
    assert found["first"] == (1, "affinity: first used by second")


def test_affinity_with_nothing_placed_is_worker_0() -> None:
    nodes = [Node("x", NodeKind.INPUT, "0", meta=META), operation("only", 0)]
    found = by_name(resolved(graph_of(nodes, loss=1)))
    assert found["only"] == (0, "nothing to be near to: worker 0")


def test_worker0_puts_every_unplaced_operation_there() -> None:
    nodes = [
        Node("x", NodeKind.INPUT, "0", meta=META),
        operation("placed", 0, annotation=HERE, meta=BIG),
        operation("free", 1),
    ]
    found = by_name(resolved(graph_of(nodes, loss=2), unplaced="worker0"))
    assert found["placed"][0] == 1
    assert found["free"] == (0, "unplaced: worker 0")


@pytest.mark.parametrize("unplaced", ["affinity", "worker0"])
def test_elements_of_a_tuple_run_where_it_is_made(unplaced: UnplacedRule) -> None:
    nodes = [
        Node("x", NodeKind.INPUT, "0", meta=META),
        operation("split", 0, annotation=HERE, meta=None),
        operation("element", 1, with_producer=True, annotation=Annotation(2, "a.py:9")),
        operation("user", 2, annotation=Annotation(2, "a.py:9")),
    ]
    found = by_name(resolved(graph_of(nodes, loss=3), unplaced=unplaced))
    assert found["element"] == (1, "element of split")
    assert found["user"][0] == 2


def test_a_tuple_that_nobody_placed_takes_all_its_elements_along() -> None:
    nodes = [
        Node("x", NodeKind.INPUT, "0", meta=META),
        operation("split", 0, meta=None),
        operation("a", 1, with_producer=True),
        operation("b", 1, with_producer=True),
        operation("user_a", 2, annotation=Annotation(1, "a.py:1")),
        operation("user_b", 3, annotation=Annotation(2, "a.py:2")),
    ]
    found = by_name(resolved(graph_of(nodes, loss=5)))
    assert found["split"][0] == found["a"][0] == found["b"][0] == 1


def state(name: str, path: str) -> Node:
    return Node(name, NodeKind.PARAMETER, name, meta=META, module_path=path)


def test_a_parameter_lives_where_it_is_used() -> None:
    nodes = [state("w", "fc"), operation("a", 0, annotation=HERE)]
    assert by_name(resolved(graph_of(nodes, loss=1)))["w"] == (1, "first used there")


def test_a_shared_parameter_lives_with_its_placed_module_if_that_uses_it() -> None:
    nodes = [
        state("w", "embed"),
        operation("a", 0, annotation=Annotation(0, "a.py:1")),
        operation("b", 0, annotation=Annotation(2, "a.py:2")),
    ]
    graph = graph_of(nodes, loss=2)
    assert by_name(resolved(graph, {"embed": Annotation(2, "a.py:3")}))["w"][0] == 2
    assert by_name(resolved(graph, {"embed": Annotation(1, "a.py:3")}))["w"][0] == 0
    assert by_name(resolved(graph))["w"] == (0, "first used there")


def test_an_unused_parameter_lives_with_its_module_or_on_worker_0() -> None:
    nodes = [state("w", "fc"), operation("a", annotation=Annotation(2, "a.py:1"))]
    graph = graph_of(nodes, loss=1)
    assert by_name(resolved(graph))["w"] == (0, "unused: worker 0")
    assert by_name(resolved(graph, {"fc": HERE}))["w"][0] == 1


def test_an_owner_that_an_earlier_plan_has_fixed_stays() -> None:
    nodes = [state("w", "fc"), operation("a", 0, annotation=HERE)]
    found = by_name(resolved(graph_of(nodes, loss=1), owners={"w": 2}))
    assert found["w"] == (2, "an earlier plan put it there")


def test_affinity_knows_the_owners_that_an_earlier_plan_has_fixed() -> None:
    nodes = [state("w", "fc"), operation("a", 0)]
    found = by_name(resolved(graph_of(nodes, loss=1), owners={"w": 2}))
    assert found["a"] == (2, "affinity: beside w")


def test_all_ranks_out_of_range_are_reported_together_with_their_lines() -> None:
    graph = placed_graph({"a": Op(0, ("x",), annotation=Annotation(5, "net.py:12"))}).graph
    modules = {
        "fc9": Annotation(7, "train.py:31"),
        "fc1": Annotation(2, "train.py:32"),
        "": Annotation(3, "train.py:33"),
    }
    with pytest.raises(PlacementError) as caught:
        resolved(graph, modules)
    assert str(caught.value) == (
        "3 placements cannot be honoured:\n"
        "  module 'fc9' is placed on MS_WORKER 7 at train.py:31, but the job has workers 0 to 2\n"
        "  the network is placed on MS_WORKER 3 at train.py:33, but the job has workers 0 to 2\n"
        "  operation 'a' is placed on MS_WORKER 5 at net.py:12, but the job has workers 0 to 2\n"
        "  Fix: start 8 workers (graphsplit run -n 8, or MS_WORKER_NUM=8), or choose ranks below 3."
    )


def test_a_line_that_places_a_slice_is_one_fault() -> None:
    graph = placed_graph({"a": Op(0, ("x",))}).graph
    modules = {f"layers.{number}": Annotation(4, "train.py:7") for number in range(3)}
    with pytest.raises(PlacementError) as caught:
        resolved(graph, modules)
    assert str(caught.value) == (
        "a placement cannot be honoured:\n"
        "  module 'layers.0' and 2 others are placed on MS_WORKER 4 at train.py:7, but the job has "
        "workers 0 to 2\n"
        "  Fix: start 5 workers (graphsplit run -n 5, or MS_WORKER_NUM=5), or choose ranks below 3."
    )


def test_equal_graphs_and_rules_give_equal_placements() -> None:
    network = Tower()
    network.head.place("MS_WORKER", 1)
    graph = captured(network, X)
    first, second = placed(network, graph), placed(network, graph)
    assert first == second


def branch(**more: Any) -> list[Node]:
    return [
        state("a.w", "a"),
        state("b.w", "b"),
        Node(
            "cond", NodeKind.OPERATION, "cond", reads=(0, 1), meta=META, source="net.py:5", **more
        ),
    ]


def test_a_branch_runs_where_the_modules_inside_it_are_placed() -> None:
    found = by_name(resolved(graph_of(branch(), loss=2), {"b": HERE}))
    assert found["cond"] == (1, "module b is placed there")


@pytest.mark.parametrize("other", ["b", ""])
def test_a_branch_with_modules_on_several_workers_is_refused(other: str) -> None:
    modules = {"a": HERE, other: Annotation(2, "train.py:8")}
    with pytest.raises(PlacementError) as caught:
        resolved(graph_of(branch(), loss=2), modules)
    assert (
        f"cond runs whole on one worker, but the modules in and around it are placed apart: a on "
        f"1, {other or '(network)'} on 2; place them on one worker, or put gs.place around the "
        f"call\n    net.py:5\n    train.py:7\n    train.py:8\n" in str(caught.value)
    )


def test_a_block_around_a_branch_wins_over_the_modules_inside() -> None:
    modules = {"a": HERE, "b": Annotation(2, "train.py:8")}
    graph = graph_of(branch(annotation=Annotation(0, "net.py:4")), loss=2)
    assert by_name(resolved(graph, modules))["cond"] == (0, "gs.place at net.py:4")
