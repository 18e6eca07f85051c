"""Calls kept whole: how they look in the graph, and what of them is refused, by line."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pass_helpers import captured, operations
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphsplit as gs
from graphsplit.capture.graph import Mode
from graphsplit.capture.operations.opaque_call import OpaqueCall, OpaqueCallError, Traits
from graphsplit.errors import CaptureError

X = torch.ones(2, 4)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, digits: int) -> torch.Tensor:
        return x.round(decimals=digits)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class DrawsByValues(torch.autograd.Function):
    """Fake tensors cannot show that it draws: it looks at values first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient if gradient.norm().item() > 9 else _with_noise(gradient)


def _with_noise(gradient: torch.Tensor) -> torch.Tensor:
    return gradient + torch.randn_like(gradient)


class DrawsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.rand_like(gradient)


class Net(nn.Module):
    def __init__(self, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.run = run
        self.steps = 0
        self.state = torch.zeros(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x).sum()


def refusal(run: Callable[[Any, torch.Tensor], torch.Tensor]) -> str:
    with pytest.raises(CaptureError) as caught:
        captured(Net(run), X)
    return str(caught.value)


def test_a_custom_function_is_one_operation_of_the_graph() -> None:
    graph = captured(Net(lambda net, x: Straight.apply(net.fc(x), 2)), X)
    _, call, _ = operations(graph)
    assert call.target == "Straight.apply"
    assert call.arguments == f"%{call.reads[0]}, 2"
    assert call.requires_grad
    assert call.repeated == ()
    assert call.source.startswith(__file__)


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norms.append(x.norm().item())
        return x


def test_a_module_that_keeps_values_in_python_is_one_operation() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Noting(), nn.Linear(4, 4), Noting())
    targets = [node.target for node in operations(captured(net, X, mode=Mode.PREDICT))]
    assert targets == ["aten.linear.default", "Noting (1)", "aten.linear.default", "Noting (3)"]
    assert net[1].norms == net[3].norms == []


@pytest.mark.parametrize("mode", [Mode.PREDICT, Mode.TRAIN])
def test_where_autograd_asks_nothing_a_function_is_taken_apart(mode: Mode) -> None:
    graph = captured(Net(lambda net, x: Straight.apply(x, 2) + net.fc(x)), X, mode=mode)
    assert "aten.round.decimals" in [node.target for node in operations(graph)]


def test_a_marked_module_takes_its_parameters_as_operands() -> None:
    network = nn.Sequential(nn.Linear(4, 3), gs.opaque(nn.Linear(3, 2)))
    graph = captured(network, X, loss_fn=lambda outputs: outputs.sum(), mode=Mode.PREDICT)
    call = next(node for node in operations(graph) if node.target == "Linear (1)")
    assert call.module_path == "1"
    assert [graph.nodes[r].target for r in call.reads[1:]] == ["1.weight", "1.bias"]


def test_what_draws_is_random_unless_it_is_said_not_to() -> None:
    def run(net: Net, x: torch.Tensor) -> torch.Tensor:
        x = gs.opaque(net.drop)(x)
        x = gs.opaque(lambda y: y if y.sum() > 0 else y * 2)(x)
        x = gs.opaque(lambda y: y * 3)(x)
        return gs.opaque(lambda y: y if y.sum() > 0 else y * 2, is_random=False)(net.fc(x))

    graph = captured(Net(run), X)
    assert [n.is_random for n in operations(graph)] == [True, True, False, False, False, False]


def test_capture_leaves_all_generators_alone() -> None:
    def drawing(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return x * random.random() * float(np.random.rand())

    net = Net(lambda net, x: gs.opaque(drawing)(net.fc(x)))
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    captured(net, X)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), repr(np.random.get_state())) == before[1:]


def test_what_forward_leaves_in_attributes_is_noted_and_put_back() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        net.steps = x.shape[0]
        net.last = net.fc(x)
        return net.last * net.steps

    net = Net(run)
    graph = captured(net, X)
    assert [change.named(()) for change in graph.changes] == [
        "net.steps from 0 to 2",
        "net.last from (nothing) to a [2, 4] tensor",
    ]
    assert not graph.is_other_after
    assert net.steps == 0
    assert not hasattr(net, "last")


