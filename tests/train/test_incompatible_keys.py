"""``load_state_dict(strict=False)`` does, returns and raises what the network's own method does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recovery_helpers import ThreadCluster, threads_as_workers
from safetensors.torch import load_file, save_file
from simulated.compare import difference
from torch import nn

import graphsplit as gs
from graphsplit.errors import ConfigurationError, StateError
from graphsplit.job.script import ModelCall
from graphsplit.recovery.kinds import kind_of

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")
INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(8) % 3


class Part(nn.Module):
    """Has parameters, a buffer and extra state, and a part behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("scale", torch.ones(()))
        self.seen = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x @ self.weight)) * self.scale

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.seen)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.seen = float(state)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = Part(), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


class Tolerant(Net):
    """A hook takes back what is missing; another one wants to know of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(Tolerant.after)

    def after(self, keys: Any) -> None:
        keys.missing_keys.remove("last.bias") if "last.bias" in keys.missing_keys else None
        with torch.no_grad():
            self.last.bias.fill_(float(self.first.weight.sum()))


class OwnWay(Net):
    """Has a method of its own, without options, that returns something else."""

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        told = super().load_state_dict(state, strict=False)
        return {"missing": told.missing_keys, "count": len(told.unexpected_keys)}


class LenientByDefault(Net):
    def load_state_dict(self, state: Any, strict: bool = False, assign: bool = False) -> Any:
        return super().load_state_dict(state, strict, assign)


def spoiled(state: dict[str, Any]) -> dict[str, Any]:
    found = {key: value + 1 if value.is_floating_point() else value for key, value in state.items()}
    for key in ("last.bias", "first.scale", "first._extra_state", "first.inner.bias"):
        del found[key]
    more = ("unknown", "last.more", "first.inner.weight.x", "first.more", "other.a.b", "norm.x")
    return found | {key: torch.ones(1) for key in more}


def of_another_shape(state: dict[str, Any]) -> dict[str, Any]:
    return spoiled(state) | {"last.weight": torch.ones(7)}


def plain_steps(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    losses = []
    net.train()
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(INPUTS), TARGETS)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def made(kind: Callable[[], Net]) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = kind()
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def model_of(kind: Callable[[], Net], place: bool) -> tuple[Net, gs.Model]:
    net, optimizer = made(kind)
    if place:
        net.first.place("MS_WORKER", 0)
        net.norm.place("MS_WORKER", 1)
        net.last.place("MS_WORKER", 1)
    return net, gs.Model(net, nn.functional.cross_entropy, optimizer)


def told_by(load: Callable[[], Any]) -> Any:
    """What it returned, its type and its text; or how its error reads."""
    try:
        told = load()
    except RuntimeError as error:
        return str(error)[str(error).index("Error(s) in loading") :]
    names = getattr(told, "_fields", None)
    return type(told).__name__, repr(told), names, copy.deepcopy(tuple(told)) if names else told


CASES: list[tuple[Callable[[], Net], Callable[[Any], Any], dict[str, Any]]] = [
    (Net, spoiled, {"strict": False}),
    (Net, spoiled, {"strict": True}),
    (Net, spoiled, {}),
    (Net, dict, {"strict": False}),
    (Net, dict, {}),
    (Net, of_another_shape, {"strict": False}),
    (Tolerant, spoiled, {"strict": False}),
    (Tolerant, spoiled, {}),
    (OwnWay, spoiled, {}),
    (LenientByDefault, spoiled, {}),
    (LenientByDefault, spoiled, {"strict": True}),
]


@pytest.mark.parametrize("has_run", [True, False])
@pytest.mark.parametrize(("kind", "change", "options"), CASES)
def test_a_state_in_memory_is_loaded_as_the_network_itself_does(
    kind: Callable[[], Net], change: Any, options: dict[str, Any], has_run: bool
) -> None:
    net, optimizer = made(kind)
    good = copy.deepcopy(net.state_dict())
    expected: list[Any] = plain_steps(net, optimizer) if has_run else []
    expected += [told_by(lambda: net.load_state_dict(change(good), **options))]
    expected += [*plain_steps(net, optimizer), dict(net.state_dict())]

    def script(place: bool) -> Any:
        _, model = model_of(kind, place)

        def steps() -> list[torch.Tensor]:
            return [model.train_step(INPUTS, TARGETS) for _ in range(2)]

        found: list[Any] = steps() if has_run else []
        found += [told_by(lambda: model.load_state_dict(change(good), **options))]
        return [*found, *steps(), dict(model.state_dict())]

    for found in (script(False), *ThreadCluster(lambda _: script(True), 2).run()):
        assert difference(expected, found) is None


@pytest.mark.parametrize("kind", [Net, Tolerant])
def test_a_state_in_a_file_is_as_well(kind: Callable[[], Net], tmp_path: Path) -> None:
    net, optimizer = made(kind)
    path = tmp_path / "weights.safetensors"
    save_file(spoiled(dict(net.state_dict())), path)
    expected: list[Any] = plain_steps(net, optimizer)
    expected += [told_by(lambda: net.load_state_dict(load_file(path), strict=False))]
    expected += [*plain_steps(net, optimizer), dict(net.state_dict())]

    def script(place: bool) -> Any:
        _, model = model_of(kind, place)
        found: list[Any] = [model.train_step(INPUTS, TARGETS) for _ in range(2)]
        with pytest.raises(RuntimeError, match=r"unexpected|unknown: |Unexpected"):
            model.load_state_dict(path)
        found += [told_by(lambda: model.load_state_dict(path, strict=False))]
        found += [model.train_step(INPUTS, TARGETS) for _ in range(2)]
        return [*found, dict(model.state_dict())]

    if kind is Tolerant:  # what did fit was loaded, and is loaded twice: no difference
        assert "last.bias" not in expected[2][3][0]
    for found in (script(False), *ThreadCluster(lambda _: script(True), 2).run()):
        assert difference(expected, found) is None


def test_a_shape_that_does_not_fit_in_a_file_is_an_error_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    _, model = model_of(Net, False)
    save_file(of_another_shape(dict(model.state_dict())), path)
    with pytest.raises(StateError, match=r"last\.weight is float32\[7\]") as caught:
        model.load_state_dict(path, strict=False)
    assert "unknown" not in str(caught.value)


def test_parameters_that_would_be_replaced_are_refused_by_name() -> None:
    def script(place: bool) -> None:
        _, model = model_of(Net, place)
        with pytest.raises(ConfigurationError, match=r"assign=True\) would put other parameters"):
            model.load_state_dict(model.state_dict(), assign=True)
        model.train_step(INPUTS, TARGETS)

    script(False)
    ThreadCluster(lambda _: script(True), 2).run()


def test_a_network_under_an_own_loop_keeps_its_methods_default() -> None:
    net, _ = made(LenientByDefault)
    state = spoiled(dict(net.state_dict()))
    expected = told_by(lambda: net.load_state_dict(state))

    def script(_: int) -> Any:
        own: Any = made(LenientByDefault)[0]
        for part, rank in ((own.first, 0), (own.norm, 1), (own.last, 1)):
            part.place("MS_WORKER", rank)
        own = gs.distribute(own)
        return told_by(lambda: own.load_state_dict(state))

    assert ThreadCluster(script, 2, is_recoverable=False).run() == [expected, expected]


@pytest.mark.parametrize("kind", [Net, OwnWay])
def test_what_it_returned_is_given_again(kind: Callable[[], Net]) -> None:
    net, _ = made(kind)
    told = net.load_state_dict(
        spoiled(dict(net.state_dict())), **({"strict": False} if kind is Net else {})
    )
    call = ModelCall("load_state_dict", lambda: None)
    again = kind_of(call.name).unpack(call, None, kind_of(call.name).pack(call, told))
    assert told_by(lambda: again) == told_by(lambda: told)
    assert type(again) is type(told)
