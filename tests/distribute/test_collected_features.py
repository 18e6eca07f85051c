"""What hooks and forward leave for the script: features of a call, as in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from loop_helpers import Distribute, Loop, assert_same_bits, placed, raised
from recovery_helpers import threads_as_workers
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")


class Small(nn.Module):
    """A network of parts, of which hooks collect features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 8), nn.BatchNorm1d(8)
        self.middle, self.drop, self.last = nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        h = torch.relu(self.norm(self.first(x)))
        return self.last(self.drop(torch.relu(self.middle(h))) + h)


class Kept:
    """A hook that keeps the last output, as many scripts have it."""

    def __init__(self, layer: nn.Module) -> None:
        self.output: Any = None
        self.handle = layer.register_forward_hook(self)

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        """Keep it."""
        self.output = output


def _steps(distribute: Distribute, ranks: list[int], collect: Any) -> Iterator[Any]:
    """Train with what is collected, then look at it once more in eval mode."""
    net = Small()
    net = distribute(placed(net, [net.first, net.middle, net.last], ranks))
    look = collect(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    earlier = None
    for step in range(4):
        loss = functional.cross_entropy(net(torch.randn(6, 5)), torch.randint(0, 3, (6,)))
        found = look()
        loss = loss + sum(one.square().mean() for one in found)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), [one.detach().abs().max().item() for one in found]
        if earlier is not None:  # those of an earlier call stay as they were
            yield [one.sum().item() for one in earlier]
        earlier = found if step == 1 else earlier
    net.eval()
    with torch.no_grad():
        net(torch.randn(3, 5))
        yield [(tuple(one.shape), one.sum().item()) for one in look()]
    yield {name: value.clone() for name, value in net.state_dict().items()}


