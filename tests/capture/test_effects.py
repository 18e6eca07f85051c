"""Randomness and modification in place: noticed, and made explicit where that changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_helpers import captured, find, operations, targets
from torch import nn
from torch.nn import functional as F

from graphsplit.capture.graph import CapturedGraph, Mode

X = torch.zeros(2, 4)


class Runs(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("buffer", torch.zeros(4))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def of(function: Any, mode: Mode = Mode.TRAIN) -> CapturedGraph:
    return captured(Runs(function), X, mode=mode)


def random_targets(graph: CapturedGraph) -> list[str]:
    return [node.target for node in operations(graph) if node.is_random]


def test_dropout_draws_in_training_only() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    train = captured(network, X, X, loss_fn=lambda y, _: y.sum())
    assert random_targets(train) == ["aten.dropout.default"]
    assert random_targets(captured(network, X, mode=Mode.PREDICT)) == []


@pytest.mark.parametrize(
    ("function", "draws"),
    [
        (lambda x: F.dropout(x, 0.5), True),
        (lambda x: F.dropout(x, 0.0), False),
        (lambda x: F.dropout(x, 0.5, training=False), False),
        (lambda x: F.alpha_dropout(x, 0.5, training=True), True),
        (lambda x: x + torch.rand(4), True),
        (lambda x: x + torch.randn_like(x), True),
        (lambda x: torch.bernoulli(torch.sigmoid(x)), True),
        (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), True),
        (lambda x: F.scaled_dot_product_attention(x, x, x), False),
        (lambda x: x.clone().uniform_(), True),
    ],
)
def test_operations_are_random_where_they_draw(function: Any, draws: bool) -> None:
    graph = of(lambda net, x: (net.fc(x) + function(x)).sum())
    assert bool(random_targets(graph)) is draws


def test_draws_inside_a_no_grad_block_are_noticed() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            noise = torch.rand(4)
        return (net.fc(x) + noise).sum()

    assert random_targets(of(run)) == ["aten.rand.default"]


def test_batch_norms_writes_to_its_running_statistics_are_noticed_in_training() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    graph = captured(network, X, X, loss_fn=lambda y, _: y.sum())
    norm = next(n for n in operations(graph) if n.target == "aten.batch_norm.default")
    assert norm.changes_inputs
    written = {graph.nodes[position].target for position, is_state in norm.shares_modified}
    assert written == {"1.running_mean", "1.running_var"}


def test_batch_norm_writes_nothing_in_eval_mode() -> None:
    graph = captured(nn.Sequential(nn.BatchNorm1d(4)), X, mode=Mode.PREDICT)
    assert not any(node.changes_inputs for node in operations(graph))


@pytest.mark.parametrize(
    ("function", "ordinary"),
    [
        (lambda y, x: F.relu_(y), "relu.default"),
        (lambda y, x: y.add_(1), "add.Tensor"),
        (lambda y, x: y.mul_(x), "mul.Tensor"),
        (lambda y, x: y.masked_fill_(x > 0, 0.0), "masked_fill.Scalar"),
    ],
)
def test_an_in_place_operation_becomes_an_ordinary_one(function: Any, ordinary: str) -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        y = net.fc(x)
        function(y, x)
        return y.sum()  # reads what was modified

    graph = of(run)
    assert ordinary in targets(graph)
    assert not any(node.changes_inputs for node in operations(graph))
    *_, changed, total = operations(graph)
    assert total.reads == (find(graph, changed.name),)


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x, y: (y.t(), y.add_(1))[0],  # another view is read later
        lambda net, x, y: (y[0].add_(1), y)[1],  # part of a value that is read later
        lambda net, x, y: (x.add_(1), y + x)[1],  # an input: the change must last
        lambda net, x, y: (net.buffer.add_(1), y + net.buffer)[1],  # a buffer: likewise
        lambda net, x, y: (z := x.to(torch.float64), z.mul_(y))[1],  # mixed dtypes
        lambda net, x, y: (z := y.clone(), z.mul_(torch.ones(4, 2).t()))[1],  # mixed strides
    ],
)
def test_an_in_place_operation_stays_where_the_ordinary_one_could_differ(function: Any) -> None:
    graph = of(lambda net, x: function(net, x, net.fc(x)).sum())
    assert any(node.changes_inputs for node in operations(graph))


def test_reads_and_writes_of_one_buffer_keep_their_order() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        before = net.buffer * 2
        net.buffer.add_(1)
        after = net.buffer * 3
        return (net.fc(x) + before + after).sum()

    graph = of(run)
    before, write, after = find(graph, "mul"), find(graph, "add_"), find(graph, "mul_1")
    assert before in graph.nodes[write].runs_after
    assert write in (*graph.nodes[after].reads, *graph.nodes[after].runs_after)
    assert (write, True) in graph.nodes[after].shares_modified


def test_adding_to_a_buffer_by_name_is_an_in_place_write() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        net.buffer += 1
        return (net.fc(x) + net.buffer).sum()

    assert "add_.Tensor" in targets(of(run))


@pytest.mark.parametrize("seed", range(3))
def test_the_explicit_graph_gives_the_bits_of_eager(seed: int) -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        y = net.fc(x)
        y *= 3
        F.relu_(y)
        z = y.view(-1)
        z.add_(1)
        w = y.t().clone()
        w[0] = y[:, 0]
        return (w.exp_() * y.t()).sum()

    torch.manual_seed(seed)
    network, x = Runs(run), torch.randn(2, 4)
    graph = captured(network, x)
    state = dict(network.state_dict())
    values = {
        node.name: state[node.target] if node.is_state else x
        for node in graph.nodes
        if node.is_state or node.name == "args_0"
    }
    placeholders = [n for n in graph.fx_graph.nodes if n.op == "placeholder"]
    module = torch.fx.GraphModule(graph.fx_owner, graph.fx_graph)
    (loss,) = module(*(values.get(n.name, torch.zeros(())) for n in placeholders))
    assert torch.equal(loss, network(x))
