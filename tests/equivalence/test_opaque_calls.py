"""What cannot be captured, and what must not be taken apart, runs whole, with eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import assert_same_wherever_placed, batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import graphsplit as gs

PLACEMENTS = (0, 1, 3)


class Branching(nn.Module):
    """Chooses by values, draws in one branch, counts in one buffer, replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.often = nn.Linear(4, 4)
        self.seldom = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        kept = x * self.average
        self.average = self.average * 0.9 + x.detach().mean(0)
        if x.sum() > 0:
            return self.often(x) * self.often(kept)
        return F.dropout(self.seldom(x), 0.5, self.training) * self.average


class Counting(Branching):
    """Counts its calls in Python, too: then they must be on one worker."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Experts(nn.Module):
    """Sends every row to one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for index, layer in enumerate(self.layers):
            rows = ((x.sum(1) > 0) == bool(index)).nonzero()[:, 0]
            out = out.index_add(0, rows, layer(x[rows]))
        return out


class HitExperts(nn.ModuleDict):
    """Goes through those of its layers that some row was sent to, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__({f"expert_{i}": nn.Linear(4, 4) for i in range(3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        chosen = F.one_hot(x[:, :3].argmax(-1), 3).t()
        for index in chosen.sum(1).gt(0).nonzero():
            (rows,) = torch.where(chosen[index].squeeze(0) > 0)
            out.index_add_(0, rows, self[f"expert_{index[0]}"](x[rows]))
        return out


class Around(nn.Module):
    """A module between two layers, called twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.inner = inner
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.inner(self.first(x)), 0.2, self.training)
        return self.last(x) + self.inner(x.sin())


@pytest.mark.parametrize("inner", [Branching, Experts, HitExperts])
def test_a_module_that_asks_for_values_is_kept_whole_by_itself(inner: Any) -> None:
    assert_same_wherever_placed(
        lambda: Around(inner()), batches_of(6, 3, num=4), placements=PLACEMENTS
    )


def test_a_marked_module_is_kept_whole() -> None:
    assert_same_wherever_placed(
        lambda: Around(gs.opaque(Branching())), batches_of(6, 3, num=4), placements=PLACEMENTS
    )


def test_every_worker_plans_a_module_kept_whole_alike() -> None:
    def place(net: Any) -> None:
        net.first.place("MS_WORKER", 0)
        net.inner.place("MS_WORKER", 1)
        net.last.place("MS_WORKER", 2)

    assert_same_bits(
        lambda: Around(Branching()),
        batches_of(6, 3, num=3),
        num_workers=3,
        place=place,
        loss_fn=rows_against_target,
        plan_everywhere=True,
    )


