"""Optimizers that look at all parameters, in a loop of the script's own: the same bits."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loop_helpers import Distribute, assert_same_bits
from loops import small
from recovery_helpers import threads_as_workers
from torch import nn

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")

Between = Callable[[Any, Any, int], Any]


def steps(between: Between = lambda net, optimizer, step: None, **settings: Any) -> Any:
    """Three steps, with ``between`` after each."""

    def loop(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net: Any = small(ranks)
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=5, **settings)
        net = distribute(net)
        for step in range(3):
            x, y = torch.randn(6, 8), torch.arange(6) % 4
            calls = [0]

            def closure(x: Any = x, y: Any = y, calls: Any = calls) -> Any:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(net(x), y)
                loss.backward()
                calls[0] += 1
                return loss

            loss = optimizer.step(closure)  # type: ignore[no-untyped-call]
            yield loss.item(), calls[0]
            yield between(net, optimizer, step)
        yield dict(net.state_dict())

    return loop


def saved_and_loaded(net: Any, optimizer: Any, step: int) -> Any:
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    (entry,) = state["state"].values()
    return entry["func_evals"], entry["n_iter"], entry["d"].tolist(), float(entry["t"])


def frozen_later(net: Any, optimizer: Any, step: int) -> Any:
    next(net.parameters()).requires_grad_(step == 1)
    optimizer.param_groups[0]["lr"] *= 0.5


def stored(net: Any, optimizer: Any, step: int) -> Any:
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    file.seek(0)
    (entry,) = torch.load(file)["state"].values()
    return entry["old_dirs"], entry["prev_flat_grad"].sum(), entry["H_diag"] * 1


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize(
    "loop",
    [
        steps(stored, lr=0.3),
        steps(),
        steps(line_search_fn="strong_wolfe", history_size=3),
        steps(saved_and_loaded, lr=0.3),
        steps(saved_and_loaded, lr=0.3, line_search_fn="strong_wolfe"),
        steps(frozen_later, lr=0.5),
    ],
    ids=["stored", "plain", "line search", "saved", "saved, line search", "frozen later"],
)
def test_its_steps_are_those_of_one_process(loop: Any, num_workers: int) -> None:
    assert_same_bits(loop, num_workers)


class NormSGD(torch.optim.Optimizer):
    """Divides by the norm of all gradients."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        trained = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                entry = self.state[p]
                if not entry:
                    entry["mean"], entry["calls"] = torch.zeros_like(p), 0
                entry["calls"] += 1
                entry["mean"].mul_(0.9).add_(p.grad / norm)
                p.add_(entry["mean"], alpha=-group["lr"])


class Coupled(torch.optim.SGD):
    """Divides gradients by the norm of all; torch's own step follows."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.norm = nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.5)
        return super().step(closure)


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware: a step up, the closure once more, and a step of another optimizer."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        trained = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        for p in trained:
            self.state[p]["before"] = p.detach().clone()
            p.add_(p.grad * (0.05 / (norm + 1e-12)))
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p in trained:
            p.copy_(self.state[p]["before"])
        self.base.step()
        return loss


class Adapted(torch.optim.Optimizer):
    """A learning rate from products of all gradients with those before, as D-Adaptation has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for p in group["params"]:
            before = self.state[p].setdefault("before", torch.zeros_like(p))
            group["lr"] += 1e-3 * torch.dot(p.grad.flatten(), before.flatten()).item()
            before.data.copy_(p.grad)
        for p in group["params"]:
            p.data.add_(p.grad, alpha=-group["lr"])


class Lookahead(torch.optim.Optimizer):
    """Slow copies in a list, and another optimizer inside."""

    def __init__(self, parameters: Any) -> None:
        self.base = torch.optim.Adam(parameters, lr=0.01)
        super().__init__(self.base.param_groups, {})
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.calls += 1
        fast = [p for g in self.param_groups for p in g["params"]]
        for p, slow in zip(fast, self.slow, strict=True) if self.calls % 2 == 0 else ():
            slow.add_(p.data - slow, alpha=0.5)
            p.data.copy_(slow)


class Around(torch.optim.Optimizer):
    """Slow copies in the state of the one inside, and no ``__init__`` of its own, as in timm."""

    def __init__(self, parameters: Any) -> None:
        self.base, self.calls = torch.optim.Adam(parameters, lr=0.01), 0
        self.param_groups, self.defaults = self.base.param_groups, self.base.defaults
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.calls += 1
        for p in self.param_groups[0]["params"] if self.calls % 2 == 0 else ():
            entry = self.base.state[p]
            if "slow" not in entry:
                entry["slow"] = torch.empty_like(p)
                entry["slow"].copy_(p)
            entry["slow"].add_(p - entry["slow"], alpha=0.5)
            p.copy_(entry["slow"])


def _hooked(parameters: Any) -> Any:
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def divide(optimizer: Any, *_: Any) -> None:
        trained = optimizer.param_groups[0]["params"]
        total = sum(p.grad.pow(2).sum() for p in trained).sqrt()
        for p in trained:
            p.grad.div_(total)

    optimizer.register_step_pre_hook(divide)
    return optimizer


def loop_of(make: Any, *, by_closure: bool = False, of_last: bool = False) -> Any:
    """Four steps of an optimizer; its state is saved and loaded after the second."""

    def loop(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net: Any = small(ranks)
        parameters = [*(net.last if of_last else net).parameters()]
        optimizer = make(parameters)
        net = distribute(net)
        for step in range(4):
            x = torch.randn(6, 8)

            def closure(x: Any = x) -> Any:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(net(x), torch.arange(6) % 4)
                loss.backward()
                return loss

            loss = optimizer.step(closure) if by_closure else closure()
            if not by_closure:
                optimizer.step()
            yield loss.item()
            if step == 1 and make in (NormSGD, Adapted):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            yield float(getattr(optimizer, "norm", 0.0)), optimizer.param_groups[0].get("lr")
        yield dict(net.state_dict())

    return loop


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize(
    "loop",
    [
        loop_of(NormSGD),
        loop_of(NormSGD, of_last=True),
        loop_of(Coupled),
        loop_of(Sharp, by_closure=True),
        loop_of(Adapted),
        loop_of(Lookahead),
        loop_of(Around),
        loop_of(_hooked),
        loop_of(Coupled, by_closure=True),
    ],
    ids=[
        "norm",
        "of one worker",
        "coupled",
        "sharp",
        "adapted",
        "lookahead",
        "around",
        "hook",
        "closure",
    ],
)
def test_optimizers_of_other_classes_may_look_at_all_parameters(
    loop: Any, num_workers: int
) -> None:
    assert_same_bits(loop, num_workers)
