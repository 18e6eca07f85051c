"""Memory with versions: what a graph looks like once in-place operations write to copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pass_helpers import captured, find, operations, targets
from torch import nn

from graphsplit.capture.graph import CapturedGraph, Mode
from graphsplit.capture.operations.memory_calls import Placed, copy_of
from graphsplit.errors import CaptureError
from graphsplit.rewrite.functional import Functional, make_functional

X = torch.zeros(2, 4)


class Runs(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("buffer", torch.zeros(4))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


LINE = f"{__file__}:{Runs.forward.__code__.co_firstlineno + 1}"


def of(function: Any, mode: Mode = Mode.TRAIN) -> CapturedGraph:
    return captured(Runs(function), X, mode=mode)


def functional(graph: CapturedGraph, *memories: str, **readers: Any) -> Functional:
    return make_functional(graph, frozenset(memories), readers=readers)


def test_every_write_makes_a_version_and_later_reads_use_it() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        y = net.fc(x)
        row = y[0]
        y.mul_(2)
        return (row * y).sum()

    graph = of(run)
    assert targets(graph) == [
        "linear.default",
        "select.int",
        "mul_.Tensor",
        "mul.Tensor",
        "sum.default",
    ]
    made = functional(graph, "linear")
    assert targets(made.graph) == [
        "linear.default",
        "select.int",
        "write_to_copy[aten.mul_.Tensor]",
        "view_again",
        "mul.Tensor",
        "sum.default",
    ]
    write, product = find(made.graph, "mul_"), find(made.graph, "mul")
    again = find(made.graph, "select_again")
    assert made.graph.nodes[product].reads == (again, write)
    assert made.graph.nodes[again].reads == (write,)
    assert not any(node.changes_inputs for node in made.graph.nodes)
    assert not any(node.shares_modified for node in made.graph.nodes)


def test_what_was_read_before_a_write_reads_the_version_before_it() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        before = net.buffer * 2
        net.buffer.add_(1)
        return (net.fc(x) + before + net.buffer * 3).sum()

    graph = functional(of(run), "b_network_buffer").graph
    buffer, write = find(graph, "b_network_buffer"), find(graph, "add_")
    assert graph.nodes[find(graph, "mul")].reads == (buffer,)
    assert graph.nodes[find(graph, "mul_1")].reads == (write,)


def test_the_last_version_of_a_buffer_is_kept_where_it_lives() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        net.buffer.add_(1)
        net.buffer[0] = 3
        return (net.fc(x) + net.buffer).sum()

    made = functional(of(run), "b_network_buffer")
    keep = operations(made.graph)[-1]
    buffer = find(made.graph, "b_network_buffer")
    assert keep.target == "keep_version"
    assert keep.reads[0] == buffer
    assert keep.changes_inputs
    assert keep.shares_modified == ((buffer, True),)
    assert made.origins[keep.name] == "b_network_buffer"
    assert made.graph.nodes[keep.reads[1]].target == "write_to_copy[aten.copy_.default]"


def test_an_input_is_given_back_on_every_worker_that_reads_it() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        y = net.fc(x)
        x.add_(1)
        return (y * x).sum()

    made = functional(of(run), "args_0", args_0=[["linear"], ["add_"]])
    found = [n for n in operations(made.graph) if n.target == "give_back_version"]
    assert [made.origins[node.name] for node in found] == ["linear", "add_"]
    assert found[0].runs_after == (find(made.graph, "linear"),)


def test_hidden_writes_return_the_result_and_the_new_statistics() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    graph = captured(network, X, X, loss_fn=lambda y, _: y.sum())
    norm = next(n for n in graph.fx_graph.nodes if "batch_norm" in str(n.target))
    mean = next(n.name for n in norm.all_input_nodes if "running_mean" in n.name)
    made = functional(graph, mean)
    elements = [n for n in operations(made.graph) if n.with_producer]
    assert [str(n.meta) for n in elements] == ["float32[2, 4]", "float32[4]", "float32[4]"]
    assert [n.requires_grad for n in elements] == [True, False, False]
    kept = [n for n in operations(made.graph) if n.target == "keep_version"]
    assert len(kept) == 2  # written together, so made functional together


def test_nodes_keep_what_was_known_of_them() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        y = net.fc(x)
        row = y[0]
        row.uniform_()
        return y.sum()

    graph = of(run)
    made = functional(graph, "linear").graph
    before, after = graph.nodes[find(graph, "uniform_")], made.nodes[find(made, "uniform_")]
    assert after.is_random
    assert (after.source, after.module_path) == (before.source, before.module_path)
    assert find(made, "linear") == find(graph, "linear")


def test_memory_carries_a_gradient_from_the_write_on() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        before = y + 1
        y[:, 0] = net.fc(x)[:, 0]
        return (y + before).sum()

    graph = functional(of(run), "zeros_like").graph
    flags = {node.name: node.requires_grad for node in graph.nodes}
    assert not flags["zeros_like"]
    assert not flags["add"]
    assert flags["copy_"]


def test_a_modified_parameter_still_asks_for_a_gradient_in_eval_mode() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            net.fc.weight.clamp_(-1, 1)
        return net.fc(x).sum()

    graph = functional(of(run, Mode.PREDICT), "p_network_fc_weight").graph
    assert graph.nodes[find(graph, "clamp_")].asks_grad


def test_a_functional_graph_gives_the_bits_of_eager() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        y = net.fc(x)
        turned, rows = y.t(), y.unbind(0)
        y.mul_(2)
        turned[0].add_(1)
        rows[1].exp_()
        return (turned * y.t()).sum()

    torch.manual_seed(0)
    network, x = Runs(run), torch.randn(2, 4)
    network.requires_grad_(False)
    graph = captured(network, x, mode=Mode.PREDICT)
    made = functional(graph, "linear").graph
    values = {n.name: network.state_dict()[n.target] for n in made.nodes if n.is_state}
    placeholders = [n for n in made.fx_graph.nodes if n.op == "placeholder"]
    module = torch.fx.GraphModule(made.fx_owner, made.fx_graph)
    (found,) = module(*(values.get(n.name, x) for n in placeholders))
    assert torch.equal(found, network(x))


def test_a_copy_keeps_strides_with_gaps() -> None:
    memory = torch.arange(12.0).as_strided((2, 2), (6, 2)).requires_grad_(True)
    copy = copy_of(memory)
    assert copy.stride() == (6, 2)
    copy.sum().backward()
    assert torch.equal(memory.grad, torch.ones(2, 2))


def test_a_view_of_known_layout_starts_where_the_memory_does() -> None:
    memory = torch.arange(8.0)[2:]
    assert torch.equal(Placed((2,), (2,), 1).of(memory, ()), torch.tensor([3.0, 5.0]))


@pytest.mark.parametrize("name", ["resize_", "set_"])
def test_new_memory_for_a_tensor_is_refused_with_the_users_line(name: str) -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(2, 2)
        made.resize_(4) if name == "resize_" else made.set_(torch.ones(4))
        return (net.fc(x) * made).sum()

    with pytest.raises(CaptureError, match="is given other memory in place") as caught:
        of(run)
    assert LINE in str(caught.value)
    assert "Fix: make a new tensor of the size you need" in str(caught.value)


def test_another_shape_for_a_buffer_is_refused() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        net.buffer.unsqueeze_(0)
        return (net.fc(x) + net.buffer).sum()

    with pytest.raises(CaptureError, match="given another shape in place") as caught:
        of(run)
    assert "without the underscore" in str(caught.value)


def test_setting_data_to_a_part_of_another_value_is_refused() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        net.fc.weight.data = x[:4]
        return net.fc(x).sum()

    with pytest.raises(CaptureError, match=r"setting its \.data") as caught:
        of(run)
    assert "tensor.data.copy_(new)" in str(caught.value)


def test_a_number_of_writes_that_forward_asks_for_is_refused() -> None:
    """As caches of weights do: it would be the one of the capture at every step."""

    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        return net.fc(x).sum() * (1 + net.fc.weight._version)

    with pytest.raises(CaptureError, match="how often a tensor was written to"):
        of(run)


@pytest.mark.parametrize("held", [lambda net, x: net.fc.weight, lambda net, x: x])
def test_a_gradient_that_forward_reads_is_refused(held: Callable[..., torch.Tensor]) -> None:
    """A microbatch would see the sum of those before it: a graph has no such value."""

    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        return net.fc(x).sum() * (2 if held(net, x).grad is not None else 1)

    with pytest.raises(CaptureError, match="reads the gradient of a parameter") as caught:
        of(run)
    assert ".grad is not None" in str(caught.value)


@pytest.mark.parametrize("name", ["register_hook", "register_prehook"])
def test_a_hook_on_a_node_of_autograd_s_graph_is_refused(name: str) -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        node: Any = net.fc(x).sum().grad_fn
        assert "Sum" in node.name()
        getattr(node.next_functions[0][0], name)(lambda *given: None)
        return net.fc(x).sum()

    with pytest.raises(CaptureError, match=r"on a node of autograd's graph \(grad_fn\)") as caught:
        of(run)
    assert "by its register_hook" in str(caught.value)


def test_reading_data_is_reading_a_detached_view() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        net.fc.weight.data.clamp_(-1, 1)
        return net.fc(x).sum()

    assert targets(of(run))[:2] == ["detach.default", "clamp_.default"]


def test_a_buffer_that_is_replaced_is_written_to_at_the_end() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        net.buffer = net.buffer * 2
        net.buffer = net.buffer + x.sum(0)
        return (net.fc(x) + net.buffer).sum()

    network = Runs(run)
    before = network.buffer
    graph = captured(network, X)
    assert network.buffer is not before  # which the script may hold: it stays as it is
    *_, write = operations(graph)
    buffer, new = find(graph, "b_network_buffer"), find(graph, "add")
    assert write.target == "aten.copy_.default"
    assert write.reads[0] == buffer
    assert graph.nodes[write.reads[1]].reads == (new,)


def test_buffers_that_change_places() -> None:
    class Swaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.zeros(4))
            self.register_buffer("b", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.a, self.b = self.b, self.a
            return x + self.a

    graph = captured(Swaps(), X, mode=Mode.PREDICT)
    assert targets(graph).count("clone.default") == 2


def test_a_buffer_that_takes_another_shape_has_a_tensor_for_it() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        net.buffer = torch.cat([net.buffer, net.buffer])
        return net.fc(x).sum()

    (left,) = of(run).changes
    assert left.told() == "net.buffer: other form of buffer torch·float32 [8] [1] cpu"
    assert f"test_functional.py:{run.__code__.co_firstlineno + 1}" in left.place.source


def test_a_buffer_that_forward_registers_is_left_there() -> None:
    def run(net: Runs, x: torch.Tensor) -> torch.Tensor:
        net.register_buffer("found", x.detach().sum(0), persistent=False)
        return net.fc(x).sum()

    (left,) = (one for one in of(run).changes if one.place.key == "found")
    assert left.told().startswith("net.found: other form of found torch·float32")
    assert left.told().endswith(", not persistent")
