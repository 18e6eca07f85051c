"""What a call kept whole returns when it runs counts: an operand, a view, one tensor twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from torch import nn

import graphsplit as gs
from graphsplit.errors import CaptureError, StepFailedError

Use = Callable[["Net", torch.Tensor], torch.Tensor]


class InTurn(nn.Module):
    """Returns something of another kind each time; no operation tells which."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kinds = kinds
        self.calls = 0

    def forward(self, h: torch.Tensor) -> Any:
        kind = self.kinds[self.calls % len(self.kinds)]
        self.calls += 1
        made = self.layer(h)
        return {
            "itself": h,
            "new": made,
            "residual": h + made,
            "view": h.view(-1).view(h.shape),
            "parameter": self.layer.weight[:1].expand(h.shape[0], 4).contiguous(),
            "otherwise laid out": made.t().contiguous().t(),
            "two": (made, h.tanh()),
            "one twice": (made, made),
            "itself first": (h, made),
            "itself twice": (h, h),
            "no gradient": made.detach(),
            "a number": 3.0,
        }[kind]


class LayerDrop(nn.Module):
    """Left out at random, as in models of speech."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if self.training and torch.rand(1) < 0.5:
            return h
        return h + self.layer(h)


class Shrink(nn.Module):
    """Goes on until it converges, which may be at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        while h.norm() > 4:
            h = self.layer(h) * 0.5
        return h


class Net(nn.Module):
    """Something before, and something after."""

    def __init__(self, inner: nn.Module, use: Use) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = inner
        self.last = nn.Linear(4, 4)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, self.first(x))


def plainly(net: Net, h: torch.Tensor) -> torch.Tensor:
    return net.last(net.inner(h))


def several_times(net: Net, h: torch.Tensor) -> torch.Tensor:
    return net.last(net.inner(net.inner(net.inner(h))))


def beside_itself(net: Net, h: torch.Tensor) -> torch.Tensor:
    return net.last(net.inner(h) * h)


def after_other_uses(net: Net, h: torch.Tensor) -> torch.Tensor:
    before = h.exp()
    y = net.inner(h)
    return net.last(y) + y.sin() * before + y.cos()


def between_other_uses(net: Net, h: torch.Tensor) -> torch.Tensor:
    y = net.inner(h)
    return net.last(y) * h + y.sin() + h.cos()


def written_alone(net: Net, h: torch.Tensor) -> torch.Tensor:
    return net.last(F.elu_(net.inner(h)))


def written_beside(net: Net, h: torch.Tensor) -> torch.Tensor:
    y = net.inner(h)
    y += 1
    return net.last(y) + h.sin()


def both(net: Net, h: torch.Tensor) -> torch.Tensor:
    one, other = net.inner(h)
    return net.last(one) + other


def both_often(net: Net, h: torch.Tensor) -> torch.Tensor:
    one, other = net.inner(h)
    return net.last(one) + other * one + other.sin()


def whatever_it_is(net: Net, h: torch.Tensor) -> torch.Tensor:
    found = net.inner(h)
    return net.last(found[0] if isinstance(found, tuple) else h * found)


TOGETHER, APART = (0, 0, 0), (0, 1, 0)


def compare(
    make_inner: Callable[[], nn.Module],
    use: Use,
    workers: tuple[int, int, int],
    num: int = 3,
    **options: Any,
) -> None:
    def place(net: Any) -> None:
        for module, worker in zip((net.first, net.inner, net.last), workers, strict=True):
            module.place("MS_WORKER", worker)

    assert_same_bits(
        lambda: Net(gs.opaque(make_inner()), use),
        batches_of(8, 4, num=num),
        num_workers=2,
        place=place,
        loss_fn=rows_against_target,
        **options,
    )


IN_TURN = ("new", "itself", "view", "residual")


@pytest.mark.parametrize(
    ("make_inner", "use", "microbatches"),
    [
        (LayerDrop, several_times, 4),
        (LayerDrop, after_other_uses, 1),
        (Shrink, plainly, 4),
        (Shrink, beside_itself, 1),
        (lambda: InTurn(*IN_TURN), beside_itself, 4),
        (lambda: InTurn(*IN_TURN), after_other_uses, 1),
        (lambda: InTurn("itself", "new", "parameter"), several_times, 1),
    ],
)
def test_what_is_returned_may_be_another_thing_each_time(
    make_inner: Any, use: Any, microbatches: int
) -> None:
    compare(make_inner, use, APART, microbatches=microbatches)


@pytest.mark.parametrize(
    ("kinds", "use"),
    [
        (("itself", "new"), between_other_uses),
        (("new", "itself", "view"), written_beside),
        (("view", "new", "itself"), written_alone),
    ],
)
def test_on_one_worker_nothing_is_refused(kinds: Any, use: Any) -> None:
    compare(lambda: InTurn(*kinds), use, TOGETHER)


def test_what_is_written_to_and_read_by_nobody_else_may_be_anything() -> None:
    compare(lambda: InTurn("itself", "new", "view"), written_alone, APART)


def test_one_tensor_may_be_returned_twice() -> None:
    compare(lambda: InTurn("two", "one twice", "itself twice"), both, APART)
    compare(lambda: InTurn("itself first", "two", "one twice"), both_often, TOGETHER)


def test_what_always_is_an_operand_is_one_value_with_it() -> None:
    compare(lambda: InTurn("itself"), between_other_uses, APART)


