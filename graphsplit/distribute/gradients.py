"""Gradients of parameters, as the script sees them: each on its worker, stand-ins elsewhere.

``p.grad`` gives the same answer on every worker: None, or a value that lives with the parameter.
Optimizers and the network's own backward see the tensors themselves.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphsplit.distribute.loop import META, Loop
from graphsplit.distribute.values import LoopValue
from graphsplit.errors import ConfigurationError
from graphsplit.optimizers.ownership import ElsewhereParameter, is_elsewhere
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass, TensorBase
from graphsplit.torch_ext.stand_ins import GET_GRADIENT, StandIn, WatchedParameter

_KEY = "_graphsplit_gradients"
_ATTRIBUTES: Any = TensorBase
_SET_GRADIENT = _ATTRIBUTES.grad.__set__
_ZERO_GRADS = tuple(
    inspect.unwrap(kind.zero_grad).__code__ for kind in (torch.optim.Optimizer, nn.Module)
)


class Gradients:
    """The gradients of one network's parameters.

    Args:
        parameters: The parameters, in order.
        owners: The owner of each.
        loop: The workers.

    Attributes:
        loop: The workers.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], owners: Mapping[int, int], loop: Loop
    ) -> None:
        self._parameters = list(parameters)
        self._owners = owners
        self.loop = loop
        self._known: dict[int, LoopValue | None] = {}
        self._known_at = -1  # how many changes there were
        for parameter in parameters:
            kind = _InLoopElsewhere if is_elsewhere(parameter) else _InLoop
            setattr(parameter, _KEY, self)
            parameter.__class__ = kind

    def forget(self) -> None:
        """Gradients have changed."""
        self.loop.num_changes += 1

    def of(self, parameter: torch.Tensor) -> LoopValue | None:
        """The gradient of a parameter; the first time after a change workers tell each other."""
        if self._known_at != self.loop.num_changes:
            with self.loop.job.reporting(), DisableTorchFunctionSubclass():
                self._known = self._learn()
            self._known_at = self.loop.num_changes
        return self._known[id(parameter)]

    def _learn(self) -> dict[int, LoopValue | None]:
        rank = self.loop.rank
        own = [p for p in self._parameters if self._owners[id(p)] == rank]
        told = self.loop.group.exchange("".join(map(_kind_of, own)))
        kinds = [iter(text) for text in told]
        found: dict[int, LoopValue | None] = {}
        for parameter in self._parameters:
            owner = self._owners[id(parameter)]
            kind = next(kinds[owner])
            if kind == "s":
                raise ConfigurationError(
                    "the gradient of a parameter is sparse; the script's own loop can look at "
                    "dense ones only\n  Fix: make the embedding with sparse=False."
                )
            held = _shape_of(parameter) if isinstance(parameter, StandIn) else parameter.grad
            if kind == "1" and held is not None:
                found[id(parameter)] = LoopValue.of(held, owner, self.loop)
            else:
                found[id(parameter)] = None
        return found


def _kind_of(parameter: torch.Tensor) -> str:
    gradient = parameter.grad
    if gradient is None:
        return "0"
    return "1" if gradient.layout is torch.strided else "s"


def _shape_of(parameter: StandIn) -> torch.Tensor:
    """A stand-in for a gradient that is on another worker: laid out as the parameter is there."""
    shape, strides = parameter.shape, parameter.true_strides()
    return torch.empty_strided(shape, strides, dtype=parameter.dtype, device=META)


def loop_of(parameter: torch.Tensor) -> Loop | None:
    """The loop that trains the parameter's network, if it is a script's own."""
    gradients: Gradients | None = getattr(parameter, _KEY, None)
    return None if gradients is None else gradients.loop


def _function(func: Any, args: tuple[Any, ...]) -> tuple[bool, Any]:
    """The answer of a parameter in a loop, if it has one of its own."""
    if func not in (GET_GRADIENT, _SET_GRADIENT):
        return False, None
    gradients: Gradients = getattr(args[0], _KEY)
    if sys._getframe(2).f_code in _ZERO_GRADS:
        gradients.forget()
        return func == GET_GRADIENT and is_elsewhere(args[0]), None
    if func == GET_GRADIENT:
        return True, gradients.of(args[0])
    gradients.forget()
    given = args[1]
    if isinstance(given, LoopValue):
        given = None if is_elsewhere(args[0]) else given.held
    with DisableTorchFunctionSubclass():
        func(args[0], given)
    return True, None


class _InLoop(WatchedParameter):
    """A parameter that lives here, of a network that the script's own loop trains."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_answered, found = _function(func, args)
        if is_answered:
            return found
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class _InLoopElsewhere(ElsewhereParameter):
    """A parameter that lives on another worker, of a network that the own loop trains."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_answered, found = _function(func, args)
        if is_answered:
            return found
        return super().__torch_function__(func, types, args, kwargs)