def with_numpy(x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(x.detach().numpy().copy())


def several(x: torch.Tensor, *, y: torch.Tensor) -> dict[str, Any]:
    return {"a": x * x + y, "b": [y, 3, None], "same": x}


def of_several(net: Net, x: torch.Tensor) -> torch.Tensor:
    found = gs.opaque(several)(x, y=net.other(x))
    return found["a"] * found["b"][0] * found["b"][1] + found["same"]


def hooked(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.other(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return y * x + y.sin()


def seeded(net: Net, x: torch.Tensor) -> torch.Tensor:
    @gs.opaque
    def noise(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return x * torch.rand_like(x)

    return F.dropout(noise(F.dropout(x)))


def packed(net: Net, x: torch.Tensor) -> torch.Tensor:
    def run(net: Net, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor([len(x)])
        sequence = nn.utils.rnn.pack_padded_sequence(x[None], lengths, batch_first=True)
        outputs, _ = nn.utils.rnn.pad_packed_sequence(net.gru(sequence)[0], batch_first=True)
        return outputs[0]

    return gs.opaque(run, outputs=lambda net, x: torch.empty_like(x))(net, x)


def penalty(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        h = net.other(x).sin()
        (found,) = torch.autograd.grad(h.pow(2).sum(), net.other.weight, create_graph=True)
    return x * (found**2).sum()


def in_checkpoint(
    reentrant: bool, run: Callable[[Net, torch.Tensor], torch.Tensor]
) -> Callable[[Net, torch.Tensor], torch.Tensor]:
    def between(net: Net, x: torch.Tensor) -> torch.Tensor:
        inside = checkpoint(lambda h, k: run(net, h) * k + h, x, x, use_reentrant=reentrant)
        return inside + x.sin() + x

    return between


class Net(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.other = nn.Linear(4, 4)
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.last = nn.Linear(4, 4)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self, self.first(x)))


def dropped(net: Net, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(net.other(x), 0.3, net.training)


def two_uses(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.other(x) * net.other(x.sin())


CASES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "numpy": lambda net, x: gs.opaque(with_numpy, outputs=torch.empty_like)(x) + x,
    "structures": of_several,
    "an operand unchanged": lambda net, x: gs.opaque(lambda y: y)(x) * x + x,
    "a tensor hook": hooked,
    "a seed": seeded,
    "packed sequences": packed,
    "autograd.grad": penalty,
    "vmap": lambda net, x: torch.vmap(lambda row: net.other(row).sin())(x) * x,
    "func.grad": lambda net, x: torch.func.grad(lambda y: (net.other(y) ** 3).sum())(x) * x,
    "func.jvp": lambda net, x: torch.func.jvp(net.other, (x,), (x,))[1] * x,
    "reentrant checkpoint": in_checkpoint(True, dropped),
    "reentrant, detached": lambda net, x: (
        checkpoint(lambda h: net.other(h), x.detach(), use_reentrant=True) + x
    ),
    "other checkpoint": in_checkpoint(False, two_uses),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # eager mode's
@pytest.mark.parametrize("between", CASES.values(), ids=CASES.keys())
def test_the_bits_are_those_of_eager_mode(between: Any) -> None:
    assert_same_wherever_placed(
        lambda: Net(between), batches_of(6, 3, num=3), placements=PLACEMENTS
    )


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).t()


def change_of_other(change: Callable[[nn.Linear], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = Net(two_uses)
        change(net.other)
        return net

    return make


CHANGES: dict[str, Callable[[Any], object]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "parametrize": lambda layer: nn.utils.parametrize.register_parametrization(
        layer, "weight", Symmetric()
    ),
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
    "forward hooks": lambda layer: (
        layer.register_forward_hook(lambda module, args, output: output * 2),
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
    ),
    "backward hook": lambda layer: layer.register_full_backward_hook(
        lambda module, of_inputs, of_outputs: (of_inputs[0] * 2,)
    ),
    "backward pre-hook": lambda layer: layer.register_full_backward_pre_hook(
        lambda module, of_outputs: (of_outputs[0] * 2,)
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changed_modules_give_the_bits_of_eager_mode(change: Any) -> None:
    assert_same_wherever_placed(
        change_of_other(change), batches_of(6, 3, num=3), placements=PLACEMENTS
    )


@torch.library.custom_op("graphsplit_tests::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


triple.register_fake(torch.empty_like)
triple.register_autograd(lambda ctx, gradient: gradient * 5)


def test_a_custom_operator_brings_its_own_backward() -> None:
    assert_same_wherever_placed(
        lambda: Net(lambda net, x: triple(net.other(x)) * triple(x)),
        batches_of(6, 3),
        placements=PLACEMENTS,
    )


def times_its_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_function_keeps_the_backward_it_gets_once_warm() -> None:
    scripted = torch.jit.script(times_its_sigmoid)
    for _ in range(3):  # eager mode's own bits change after the first runs
        scripted(torch.ones(2, requires_grad=True)).sum().backward()
    assert_same_wherever_placed(
        lambda: Net(lambda net, x: scripted(net.other(x)) * x),
        batches_of(6, 3),
        placements=PLACEMENTS,
    )


def test_python_code_kept_whole_runs_at_every_step() -> None:
    made: list[Around] = []

    def make() -> nn.Module:
        made.append(Around(Counting()))
        return made[-1]

    assert_same_wherever_placed(make, batches_of(6, 3, num=3), placements=(0,))
    eager, ours = made
    assert isinstance(eager.inner, Counting)
    assert isinstance(ours.inner, Counting)
    assert eager.inner.calls == ours.inner.calls == 2 * (3 + 2)
