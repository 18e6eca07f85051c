"""Whether an error of a capture is one that the network raises anyway.

A batch of a wrong shape, or a misspelt name, fails in plain PyTorch too. Then neither
``torch.export`` nor graphsplit is to blame, and the message must not say so: it leads with what
PyTorch itself says, and names the module.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from graphsplit.capture.operations.averaged_statistics import averages_in_parts
from graphsplit.frames import is_own
from graphsplit.tensor_meta import TensorMeta
from graphsplit.torch_ext.attributes import buffers_of, is_module_call, operator_schema, refill
from graphsplit.torch_ext.fakes import formed_like
from graphsplit.torch_ext.function_modes import TorchCalls, may_write
from graphsplit.torch_ext.private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    leaves_of,
    pytree,
)

_MOST_BYTES = 1 << 30  # tensors of zeros that a call is tried with


@dataclass(frozen=True)
class OwnError:
    """An error that comes in plain PyTorch too.

    Attributes:
        text: Its kind and first line, as eager mode has it.
        module: The path of the innermost module that ran: ``network``, or a part of it, or
            ``loss_fn``; empty: none.
        given: The tensors that this module was called with, as ``float32[8, 7]``.
        error: It itself.
        is_first: Whether nothing was drawn, written to or changed before.
        holds_tensor: Whether a tensor is in it.
    """

    text: str
    module: str
    given: tuple[str, ...]
    error: Exception
    is_first: bool
    holds_tensor: bool

    def __str__(self) -> str:
        """The error, and where it is raised."""
        where = {"": "", "network": "the network", "loss_fn": "the loss"}
        at = where.get(self.module, f"module {self.module!r}")
        given = f", given {', '.join(self.given)}" if self.given else ""
        return f"{self.text}\n  in {at}{given}" if at else self.text


def own_error(
    root: nn.Module, run: Callable[..., Any], arguments: Any, error: Exception
) -> OwnError | None:
    """Run a network plainly, on tensors without values, and look whether the same error comes.

    Args:
        root: The module that holds all others.
        run: ``run(*args, **kwargs)``: what was captured.
        arguments: Its arguments: ``(args, kwargs)``.
        error: The error.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    effects = _Effects()
    calls = _LastCall(fake_mode, effects)
    with _buffers_kept(root) as is_kept:
        try:
            given = pytree.tree_map_only(torch.Tensor, fake_mode.from_tensor, arguments)
            with fake_mode, effects, calls, averages_in_parts():
                run(*given[0], **given[1])
        except Exception as other:
            if type(other) is not type(error) or _first_line(other) != _first_line(error):
                return None
            where, eager = _where(root, other), calls.again(other) or other
            if eager is not other:
                eager.__traceback__ = _up_to_a_call(other.__traceback__)
            text = f"{type(eager).__name__}: {_first_line(eager)}"
            _forget_context(eager, error, other)
            shown = f"{eager!r} {eager} {vars(eager)}"  # it may hold a value, which is none here
            is_first, holds = is_kept() and not effects.has_any, FakeTensor.__name__ in shown
            return OwnError(text, *where, eager, is_first=is_first, holds_tensor=holds)
    return None


def _up_to_a_call(trace: TracebackType | None) -> TracebackType | None:
    """The frames from the first one that is not graphsplit's, up to the call of torch."""
    while trace is not None and is_own(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    last = trace
    while last is not None and last.tb_next is not None:
        if is_own(last.tb_next.tb_frame.f_code.co_filename):
            last.tb_next = None
        last = last.tb_next
    return trace


def _forget_context(eager: Exception, *errors: Exception) -> None:
    """An error is as it is in eager mode, where nothing of ours was being handled."""
    found: BaseException | None = eager
    while found is not None:
        if any(found.__context__ is ours for ours in errors):
            found.__context__ = None
        found = found.__context__


class _Effects(TorchDispatchMode):
    """Looks whether an operation draws random numbers, or may write to a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_any = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Asked by torch, which else compiles no branch of ``torch.cond``, now or later."""
        return True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called by torch instead of the operation."""
        is_one = operator_schema(function).is_mutable or (
            torch.Tag.nondeterministic_seeded in function.tags
        )
        self.has_any |= is_one or "batch_norm" in str(function)  # not all of them say so
        return function(*args, **(kwargs or {}))


class _LastCall(TorchCalls):
    """Notes the function of torch that raised.

    What would write into a tensor that has values writes into a fake of that: where no operand is
    a fake, the operation would be run.
    """

    def __init__(self, fake_mode: FakeTensorMode, effects: _Effects) -> None:
        super().__init__()
        self._fake_mode, self._effects = fake_mode, effects
        self._error: Exception | None = None
        self._call: tuple[Callable[..., Any], Any] | None = None

    def called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if may_write(function, kwargs):
            self._effects.has_any = True  # `b.data = ...` is no operation
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self._error, self._call = error, (function, (args, kwargs))
            raise

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake_mode.from_tensor(tensor)

    def again(self, error: Exception) -> Exception | None:
        """The function's error for tensors that have values: zeros."""
        if self._call is None or self._error is not error:
            return None
        function, (args, kwargs) = self._call
        return error_of_zeros(function, args, kwargs)


def error_of_zeros(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Exception | None:
    """A function's error for tensors that have values: zeros. None: none, or they are too large."""
    tensors = leaves_of(torch.Tensor, (args, kwargs))
    if sum(t.numel() * t.element_size() for t in tensors) > _MOST_BYTES:
        return None
    args, kwargs = pytree.tree_map_only(torch.Tensor, _zeros_like, (args, kwargs))
    try:
        function(*args, **kwargs)
    except Exception as eager:
        return eager
    return None


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    return formed_like(tensor).zero_()


def _where(root: nn.Module, error: Exception) -> tuple[str, tuple[str, ...]]:
    """The innermost module that ran, and what it was called with."""
    paths = {id(module): path for path, module in root.named_modules()}
    found: tuple[str, tuple[str, ...]] = ("", ())
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if is_module_call(frame):
            held = frame.f_locals
            path = paths.get(id(held["self"]), "")
            tensors = pytree.tree_leaves((held.get("args"), held.get("kwargs")))
            shown = tuple(str(TensorMeta.of(t)) for t in tensors if isinstance(t, torch.Tensor))
            found = (path.removeprefix("network."), shown)
    return found


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@contextmanager
def _buffers_kept(root: nn.Module) -> Iterator[Callable[[], bool]]:
    """Put back the buffers that forward replaces, and the generator; tells whether it did not."""
    held = [(buffers_of(module), dict(buffers_of(module))) for module in root.modules()]
    generator = torch.default_generator.get_state()

    def is_kept() -> bool:
        same = all(
            list(map(id, buffers.values())) == list(map(id, before.values()))
            for buffers, before in held
        )
        return same and torch.equal(generator, torch.default_generator.get_state())

    try:
        yield is_kept
    finally:
        torch.default_generator.set_state(generator)
        for buffers, before in held:
            refill(buffers, before)