def test_an_attribute_that_forward_sets_and_reads_gives_other_graphs() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        y = net.fc(x) if net.steps else x * 2
        net.steps = 1
        return y

    net = Net(run)
    graph = captured(net, X, mode=Mode.PREDICT)
    assert graph.is_other_after
    assert net.steps == 0
    (change,) = graph.changes
    assert (change.place.label, change.old, change.new) == ("net.steps", 0, 1)


def test_a_constant_made_of_an_attribute_counts_as_another_graph() -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.tensor(float(net.steps))
        net.steps = 3
        return y

    assert captured(Net(run), X, mode=Mode.PREDICT).is_other_after


def test_other_shapes_than_captured_are_an_error_of_the_step() -> None:
    traits = Traits(
        carries_grad=(False,),
        sharing=frozenset({(0, 1)}),
        outputs=((torch.float32, (2, None)),),
        strides=((None, 1),),
    )
    call = OpaqueCall("f", "", lambda x: [x], traits, "net.py:3")
    assert call(torch.ones(2, 7)).shape == (2, 7)
    with pytest.raises(
        OpaqueCallError, match=r"(?s)output 0 of f is .* \[3, 7\], but was .*net.py:3"
    ):
        call(torch.ones(3, 7))


def test_only_modules_and_functions_can_be_marked() -> None:
    with pytest.raises(TypeError, match="takes a module or a function, not an int"):
        gs.opaque(3)  # type: ignore[type-var]


def place_inside(net: Any, x: torch.Tensor) -> torch.Tensor:
    def run(y: torch.Tensor) -> torch.Tensor:
        with gs.place("MS_WORKER", 1):
            return y * 2

    return gs.opaque(run)(net.fc(x))


def appends(net: Any, x: torch.Tensor) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    gs.opaque(lambda y, kept: kept.append(y * 2))(net.fc(x), kept)
    return kept[0]


def closes_over(net: Any, x: torch.Tensor) -> torch.Tensor:
    h = net.fc(x)
    return gs.opaque(lambda y: y * h)(x)


def hooks_late(net: Any, x: torch.Tensor) -> torch.Tensor:
    h = net.fc(x)
    y = h * 2
    h.register_hook(lambda gradient: gradient * 2)
    return y + h


def hook_reads(net: Any, x: torch.Tensor) -> torch.Tensor:
    h, z = net.fc(x), x * 2
    h.register_hook(lambda gradient: gradient * z)
    return h


