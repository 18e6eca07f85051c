"""Custom autograd functions keep their own backward, wherever they and their neighbours run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import assert_same_wherever_placed, batches_of
from simulated.equivalence import assert_same_bits
from torch import nn
from torch.autograd.function import once_differentiable

import graphsplit as gs


class Straight(torch.autograd.Function):
    """A straight-through estimator: rounds, and lets the gradient pass as if it had not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Scaled(torch.autograd.Function):
    """A number, None and a parameter among the arguments; three results, one not differentiable."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, factor: float, nothing: None, weight: torch.Tensor
    ) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        large = x > 0
        ctx.mark_non_differentiable(large)
        return x * factor * weight, large, x.sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any, _: Any, of_sum: Any) -> Any:
        x, weight = ctx.saved_tensors
        of_x = gradient * weight * ctx.factor + of_sum
        return of_x if ctx.needs_input_grad[0] else None, None, None, (gradient * x * 7).sum(0)


class WithSetup(torch.autograd.Function):
    """The newer style: forward without ctx, and a default argument."""

    @staticmethod
    def forward(x: torch.Tensor, power: int = 3) -> tuple[torch.Tensor, int]:
        return x**power, power

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.power = output[1]

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * x * ctx.power, None


class NothingGiven(torch.autograd.Function):
    """Gradients of unused results come as None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        return first if second is None else second


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 5


class Unchanged(torch.autograd.Function):
    """Returns its input: a gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


class Viewed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.t() * 3


class Noisy(torch.autograd.Function):
    """Draws in forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(x)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (noise,) = ctx.saved_tensors
        return gradient * noise * noise


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        return gradient * b * 0.3, gradient * a * 0.7


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = Straight.apply(ctx.x * 4).sin()
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.autograd.grad(ctx.y, ctx.x, gradient)[0]


class ReadsModule(torch.autograd.Function):
    """Reads a parameter without being passed it: in eager mode it gets no gradient from here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Linear) -> torch.Tensor:
        return F.linear(x, module.weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 2, None


class Net(nn.Module):
    """Two layers with something between them that uses autograd functions."""

    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4))
        self.other = nn.Linear(4, 4)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self, self.first(x)))


def scaled(net: Net, x: torch.Tensor) -> torch.Tensor:
    a, large, total = Scaled.apply(x, 2.0, None, net.weight)
    b, _, _ = Scaled.apply(a, 0.5, None, net.weight)
    return torch.where(large, a, b) + total


def unused_results(net: Net, x: torch.Tensor) -> torch.Tensor:
    first, second = NothingGiven.apply(x)
    return NothingGiven.apply(first)[0] + NothingGiven.apply(second)[1] + x


def in_place(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    z = InPlace.apply(y)
    return y * z + x


def reversal(net: Net, x: torch.Tensor) -> torch.Tensor:
    return Unchanged.apply(x) * x + net.other(Unchanged.apply(x))


def drawn(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = F.dropout(Noisy.apply(F.dropout(x)))
    return F.dropout(Noisy.apply(x))


def without_gradient(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        kept = Straight.apply(x * 3)
    frozen = Straight.apply(x.detach() * 2)
    return x * kept + frozen


CASES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "straight": lambda net, x: Straight.apply(x * 3) + x,
    "scaled": scaled,
    "setup": lambda net, x: WithSetup.apply(x)[0] * WithSetup.apply(x, power=2)[0],
    "unused": unused_results,
    "in place": in_place,
    "unchanged": reversal,
    "view": lambda net, x: (
        Viewed.apply(Viewed.apply(x).contiguous()) @ Viewed.apply(net.other.weight)
    ),
    "drawn": drawn,
    "one input twice": lambda net, x: Product.apply(x, x) + x * Product.apply(x.sin(), x),
    "nested": lambda net, x: Nested.apply(x) * x,
    "reads a module": lambda net, x: ReadsModule.apply(x, net.other) + net.other(x),
    "no gradient": without_gradient,
    "parameters": lambda net, x: x * Product.apply(net.weight, net.other.bias) + net.other(x),
}


@pytest.mark.parametrize("between", CASES.values(), ids=CASES.keys())
def test_custom_functions_give_the_bits_of_eager_mode(between: Any) -> None:
    assert_same_wherever_placed(lambda: Net(between), batches_of(6, 3), placements=(0, 1, 3))


def test_a_function_and_its_operands_on_three_workers() -> None:
    def place(net: Any) -> None:
        net.first.place("MS_WORKER", 0)
        net.other.place("MS_WORKER", 1)
        net.last.place("MS_WORKER", 2)

    assert_same_bits(
        lambda: Net(scaled),
        batches_of(6, 3, num=3),
        num_workers=3,
        place=place,
        loss_fn=lambda outputs, target: F.mse_loss(outputs.sum(1), target),
        plan_everywhere=True,
    )


class CountingInTensor(torch.autograd.Function):
    """Counts in a tensor of its class, which no operand of the call is."""

    calls = torch.zeros(1)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        CountingInTensor.calls.add_(1)
        return x * CountingInTensor.calls

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Counts(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counted: Any = CountingInTensor.apply
        found: torch.Tensor = counted(super().forward(x))
        return found


def test_a_capture_leaves_a_tensor_that_a_function_counts_in() -> None:
    net = Counts(3, 4)
    model = gs.Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    model.explain(torch.randn(4, 3), torch.randn(4, 4))
    assert CountingInTensor.calls.tolist() == [0.0]