def dictionary(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """``features[name] = output.detach()``, by a closure for each layer."""
    features: dict[str, torch.Tensor] = {}

    def keeping(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            features[name] = output.detach()

        return hook

    def collect(net: Any) -> Any:
        for name in ("first", "middle"):
            getattr(net, name).register_forward_hook(keeping(name))
        return lambda: [features["first"], features["middle"]]

    return _steps(distribute, ranks, collect)


def with_gradients(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Features that are a part of the loss, and a value that the network uses further on."""
    features: dict[str, torch.Tensor] = {}

    def collect(net: Any) -> Any:
        net.norm.register_forward_hook(lambda m, i, o: features.__setitem__("norm", o))
        net.middle.register_forward_pre_hook(lambda m, i: features.update(into=i[0]))
        return lambda: [features["norm"], features["into"]]

    return _steps(distribute, ranks, collect)


def attribute(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """``self.output = output`` of an object that is the hook."""

    def collect(net: Any) -> Any:
        kept = Kept(net.middle)
        return lambda: [kept.output]

    return _steps(distribute, ranks, collect)


def appended(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A list that the script empties."""
    outputs: list[torch.Tensor] = []

    def collect(net: Any) -> Any:
        net.first.register_forward_hook(lambda m, i, o: outputs.append(o))
        net.middle.register_forward_hook(lambda m, i, o: outputs.append(o.detach()))

        def look() -> Any:
            found = list(outputs)
            outputs.clear()
            return found

        return look

    return _steps(distribute, ranks, collect)


@pytest.mark.parametrize(
    "loop", [dictionary, with_gradients, attribute, appended], ids=lambda loop: loop.__name__
)
@pytest.mark.parametrize("num_workers", [2, 3])
def test_the_script_is_handed_what_hooks_collect(loop: Loop, num_workers: int) -> None:
    assert_same_bits(loop, num_workers)


def two_in_one(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Teacher and student collect in one dictionary; a distance of features is the loss."""
    features: dict[str, torch.Tensor] = {}

    def keeping(name: str) -> Any:
        return lambda module, inputs, output: features.__setitem__(name, output)

    nets = [Small().eval().requires_grad_(False), Small()]
    for name, net in zip(("teacher", "student"), nets, strict=True):
        distribute(placed(net, [net.first, net.middle, net.last], ranks))
        net.middle.register_forward_hook(keeping(name))
    teacher, student = nets
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    for _ in range(5):
        x = torch.randn(6, 5)
        with torch.no_grad():
            teacher(x)
        student(x)
        loss = functional.mse_loss(features["student"], features["teacher"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield (
            loss.item(),
            [None if p.grad is None else p.grad.sum().item() for p in student.parameters()],
        )
    yield {name: value.clone() for name, value in student.state_dict().items()}


def averaged(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A running average that the hook itself goes on from, and the script looks at."""
    net, seen = Small(), {}
    net = distribute(placed(net, [net.first, net.middle, net.last], ranks))

    def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        mean = output.detach().mean(0)
        seen["mean"] = 0.9 * seen["mean"] + 0.1 * mean if "mean" in seen else mean

    net.middle.register_forward_hook(hook)
    for _ in range(5):
        net(torch.randn(6, 5)).sum().backward()
        yield seen["mean"].tolist()
    yield seen["mean"].clone()[:3].sum().item()


def growing(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A list that nobody empties."""
    net, outputs = Small(), []
    net = distribute(placed(net, [net.first, net.middle, net.last], ranks))
    net.middle.register_forward_hook(lambda m, i, o: outputs.append(o.detach()))
    for _ in range(2):  # a third one takes a third capture, and a warning says so
        with torch.no_grad():
            net(torch.randn(6, 5))
        yield [one.sum().item() for one in outputs]
    yield torch.cat(outputs).std().item()


def modified(looks: bool, *, holds: bool = False) -> Loop:
    """A running average that the hook modifies in place, and the script looks at or does not."""

    def averaged_in_place(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net, seen = Small(), {}
        net = distribute(placed(net, [net.first, net.middle, net.last], ranks))

        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> Any:
            mean = output.detach().mean(0)
            if "mean" in seen:
                seen["mean"][:4].mul_(0.9)
                return output + seen["mean"]
            seen["mean"] = mean
            return output

        net.middle.register_forward_hook(hook)
        held = []
        for _ in range(4):
            yield net(torch.randn(6, 5)).sum().item()
            if looks:
                yield seen["mean"].tolist()
            if holds:
                held = held or [seen["mean"]]
                yield held[0][1].item()

    return averaged_in_place


def test_what_a_call_modifies_in_place_is_not_given_as_it_was() -> None:
    assert_same_bits(modified(looks=False), 2)
    assert "is kept with the network, and changes at every step" in raised(modified(looks=True))
    told = raised(modified(looks=False, holds=True))
    assert "after a later call of the network had modified it in place" in told


def replaced(*, holds: bool = False) -> Loop:
    """A hook modifies a tensor in place, and then keeps another; the script may hold the first."""

    def modified_and_replaced(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net, seen = Small(), {"mean": torch.ones(8)}
        net = distribute(placed(net, [net.first, net.middle, net.last], ranks))

        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> Any:
            seen["mean"].mul_(0.9)
            seen["mean"] = seen["mean"] + output.detach().mean(0)
            return output + seen["mean"]

        net.middle.register_forward_hook(hook)
        for _ in range(3):
            held = seen["mean"]
            yield net(torch.randn(6, 5)).sum().item()
            yield seen["mean"].tolist()
            if holds:
                yield held[1].item()

    return modified_and_replaced


def test_a_value_that_is_modified_and_then_replaced_is_not_given_as_it_was() -> None:
    assert_same_bits(replaced(), 2)
    told = raised(replaced(holds=True))
    assert "after a later call of the network had modified it in place" in told


class WithGrid(nn.Module):
    """Forward keeps the grid of the latest batch's size, in a list of the network's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.grids = nn.Linear(5, 4), nn.Linear(4, 3), [torch.empty(0)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        if len(self.grids[0]) != len(x):
            self.grids[0] = torch.arange(float(len(x)))[:, None] * self.first.bias.detach()
        return self.last(self.first(x) + self.grids[0])


def copied(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """An averaged network, copied with what its forward has kept."""
    net = WithGrid()
    net = distribute(placed(net, [net.first, net.last], ranks))
    for size in (6, 3):
        net(torch.randn(size, 5)).sum().backward()
        other = copy.deepcopy(net)
        with torch.no_grad():
            net.first.bias.mul_(2)
            yield other(torch.randn(size, 5)).tolist(), other(torch.randn(4, 5)).tolist()
        yield other.grids[0].sum().item(), net.grids[0].sum().item()


@pytest.mark.parametrize(
    "loop", [two_in_one, averaged, growing, copied], ids=lambda loop: loop.__name__
)
def test_what_is_left_may_be_shared_read_and_kept(loop: Loop) -> None:
    assert_same_bits(loop, 3)


def test_a_write_into_what_the_next_call_finds_is_refused() -> None:
    def loop(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net, seen = Small(), {}
        net = distribute(placed(net, [net.first, net.middle, net.last], ranks))
        net.middle.register_forward_hook(lambda m, i, o: seen.update(o=o.detach()))
        for _ in range(2):
            yield net(torch.randn(6, 5)).sum().item()
            seen["o"].mul_(2)

    assert "Fix: write into a copy" in raised(loop)


@pytest.mark.parametrize("asked", ["retain_grad", "hook", "grad", "inputs"])
def test_the_gradient_that_comes_through_the_network_is_refused(asked: str) -> None:
    def loop(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net, seen = Small(), {}
        net = distribute(placed(net, [net.first, net.middle, net.last], ranks))
        net.middle.register_forward_hook(lambda m, i, o: seen.update(o=o))
        yield (loss := net(torch.randn(6, 5)).sum() + seen["o"].mean()).item()
        if asked == "retain_grad":
            seen["o"].retain_grad()
        if asked == "hook":
            seen["o"].register_hook(lambda gradient: gradient * 2)
        if asked == "grad":
            torch.autograd.grad(loss, seen["o"])
        loss.backward(inputs=[seen["o"]])

    assert "distribute the part before the value and the part after it," in raised(loop)


def cut(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Grad-CAM, by two parts of the network: features and their gradient."""
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    placed(net, [net[0], net[2], net[4]], ranks)
    before, after = distribute(net[:3]), distribute(net[3:])
    features = before(torch.randn(6, 5))
    features.retain_grad()
    scores = after(features)
    scores.gather(1, scores.argmax(1)[:, None]).sum().backward()
    weights = features.grad.mean(0)
    yield torch.relu((weights * features).sum(1)).detach().tolist()
    yield [p.grad.sum().item() for p in net.parameters()]


def test_gradients_of_features_are_had_where_the_network_is_cut() -> None:
    assert_same_bits(cut, 3)


def pruned(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """A layer that is pruned after the first call: its weight is made anew by a hook each time."""
    net = Small()
    net = distribute(placed(net, [net.first, net.middle, net.last], ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        functional.cross_entropy(net(torch.randn(6, 5)), torch.randint(0, 3, (6,))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            prune.l1_unstructured(net.middle, "weight", 0.3)  # type: ignore[no-untyped-call]
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        yield net.middle.weight.sum().item(), (net.middle.weight == 0).sum().item()
    yield {name: value.clone() for name, value in net.state_dict().items()}


def test_a_layer_may_be_pruned_after_the_first_call() -> None:
    assert_same_bits(pruned, 3)


@dataclass(frozen=True)
class Hidden:
    """What forward leaves of itself, in an object."""

    output: torch.Tensor
    rows: int


@dataclass(slots=True)
class Slotted:
    """The same, in slots."""

    output: torch.Tensor


class Nested:
    """Objects in a list, a dictionary, an object."""

    def __init__(self, output: torch.Tensor) -> None:
        self.many = [Hidden(output, 1), Hidden(output * 2, 2)]
        self.named = {"output": output + 1}
        self.inner = Slotted(output * 3)


class Leaves(Small):
    """Leaves objects, new ones at each call."""

    hidden: Hidden
    nested: Nested

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        h = torch.relu(self.norm(self.first(x)))
        self.hidden, self.nested = Hidden(h, len(x)), Nested(self.middle(h))
        return self.last(h)


def in_objects(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """The script takes tensors from objects, also from those of earlier calls."""
    net = Leaves()
    net = distribute(placed(net, [net.first, net.middle, net.last], ranks))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    all_hidden = []
    for _ in range(3):
        loss = functional.cross_entropy(net(torch.randn(6, 5)), torch.randint(0, 3, (6,)))
        found = [one.output for one in (net.hidden, *net.nested.many, net.nested.inner)]
        all_hidden += [net.hidden, net.nested.inner]
        loss = loss + sum(one.square().mean() for one in (*found, net.nested.named["output"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), net.hidden.rows, [one.output.sum().item() for one in all_hidden]
    yield {name: value.clone() for name, value in net.state_dict().items()}


def test_features_may_be_in_objects() -> None:
    assert_same_bits(in_objects, 3)