@pytest.mark.parametrize(
    ("kinds", "use", "message"),
    [
        (("new", "itself"), between_other_uses, "operand 0 and output 0 .* are one tensor"),
        (("itself", "new"), between_other_uses, "operand 0 and output 0 .* are two tensors"),
        (("new", "itself"), written_beside, "operand 0 and output 0 .* share memory"),
        (("two", "one twice"), both_often, "output 0 and output 1 .* are one tensor"),
        (("new", "otherwise laid out"), plainly, r"output 0 .* has strides \[1, 8\]"),
        (("new", "a number"), whatever_it_is, "returned a value, which is not what it returned"),
        (("new", "two"), whatever_it_is, "returned a tensor, a tensor, which is not"),
    ],
)
def test_what_cannot_be_right_is_refused_when_it_happens(
    kinds: Any, use: Any, message: str
) -> None:
    with pytest.raises(StepFailedError, match=rf"(?s){message}.*Fix: .*test_opaque_returns.py"):
        compare(lambda: InTurn(*kinds), use, APART)


def test_code_that_goes_another_way_each_time_may_carry_gradients_at_times() -> None:
    compare(lambda: InTurn("no gradient", "new"), plainly, APART)
    compare(lambda: InTurn("new", "no gradient", "new"), plainly, APART)


class Stored(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 3


stored = Stored.apply  # type: ignore[no-untyped-call]


def test_a_custom_function_keeps_its_backward_if_apply_was_stored() -> None:
    def use(net: Net, h: torch.Tensor) -> torch.Tensor:
        return net.last(net.inner(stored(h)))

    compare(lambda: nn.Linear(4, 4), use, APART, num=2)


class Differentiates(nn.Module):
    """Makes leaves of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = x.detach().requires_grad_()
        if x.sum() > 1e9:
            return self.layer(x)
        return self.layer(own) + x


def test_a_leaf_made_inside_is_no_lost_parameter() -> None:
    compare(Differentiates, plainly, APART, num=2)


class Asking(nn.Module):
    """Asks tensors for more than their values, between a layer of each worker."""

    def __init__(self, ask: Callable[[Any, torch.Tensor], bool]) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(3, 4), gs.opaque(Asked(ask))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.inner(torch.tanh(self.first(x))))


class Asked(nn.Module):
    def __init__(self, ask: Callable[[Any, torch.Tensor], bool]) -> None:
        super().__init__()
        self.layer, self.ask = nn.Linear(4, 4), ask

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layer(h) * (2.0 if self.ask(self.layer, h) else 1.0))


def _train_asking(
    ask: Callable[[Any, torch.Tensor], bool], microbatches: int, *later: tuple[Any, ...]
) -> None:
    assert_same_bits(
        lambda: Asking(ask),
        [*batches_of(8, 3), *later],
        num_workers=2,
        place=lambda net: (net.first.place("MS_WORKER", 0), net.inner.place("MS_WORKER", 1)),
        loss_fn=rows_against_target,
        microbatches=microbatches,
        plan_everywhere=True,
        evaluate_after=(),
    )


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_call_finds_the_gradients_of_the_microbatches_before(microbatches: int) -> None:
    """Several were under way at once, without a word."""
    _train_asking(lambda layer, h: layer.weight.grad is not None, microbatches)
    _train_asking(_learns_apart, microbatches)
    _train_asking(lambda layer, h: layer.weight.is_leaf and layer(h).grad_fn is not None, 1)


def test_a_gradient_of_the_step_before_is_not_one_that_the_call_asks_for() -> None:
    """Only the owner has one when a new form of batch is recorded: its plan was another one."""
    _train_asking(lambda layer, h: False, 4, *batches_of(4, 3, num=1))


def _learns_apart(layer: Any, h: torch.Tensor) -> bool:
    (layer(h.detach()).tanh().mean() - 1).pow(2).backward()
    return True


ASKING: dict[str, Callable[[Any, torch.Tensor], bool]] = {
    "is_leaf": lambda layer, h: h.is_leaf,
    "grad_fn": lambda layer, h: h.grad_fn is None,
    "version": lambda layer, h: layer.weight._version > 1,
}


@pytest.mark.parametrize("asked", ASKING)
def test_a_call_that_asks_where_a_value_comes_from_is_refused(asked: str) -> None:
    with pytest.raises(CaptureError, match=r"asks how a value(.|\n)*test_opaque_returns.py:\d"):
        _train_asking(ASKING[asked], 1)


class Renewing(nn.Module):
    """Another parameter takes a place: for the call's time, or from now on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kind = kind

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        a, b = self.a, self.b
        before = a.weight
        if self.kind == "exchanged":
            a.weight, b.weight = b.weight, a.weight
        else:
            a.weight = nn.Parameter(before * 0.9)
        h = b(a(h))
        if self.kind == "put back":
            a.weight = before
        return h


@pytest.mark.parametrize("kind", ["exchanged", "new", "put back"])
def test_another_parameter_in_a_place_is_refused_unless_it_is_put_back(kind: str) -> None:
    message = r"(?s)Renewing \(inner\) puts another parameter into weight of Linear .*Fix: write"
    refused = pytest.raises(StepFailedError, match=message)
    with refused if kind != "put back" else nullcontext():
        compare(lambda: Renewing(kind), plainly, APART)
