"""Code that is kept whole unasked: export would record something else than it does.

torch.vmap, torch.func.grad, jvp     their operations work on wrapped tensors
torch.jit.script functions           run, once warm, with a backward of their own
modules with backward hooks          the hooks sit on nodes of autograd, and would be lost
torch.cov, corrcoef                  ask for values, to warn; there are none
SobolEngine.draw                     counts what it has drawn, and keeps tensors of its own
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from graphsplit.capture.opaque.record import OpaqueCode, OpaqueRecorder
from graphsplit.errors import CaptureError
from graphsplit.frames import users_line_now
from graphsplit.torch_ext.attributes import BACKWARD_HOOKS, GLOBAL_BACKWARD_HOOKS
from graphsplit.torch_ext.private import (
    TRANSFORMS,
    VJP,
    FakeTensor,
    ScriptFunction,
    ScriptMethod,
    eager_transforms,
)
from graphsplit.torch_ext.replaced import ASKING_FOR_VALUES, DRAW_SOBOL, replaced


@contextmanager
def kept_whole_unasked(recorder: OpaqueRecorder) -> Iterator[None]:
    """Record transforms and scripted functions as one node each."""
    with ExitStack() as stack:
        for path, name, label in TRANSFORMS:
            patch = importlib.import_module(path), name
            stack.enter_context(recorder.instead(patch, _recorded(recorder, label)))
        for patch in ASKING_FOR_VALUES:
            call = _recorded(recorder, f"torch.{patch[1]}", is_random=False)
            stack.enter_context(recorder.instead(patch, call))
        stack.enter_context(recorder.instead(DRAW_SOBOL, partial(_draw_sobol, recorder)))
        stack.enter_context(recorder.instead((eager_transforms(), VJP), _refuse_vjp))
        stack.enter_context(_scripted_recorded(recorder))
        yield


def _recorded(
    recorder: OpaqueRecorder, label: str, *, is_random: bool | None = None
) -> Callable[..., Any]:
    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return recorder.record(OpaqueCode(original, label, is_random=is_random), args, kwargs)

    return call


def _draw_sobol(
    recorder: OpaqueRecorder,
    original: Callable[..., Any],
    engine: Any,
    n: int = 1,
    out: Any = None,
    dtype: torch.dtype | None = None,
) -> Any:
    def like(engine: Any, n: int = 1, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(n, engine.dimension, dtype=dtype)

    if isinstance(engine.quasi, FakeTensor):  # each step makes one of its own
        return original(engine, n, out, dtype)
    if out is not None:
        raise CaptureError(
            f"SobolEngine.draw(out=) cannot be captured: it writes beside the graph\n"
            f"  {users_line_now()}\n  Fix: leave out= away, and use what draw returns."
        )
    whole = OpaqueCode(original, "SobolEngine.draw", outputs=like, is_random=False)
    return recorder.record(whole, (engine, n), {"dtype": dtype})


def _refuse_vjp(original: Any, *args: Any, **kwargs: Any) -> Any:
    raise CaptureError(
        f"torch.func.vjp or jacrev cannot be captured: it returns a function that remembers "
        f"what was computed\n  {users_line_now()}\n"
        f"  Fix: keep the function around it whole, with gs.opaque."
    )


@contextmanager
def _scripted_recorded(recorder: OpaqueRecorder) -> Iterator[None]:
    kinds: tuple[Any, ...] = (ScriptFunction, ScriptMethod)
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(replaced(kind, "__call__", _scripted(recorder, kind.__call__)))
        yield


def _scripted(recorder: OpaqueRecorder, original: Callable[..., Any]) -> Callable[..., Any]:
    unoptimized: Any = torch.jit.optimized_execution  # type: ignore[attr-defined]

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What runs here must not count as one of the runs after which it is optimized.
        with unoptimized(False):
            if not recorder.is_recording:
                return original(self, *args, **kwargs)

            def run(*args: Any, **kwargs: Any) -> Any:
                return self(*args, **kwargs)

            return recorder.record(OpaqueCode(run, f"{self.name} (scripted)"), args, kwargs)

    return call


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks on a module wait for its backward."""
    return any(getattr(module, name) for name in BACKWARD_HOOKS)


def refuse_global_backward_hooks() -> None:
    """Refuse hooks on every module: there would be nothing left to place."""
    if any(GLOBAL_BACKWARD_HOOKS):
        raise CaptureError(
            "a backward hook is registered for all modules (register_module_full_backward_hook); "
            "the captured graph would lose it\n"
            "  Fix: register it on the modules that need it; each of them is then kept whole."
        )