def hooks_parameter(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.fc.weight.register_hook(lambda gradient: gradient * 2)
    return net.fc(x)


def saves_otherwise(net: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return net.fc(x).sin()


def backward_inside(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.fc(x).sum().backward()
    return net.fc(x)


def differentiates(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = net.fc(x)
    return torch.autograd.grad(net.fc(x).tanh().pow(2).sum(), x, create_graph=True)[0]


def seeds(net: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return net.fc(x) * torch.rand(4)


def shared_in_checkpoint(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = net.fc(x)
    return checkpoint(lambda y: net.fc(y), x, use_reentrant=True)


def draws_again(net: Any, x: torch.Tensor) -> torch.Tensor:
    x = net.fc(x)
    return checkpoint(lambda y: net.drop(y), x, use_reentrant=False, preserve_rng_state=False)


def carries(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.state = net.state + net.fc(x)
    return net.state


_OPAQUE = "with gs.opaque"
# code, what is said of it, the way out, and on which of its lines it stumbles
REFUSED: dict[str, tuple[Any, str, str, int | None]] = {
    "place inside": (place_inside, "there is a gs.place inside it", "place the call itself", 2),
    "appends": (appends, "puts something into a list", "return what it adds", 2),
    "closes over": (closes_over, "tensor of the surrounding code", "pass the tensor", 2),
    "shape by values": (
        lambda net, x: gs.opaque(lambda y: y[y > 0])(net.fc(x)),
        "returns a tensor whose shape depends on the values",
        "padded, or with a mask",
        None,
    ),
    "two shapes": (
        lambda net, x: gs.opaque(lambda y: y if y.sum() > 0 else y.sum())(net.fc(x)),
        "its branches return tensors of several shapes",
        "outputs=f",
        None,
    ),
    "leaves torch": (
        lambda net, x: gs.opaque(lambda y: y * float(y.numpy().sum()))(net.fc(x)),
        "the shapes that it returns cannot be found",
        "outputs=f",
        None,
    ),
    "random backward": (
        lambda net, x: DrawsBackward.apply(net.fc(x)),
        "DrawsBackward.apply draws random numbers in its backward",
        "draw in forward",
        None,
    ),
    "backward by values": (
        lambda net, x: DrawsByValues.apply(net.fc(x)),
        "DrawsByValues.apply draws random numbers in its backward",
        "draw in forward",
        None,
    ),
    "vjp": (lambda net, x: torch.func.vjp(net.fc, x)[0], "torch.func.vjp", _OPAQUE, None),
    "late hook": (hooks_late, "registered after the value was used", _OPAQUE, 3),
    "hook reads": (hook_reads, "reads a tensor of forward", _OPAQUE, 2),
    "hook on a parameter": (hooks_parameter, "on a parameter or input", _OPAQUE, 1),
    "saved tensors": (saves_otherwise, "saved_tensors_hooks, which would be lost", _OPAQUE, 1),
    "backward": (backward_inside, "runs backward inside forward", "the training loop", 1),
    "autograd.grad": (differentiates, "calls torch.autograd.grad", _OPAQUE, 2),
    "seed": (seeds, "sets the random generator", _OPAQUE, 1),
    "python random": (
        lambda net, x: net.fc(x) * random.random(),
        "draws from Python's module random",
        _OPAQUE,
        None,
    ),
    "numpy random": (
        lambda net, x: net.fc(x) * float(np.random.rand()),
        "draws from numpy.random",
        _OPAQUE,
        None,
    ),
    "shared parameter": (
        shared_in_checkpoint,
        "uses 'fc.weight' in a checkpoint with use_reentrant=True",
        "pass use_reentrant=False",
        None,
    ),
    "draws again": (draws_again, "preserve_rng_state=False", "leave preserve_rng_state", None),
    "carries": (carries, "backward would go through the step before", ".detach()", 1),
}


@pytest.mark.parametrize(("run", "what", "way_out", "line"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals_say_what_where_and_the_way_out(
    run: Any, what: str, way_out: str, line: int | None
) -> None:
    message = refusal(run)
    assert what in message
    assert way_out in message.partition("Fix: ")[2]
    if line is not None:
        assert f"{Path(__file__).name}:{run.__code__.co_firstlineno + line}" in message


def test_a_placement_inside_a_module_kept_whole_is_refused() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner[1].place("MS_WORKER", 1)
    with pytest.raises(CaptureError) as caught:
        captured(nn.Sequential(gs.opaque(inner)), X, mode=Mode.PREDICT)
    assert "'1', inside '0', is placed on worker 1, but '0' is one operation" in str(caught.value)
    assert f"{__file__}:" in str(caught.value)


def test_hooks_on_all_modules_are_refused() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(lambda module, a, b: None)
    try:
        assert "registered for all modules" in refusal(lambda net, x: net.fc(x))
    finally:
        handle.remove()


def test_a_failed_capture_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    refusal(lambda net, x: x if net.fc(x).sum() > 0 else x * 2)
    assert capfd.readouterr() == ("", "")


def test_everything_that_capture_replaces_is_back_afterwards() -> None:
    watched: tuple[tuple[Any, str], ...] = (
        (torch.Tensor, "register_hook"),
        (torch.Tensor, "backward"),
        (torch.autograd, "grad"),
        (torch, "manual_seed"),
        (torch.autograd.graph.saved_tensors_hooks, "__enter__"),
    )
    before = [getattr(owner, name) for owner, name in watched]
    refusal(lambda net, x: x if net.fc(x).sum() > 0 else x * 2)
    assert [getattr(owner, name) for owner, name in watched] == before
