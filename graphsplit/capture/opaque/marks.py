"""``gs.opaque``: keep a module or function whole where capture cannot look inside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch import nn

from graphsplit.capture.opaque.automatic import has_backward_hooks, refuse_global_backward_hooks
from graphsplit.capture.opaque.record import OpaqueCode, OpaqueRecorder
from graphsplit.errors import CaptureError
from graphsplit.marks.annotations import module_annotation
from graphsplit.text import called, described, need
from graphsplit.torch_ext.attributes import CALL

_MODULE_ATTRIBUTE = "_graphsplit_opaque"
_recorder: ContextVar[OpaqueRecorder | None] = ContextVar("graphsplit_recorder", default=None)

M = TypeVar("M", bound=nn.Module)
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Mark:
    """How to keep something whole; see ``opaque``."""

    outputs: Callable[..., Any] | None = None
    is_random: bool | None = None


@overload
def opaque(
    what: M, *, outputs: Callable[..., Any] | None = ..., is_random: bool | None = ...
) -> M: ...


@overload
def opaque(
    what: F, *, outputs: Callable[..., Any] | None = ..., is_random: bool | None = ...
) -> F: ...


@called("gs.opaque")
def opaque(
    what: Any,
    *,
    outputs: Callable[..., Any] | None = None,
    is_random: bool | None = None,
) -> Any:
    """Keep a module or function whole: one operation, run as ordinary eager code on its worker.

    For code that cannot be captured: Python branches on the values of tensors, loops until
    convergence, NumPy. Autograd works through it as in eager mode. Its results must have the same
    shapes for all batches of one shape.

    Args:
        what: A module, which is marked and returned; or a function, for which a marked one is
            returned.
        outputs: Takes the same arguments, and returns tensors with the shapes and dtypes of the
            results. Needed where running the code on tensors without values does not tell.
        is_random: Whether it draws from the default generator. None: found out by running it; True
            where that is not possible.

    Returns:
        The module itself, or the marked function.

    Raises:
        TypeError: It is neither.
        ConfigurationError: ``outputs`` or ``is_random`` is of another kind.
    """
    is_function = outputs is None or callable(outputs)
    need("gs.opaque", "outputs", outputs, is_function, "a function of the same arguments, or None")
    is_flag = is_random in (None, True, False)
    need("gs.opaque", "is_random", is_random, is_flag, "True, False or None")
    mark = Mark(outputs, is_random)
    if isinstance(what, nn.Module):
        what.__dict__[_MODULE_ATTRIBUTE] = mark
        return what
    if not callable(what) or isinstance(what, type):
        raise TypeError(
            f"gs.opaque takes a module or a function, not {described(what)}\n"
            f"  Fix: pass one, as in gs.opaque(net.layer), or write @gs.opaque above a function."
        )

    @functools.wraps(what)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = _recorder.get()
        if recorder is None or not recorder.is_recording:
            return what(*args, **kwargs)
        label = getattr(what, "__qualname__", type(what).__name__)
        owner = getattr(what, "__self__", None)
        modules = (owner,) if isinstance(owner, nn.Module) else ()
        return recorder.record(_whole(what, label, modules, mark), args, kwargs)

    return call


def _whole(
    function: Callable[..., Any], label: str, modules: tuple[nn.Module, ...], mark: Mark
) -> OpaqueCode:
    return OpaqueCode(function, label, modules, mark.outputs, mark.is_random)


def mark_of(module: nn.Module) -> Mark | None:
    """The mark on this very module, if any."""
    found = module.__dict__.get(_MODULE_ATTRIBUTE)
    return found if isinstance(found, Mark) else None


def marked_ones(root: nn.Module) -> list[nn.Module]:
    """The modules that are kept whole because of a mark or of their hooks."""
    return [module for module in root.modules() if _mark_and_reason(module, ()) is not None]


@contextmanager
def marked_ones_whole(
    recorder: OpaqueRecorder, root: nn.Module, automatic: Collection[nn.Module] = ()
) -> Iterator[None]:
    """Record calls of marked modules and functions as one node each.

    Args:
        recorder: What records them.
        root: The module that holds all others.
        automatic: Modules to keep whole besides those that are marked.

    Raises:
        CaptureError: Something is placed inside one of them.
    """
    token = _recorder.set(recorder)
    if torch.is_grad_enabled():
        refuse_global_backward_hooks()
    with ExitStack() as stack:
        stack.callback(_recorder.reset, token)
        for path, module in root.named_modules():
            found = _mark_and_reason(module, automatic)
            if found is not None:
                refuse_placements_inside(path, module, found[1])
                stack.enter_context(_kept_whole(recorder, path, module, found[0]))
        yield


def _mark_and_reason(
    module: nn.Module, automatic: Collection[nn.Module]
) -> tuple[Mark, str] | None:
    mark = mark_of(module)
    if mark is not None:
        return mark, "gs.opaque keeps it whole"
    if torch.is_grad_enabled() and has_backward_hooks(module):
        return Mark(), "its backward hooks keep it whole"
    if module in automatic:
        return Mark(), "it cannot be captured but whole"
    return None


@contextmanager
def _kept_whole(
    recorder: OpaqueRecorder, path: str, module: nn.Module, mark: Mark
) -> Iterator[None]:
    """Let calls of one module, with its hooks, be recorded."""
    original: Callable[..., Any] = getattr(module, CALL)
    top, _, inner = path.partition(".")
    name = inner or ("loss" if top == "loss_fn" else "network")
    label = f"{type(module).__name__.lstrip('_')} ({name})"

    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.is_recording:
            return original(*args, **kwargs)
        return recorder.record(_whole(original, label, (module,), mark), args, kwargs)

    module.__dict__[CALL] = call
    try:
        yield
    finally:
        del module.__dict__[CALL]


def refuse_placements_inside(path: str, module: nn.Module, reason: str) -> None:
    """Refuse a placement inside a module that is one operation.

    Raises:
        CaptureError: There is one.
    """
    own = module_annotation(module)
    for inner, child in module.named_modules():
        placed = module_annotation(child)
        if placed is not None and (own is None or placed.rank != own.rank):
            name = path.partition(".")[2] or "network"
            raise CaptureError(
                f"{inner!r}, inside {name!r}, is placed on worker {placed.rank}, but {name!r} is "
                f"one operation: {reason}\n  {placed.source}\n"
                f"  Fix: place {name!r}, and nothing inside it."
            )
