"""Calls that are kept whole, where replicas share the microbatches."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from replica_helpers import Net, planned, same_over_two, whole
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures
from torch import nn

from graphsplit.capture.graph import Mode
from graphsplit.errors import PlacementError, StepFailedError
from graphsplit.partition.checks.replicated import is_evaluated_apart


class Around(Net):
    """A layer, after the body."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.body.append(layer)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.2)
        self.register_buffer("mask", torch.tensor([1.0, 1, 0, 1, 1, 1]))
        self.calls, self.seen = 0, [0.0]

    def usual(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.drop(self.linear(x)) * self.mask)


class Dropped(Layer):
    """Some calls return what they were given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if torch.rand(()) < 0.4 else self.usual(x)


class Until(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            if x.norm() < 4:
                break
            x = self.usual(x) * 0.7
        return x


class Product(torch.autograd.Function):
    """Two results, and a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return x * weight, x + 1

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        x, weight = ctx.saved_tensors
        return given[0] * weight + given[1], (given[0] * torch.tanh(x)).sum((0, 1))


class Multiplied(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = Product.apply(self.usual(x), self.weight)
        return first * second  # type: ignore[no-any-return]


class Hooked(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda module, gradients, _: (gradients[0] * 0.5,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.usual(x)


def halved(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = rows_against_target(outputs, target)
    return loss * 0.5 if loss.item() > 10 else loss


def staged(net: Any) -> None:
    net.body.place("MS_WORKER", [1, 2])
    net.head.place("MS_WORKER", 0)


_captures = {kind: Captures() for kind in (Dropped, Until, Multiplied, Hooked)}


@pytest.mark.parametrize(
    ("place", "num_workers", "order"),
    [(whole(0, 1), 2, "left"), (whole(2, 0, 1), 3, "pairs"), (staged, 3, "left")],
    ids=["two", "three", "staged"],
)
@pytest.mark.parametrize("kind", [Dropped, Until, Multiplied, Hooked])
def test_what_keeps_nothing_runs_on_all_replicas(
    kind: Any, place: Any, num_workers: int, order: Any
) -> None:
    cluster = assert_same_bits(
        lambda: Around(kind()),
        batches_of(10, 6, 6),  # microbatches of two sizes
        num_workers=num_workers,
        loss_fn=rows_against_target,
        place=place,
        microbatches=4,
        gradient_order=order,
        captures=_captures[kind],
    )
    plan = cluster.latest(Mode.TRAIN)
    assert plan is not None and len(plan.plan.lanes) == 2


def test_a_loss_that_asks_for_its_value() -> None:
    assert_same_bits(
        lambda: Around(Dropped()),
        batches_of(8, 6, 6),
        num_workers=2,
        loss_fn=halved,
        place=whole(0, 1),
        microbatches=4,
    )


def test_functions_with_a_backward_of_their_own_are_evaluated_apart() -> None:
    def apart(kind: Any) -> bool:
        cluster = same_over_two(lambda: Around(kind()), batches_of(4, 6, 6), microbatches=2)
        plan = cluster.latest(Mode.EVAL)
        assert plan is not None
        return is_evaluated_apart(plan.plan.placed.graph)

    assert apart(Multiplied)
    assert not apart(Dropped)


class Counting(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            self.calls += 1
        return self.usual(x) * (1 + 0.1 * self.calls)


class Noting(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda *_: self.seen.append(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.usual(x)


class Averaging(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            with torch.no_grad():
                self.mask.mul_(0.9)  # type: ignore[operator]
        return self.usual(x)


class OwnDraws(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if torch.rand((), generator=self.generator) < 0.4 else self.usual(x)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Counting, "an attribute of Counting"),
        (Averaging, r"buffer body\.5\.mask"),
        (OwnDraws, r"OwnDraws\.generator"),
    ],
)
def test_what_the_next_microbatch_would_find_is_refused_by_name(kind: Any, what: str) -> None:
    why = rf"{kind.__name__} \(body\.5\) is kept whole, and changes .*{what}.* between micro"
    with pytest.raises(PlacementError, match=why):
        planned(whole(0, 1), lambda: Around(kind()))


class Late(nn.Module):
    """Writes where an answer is neither 0 nor 1, which no trial gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if 0 < torch.rand(()).item() < 1:
            self.write()
        return self.linear(x) * (1 + self.calls)  # type: ignore[no-any-return]

    def write(self) -> None:
        self.calls += 1


class LateWeight(Late):
    def write(self) -> None:
        with torch.no_grad():
            self.linear.weight.mul_(0.9)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Noting, r"backward of Noting \(body\.5\) changes Noting\.seen, which its next micro"),
        (Late, r"Late \(body\.5\) changes an attribute of Late, which its next micro"),
        (LateWeight, r"LateWeight \(body\.5\) writes to a parameter or buffer"),
    ],
)
def test_what_is_written_later_ends_the_step_by_name(kind: Any, why: str) -> None:
    with pytest.raises(StepFailedError, match=why) as caught:
        planned(whole(0, 1), lambda: Around(kind()))
    lines = re.findall(r"(?m)^  /.*$", str(caught.value))
    assert len(lines) == len({*lines})
