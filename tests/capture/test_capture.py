"""What a captured graph knows: paths, lines, placements, state, constants, modes, gradients."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from pass_helpers import captured, find, operations, targets
from torch import nn

import graphsplit as gs
from graphsplit.batches.signature import Signature
from graphsplit.capture.graph import LOSS_PATH, CapturedGraph, Mode, NodeKind
from graphsplit.errors import PlacementError
from graphsplit.planning.passes import capture_graph
from graphsplit.planning.task import Task

X = torch.zeros(2, 4)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x)).sum()  # here


class Runs(nn.Module):
    """A network whose forward is a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def of(function: Any, *args: Any, mode: Mode = Mode.TRAIN, **kwargs: Any) -> CapturedGraph:
    return captured(Runs(function), *(args or (X,)), mode=mode, **kwargs)


def line_of(marker: str) -> str:
    lines, start = inspect.getsourcelines(TwoLayers.forward)
    offset = next(i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {marker}"))
    return f"{__file__}:{start + offset}"


def test_every_operation_knows_its_module() -> None:
    graph = captured(TwoLayers(), X)
    found = [(node.target, node.module_path) for node in operations(graph)]
    assert found == [
        ("aten.linear.default", "inner.0"),
        ("aten.relu.default", "inner.1"),
        ("aten.linear.default", "last"),
        ("aten.sum.default", ""),
    ]


def test_every_operation_knows_the_users_line() -> None:
    graph = captured(TwoLayers(), X)
    assert {node.source for node in operations(graph)} == {line_of("here")}


def test_a_loss_of_torch_has_the_users_line_or_none_never_one_of_graphsplit() -> None:
    network, loss_fn = nn.Linear(4, 4), nn.MSELoss()
    graph = captured(network, X, X, loss_fn=loss_fn)
    package = str(Path(gs.__file__).parent)
    assert not any(node.source.startswith(package) for node in graph.nodes)


def test_a_loss_is_captured_under_a_path_of_its_own() -> None:
    graph = captured(nn.Linear(4, 4), X, X, loss_fn=nn.MSELoss())
    assert graph.loss_node is not None
    assert graph.nodes[graph.loss_node].module_path == LOSS_PATH


def test_parameters_of_a_loss_are_named_under_its_path() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return ((output - target) * self.scale).sum()

    graph = captured(nn.Linear(4, 4), X, X, loss_fn=Scaled())
    names = {n.target for n in graph.nodes if n.kind is NodeKind.PARAMETER}
    assert names == {"weight", "bias", f"{LOSS_PATH}.scale"}


def test_place_blocks_reach_the_operations_inside_them_only() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        with gs.place("MS_WORKER", 2):
            y = net.fc(x)
        return y.sum()

    linear, total = operations(of(run))
    assert linear.annotation is not None
    assert linear.annotation.rank == 2
    assert linear.annotation.source.startswith(f"{__file__}:")
    assert total.annotation is None


def test_the_innermost_place_block_wins_and_the_outer_one_resumes() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        with gs.place("MS_WORKER", 1):
            y = x.sin()
            with gs.place("MS_WORKER", 2):
                y = net.fc(y)
            return y.sum()

    annotations = [node.annotation for node in operations(of(run))]
    assert [a.rank if a else None for a in annotations] == [1, 2, 1]


def test_a_placed_operation_reaches_that_operation_only() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        return gs.op(torch.add).place("MS_WORKER", 1)(net.fc(x), x).sum()

    annotations = [node.annotation for node in operations(of(run))]
    assert [a.rank if a else None for a in annotations] == [None, 1, None]


def test_a_placed_operation_inside_a_block_wins() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        with gs.place("MS_WORKER", 0):
            return gs.op(torch.add).place("MS_WORKER", 1)(x, x).sum()

    annotations = [node.annotation for node in operations(of(run))]
    assert [a.rank if a else None for a in annotations] == [1, 0]


def test_a_bad_rank_in_a_block_is_reported_as_such() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        with gs.place("MS_WORKER", -1):
            return x.sum()

    with pytest.raises(PlacementError, match="rank -1 is negative"):
        of(run)


def test_train_and_eval_are_different_graphs() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    train = captured(network, X, loss_fn=None, mode=Mode.PREDICT)
    network_with_loss = nn.Sequential(*network, nn.Flatten(0))
    eval_changes = [n.changes_inputs for n in operations(train)]
    graph = captured(network_with_loss, X, X, loss_fn=lambda y, _: y.sum())
    train_changes = [n.changes_inputs for n in operations(graph)]
    assert not any(eval_changes)
    assert any(train_changes)


def test_gradients_are_recorded_in_train_mode_only() -> None:
    network = TwoLayers()
    assert any(n.requires_grad for n in captured(network, X).nodes)
    assert not any(n.requires_grad for n in captured(network, X, mode=Mode.PREDICT).nodes)


def test_frozen_parameters_carry_no_gradient() -> None:
    network = TwoLayers()
    network.inner.requires_grad_(False)
    flags = [n.requires_grad for n in operations(captured(network, X))]
    assert flags == [False, False, True, True]


def test_tied_parameters_are_one_node_with_all_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)).sum()

    graph = captured(Tied(), X)
    assert [n.target for n in graph.nodes if n.is_state] == ["first.weight"]
    weight = find(graph, "p_network_first_weight")
    assert graph.state_names == {weight: ("first.weight", "second.weight")}
    first, second, _ = operations(graph)
    assert weight in first.reads
    assert weight in second.reads


