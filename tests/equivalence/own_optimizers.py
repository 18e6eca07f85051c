"""Optimizers as users write them: some treat every parameter by itself, others look at several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer


def stepped(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters that have a gradient."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return [p for p in every if p.grad is not None]


def norm_of(parameters: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()


class Momentum(Optimizer):
    """Every parameter by itself; makes its state when it is built."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.num_steps = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["velocity"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for parameter in stepped(self):
            velocity = self.state[parameter]["velocity"].mul_(0.9).add_(parameter.grad)
            parameter.sub_(velocity, alpha=self.param_groups[0]["lr"])


class Tutorial(Optimizer):
    """Fails where a parameter has no gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(group["lr"] * parameter.grad)


class Lars(SGD):
    """Looks at the norm of each parameter, and of its gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in stepped(self):
            parameter.grad.mul_(parameter.norm() / (parameter.grad.norm() + 1e-9))
        super().step()


class Normalized(SGD):
    """Divides a step by the norm of all gradients; fails where there is none."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = norm_of(stepped(self))
        for parameter in stepped(self):
            parameter.grad.div_(norm)
        super().step()


class ClipsLarge(SGD):
    """Looks at all gradients, and changes them only if their norm is large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = norm_of(stepped(self))
        if norm > 1000:
            for parameter in stepped(self):
                parameter.grad.mul_(1000 / norm)
        super().step()


class SkipsNan(SGD):
    """Steps nothing if one gradient is not finite."""

    def step(self, closure: Any = None) -> None:
        if all(bool(torch.isfinite(p.grad).all()) for p in stepped(self)):
            super().step()


class Sharpness(Optimizer):
    """Moves by the norm of all gradients, then lets another optimizer step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base = SGD(self.param_groups, lr=0.05)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        scale = 0.05 / (norm_of(stepped(self)) + 1e-12)
        for parameter in stepped(self):
            parameter.add_(parameter.grad * scale)
        self.base.step()


class Distance(Optimizer):
    """Keeps an estimate over all gradients among its settings."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "distance": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        total = sum(float((p.grad * p).sum()) for p in stepped(self))
        for group in self.param_groups:
            group["distance"] = max(group["distance"], 1e-4 * abs(total))
            for parameter in stepped(self):
                parameter.sub_(parameter.grad.sign(), alpha=group["distance"])


class Grows(SGD):
    """Keeps an estimate over all gradients that only grows, up to a largest value."""

    estimate = 1e-3

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        total = sum(float(p.grad.abs().sum()) for p in stepped(self))
        self.estimate = max(self.estimate, min(1.0, total))
        for parameter in stepped(self):
            parameter.grad.mul_(self.estimate)
        super().step()


class Late(SGD):
    """Looks at all gradients in every twentieth step."""

    num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        if self.num_steps % 20 == 0:
            norm = norm_of(stepped(self))
            for parameter in stepped(self):
                parameter.grad.div_(norm)
        super().step()


class Slow(Optimizer):
    """Every five steps, back to where it was: copies of all parameters, by number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.base = SGD(self.param_groups, lr=0.05)
        self.param_groups = self.base.param_groups
        self.num_steps = 0
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.num_steps += 1
        if self.num_steps % 5 == 0:
            every = [p for group in self.param_groups for p in group["params"]]
            for parameter, slow in zip(every, self.slow, strict=False):
                parameter.copy_(slow.lerp_(parameter, 0.5))


def with_hook(hook: Callable[..., Any], *, after: bool = False) -> Callable[[nn.Module], Optimizer]:
    """Makes SGD with a hook around its step."""

    def make(network: nn.Module) -> Optimizer:
        optimizer = SGD(network.parameters(), lr=0.05, momentum=0.9)
        if after:
            optimizer.register_step_post_hook(hook)
        else:
            optimizer.register_step_pre_hook(hook)
        return optimizer

    return make
