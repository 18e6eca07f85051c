"""Whether a failed capture's error comes in plain PyTorch too is looked up without a trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pass_helpers import captured
from simulated.compare import difference
from torch import nn

import graphsplit as gs
from graphsplit.capture.own_errors import own_error
from graphsplit.capture.python.guards import StateWatch
from graphsplit.errors import CaptureError


class Counting(nn.Module):
    """Writes into tensors of its own, some of them without any input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(1))
        self.seen = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.mul_(0.5).add_(self.calls)
        self.seen += x.mean(0)
        found: torch.Tensor = self.last(self.norm(x))
        return found.view(5, -1)


def test_a_network_is_left_as_it_was():
    network = Counting()
    before: dict[str, Any] = copy.deepcopy(vars(network))
    calls, seen, counted = network.calls, network.seen, network.norm.num_batches_tracked
    x = torch.randn(8, 4)
    try:
        copy.deepcopy(network)(x)
    except RuntimeError as error:
        watch = StateWatch()
        watch.begin(network, lambda: False)
        with watch.watching():
            found = own_error(network, network.__call__, ((x,), {}), error)
        watch.put_back()
    assert found is not None
    assert found.text.startswith("RuntimeError: shape '[5, -1]' is invalid")
    assert network.calls is calls
    assert network.seen is seen
    assert network.norm.num_batches_tracked is counted
    assert (calls.item(), counted.item(), seen.tolist()) == (0, 0, [0.0] * 4)
    assert difference(before["_modules"]["norm"].state_dict(), network.norm.state_dict()) is None


class Counter(nn.Module):
    """May be kept whole, with Python state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sizes = 0, [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        return x * 2


class Failing(nn.Module):
    """Changes plain attributes in many ways, its inner one's too, and raises an error."""

    asks = False

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.count, self.inner = "one", 0, nn.Linear(4, 4)
        self.seen, self.table, self.names = [1], {"a": [1], "b": {"c": 2}}, {"x"}
        self.deep, self.mean = {"list": [(1, [2])]}, torch.zeros(4)
        self.counter = Counter()
        self.inner.scale = [2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen.append(self.count)
        self.table["a"].append(2)
        self.table["b"]["c"] = 5
        self.names.add("y")
        self.deep["list"][0][1].clear()
        self.made = {"new": x.shape[0]}
        self.inner.scale.append(3.0)
        self.inner.last = x.shape[1]
        for name, value in (("past", 4), ("table", {}), ("mean", x.mean(0)), ("tripled", x * 3)):
            object.__setattr__(self, name, value)
        vars(self)["through"] = [5]
        self.__dict__.setdefault("under", {})["k"] = 6
        del self.kind
        x = self.counter(self.inner(x))
        if self.asks:
            return x if float(x.sum()) > 0 else x * 2
        return x.view(5, -1).sum()


def attributes_of(network: nn.Module) -> dict[str, tuple[int, str]]:
    """All attributes of all modules."""
    return {
        f"{path}.{name}": (id(value), str(value))
        for path, module in network.named_modules()
        for name, value in vars(module).items()
    }


@pytest.mark.parametrize("asks", [False, True], ids=["a wrong shape", "a value asked for"])
@pytest.mark.parametrize("is_whole", [False, True], ids=["recorded", "kept whole"])
def test_a_capture_that_fails_leaves_attributes_as_they_were(asks: bool, is_whole: bool):
    network = Failing()
    network.asks = asks
    if is_whole:
        gs.opaque(network.counter)
    before = attributes_of(network)
    with pytest.raises(CaptureError, match="value" if asks else "invalid for input of size 12"):
        captured(network, torch.zeros(3, 4))
    assert attributes_of(network) == before


def test_a_norm_that_asks_for_its_counter_fails_as_others_do() -> None:
    network, x = nn.Sequential(nn.BatchNorm1d(4, momentum=None)), torch.randn(1, 4)
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        copy.deepcopy(network)(x)
    found = own_error(network, network.__call__, ((x,), {}), caught.value)
    assert found is not None
    assert found.text.startswith("ValueError: Expected more than 1 value per channel")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_beside_a_scripted_module_the_own_error_leads() -> None:
    """The tables of a scripted module are TorchScript's, not dictionaries."""
    scripted: nn.Module = torch.jit.script(nn.Linear(4, 4))  # type: ignore[no-untyped-call]
    network = nn.Sequential(scripted, nn.Linear(5, 3))
    with pytest.raises(CaptureError, match=r"mat1 and mat2 shapes cannot be multiplied"):
        captured(network, torch.randn(8, 4))


class Asking(nn.Module):
    """Asks for the gradient of its input, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 3), nn.InstanceNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.conv(x.clone().requires_grad_()).relu_())
        return h.detach().requires_grad_().square()


@pytest.mark.parametrize("inplace", [False, True])
def test_an_input_with_a_gradient_hides_no_error(inplace: bool) -> None:
    network, x = Asking(), torch.randn(2, 3, 3, requires_grad=True)
    if inplace:
        network.norm = nn.Sequential(nn.LeakyReLU(inplace=True), network.norm)
    with pytest.raises(ValueError, match="more than 1 spatial element") as caught:
        copy.deepcopy(network)(x)
    found = own_error(network, network.__call__, ((x,), {}), caught.value)
    assert found is not None
    assert found.text.startswith("ValueError: Expected more than 1 spatial element")
    assert found.module in ("norm", "norm.1")
    assert x.requires_grad