def test_tensors_made_in_forward_are_constants_with_their_value() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        return (net.fc(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum()

    graph = of(run)
    (name,) = [n.name for n in graph.nodes if n.kind is NodeKind.CONSTANT]
    assert torch.equal(graph.constants[name], torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_other_constants_give_another_description() -> None:
    def run_with(value: float) -> str:
        return of(lambda net, x: (x * torch.tensor([value])).sum()).describe()

    assert run_with(1.0) != run_with(2.0)
    assert run_with(1.0) == run_with(1.0)


def test_keyword_batches_become_inputs_in_the_order_of_their_flattening() -> None:
    def run(net: Runs, *, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (net.fc(a) * b).sum()

    graph = captured(Runs(run), a=X, b=torch.zeros(2, 1))
    inputs = {n.target: n.meta for n in graph.nodes if n.kind is NodeKind.INPUT}
    assert {k: str(v) for k, v in inputs.items()} == {"0": "float32[2, 4]", "1": "float32[2, 1]"}


def test_plain_values_in_a_batch_are_baked_in() -> None:
    graph = captured(Runs(lambda net, x, *, scale: (net.fc(x) * scale).sum()), X, scale=3)
    (product,) = [n for n in operations(graph) if n.target == "aten.mul.Tensor"]
    assert product.arguments.endswith(", 3")


def test_operands_are_listed_once_per_use() -> None:
    graph = of(lambda net, x: (y := net.fc(x), (y * y).sum())[1])
    (product,) = [n for n in operations(graph) if n.target == "aten.mul.Tensor"]
    assert product.reads == (find(graph, "linear"),) * 2


def test_elements_of_a_tuple_stay_with_their_producer() -> None:
    graph = of(lambda net, x: torch.max(net.fc(x), 1)[0].sum())
    producer, *elements = operations(graph)[1:-1]
    assert producer.meta is None
    assert elements
    assert all(e.with_producer and e.reads == (find(graph, producer.name),) for e in elements)


def test_integer_elements_of_a_tuple_carry_no_gradient() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        values, indices = torch.max(net.fc(x), 1)
        return (values * indices).sum()

    elements = [n for n in operations(of(run)) if n.with_producer]
    assert [(str(n.meta), n.requires_grad) for n in elements] == [
        ("float32[2]", True),
        ("int64[2]", False),
    ]


def test_detached_values_carry_no_gradient() -> None:
    graph = of(lambda net, x: (net.fc(x).detach() * net.fc.weight.sum()).sum())
    flags = {n.target: n.requires_grad for n in operations(graph)}
    assert not flags["aten.detach.default"]
    assert flags["aten.mul.Tensor"]


def test_operations_of_a_no_grad_block_carry_no_gradient() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        y = net.fc(x)
        with torch.no_grad():
            scale = y.exp().mean() * 2
        return (y * scale).sum()

    graph = of(run)
    assert targets(graph) == [
        "linear.default",
        "exp.default",
        "mean.default",
        "mul.Tensor",
        "mul.Tensor",
        "sum.default",
    ]
    inside = [False, True, True, True, False, False]
    assert [n.region.grad_enabled is False for n in operations(graph)] == inside
    assert [n.requires_grad for n in operations(graph)] == [not block for block in inside]


def test_a_gradient_written_into_memory_made_without_one_is_carried_on() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[:, 0] = net.fc(x)[:, 0]
        return y.relu().sum()

    flags = {n.target: n.requires_grad for n in operations(of(run))}
    assert flags["aten.zeros_like.default"]
    assert flags["aten.relu.default"]


def test_a_loss_that_was_summed_up_in_place_has_gradients() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        losses = torch.zeros(2)
        losses[0] = net.fc(x).sum()
        losses[1] = net.fc(x).mean()
        return losses.sum()

    assert of(run).has_gradients


def test_capture_leaves_the_model_and_the_generator_untouched() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Flatten(0))
    network.train()
    network[1].eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    same = dict(network.named_parameters()), dict(network.named_buffers())
    flags = [module.training for module in network.modules()]
    generator = torch.get_rng_state()
    task = Task(network, lambda y, _: y.sum(), None, "affinity", False)
    for mode in (Mode.TRAIN, Mode.EVAL):
        capture_graph(task, mode, Signature.of(((X, X), {})))

    assert [module.training for module in network.modules()] == flags
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(before[name], t) for name, t in network.state_dict().items())
    assert all(p is same[0][name] for name, p in network.named_parameters())
    assert all(b is same[1][name] for name, b in network.named_buffers())
    assert all(p.grad is None for p in network.parameters())


def test_an_operation_of_an_earlier_capture_answers_for_those_that_look_the_same_alone() -> None:
    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.contiguous() + 1

    def ran(x: torch.Tensor) -> list[str]:
        return targets(captured(Rows(), x, mode=Mode.PREDICT))

    rows, columns = torch.zeros(3, 4), torch.zeros(4, 3).T
    for _ in range(2):
        assert ran(rows) == ["add.Tensor"]  # it is x itself
        assert ran(columns) == ["contiguous.default", "add.Tensor"]
