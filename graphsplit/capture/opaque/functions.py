"""Keep custom ``torch.autograd.Function``s whole: export traces through them.

What it records is their forward; their own backward would be lost without a word. Where autograd
asks nothing of a function (in eval mode, under ``no_grad``, or if no argument asks for a gradient)
there is nothing to lose, and its operations are recorded one by one; but not if it counts: what it
changes of Python's state is to be on one worker, in training and elsewhere.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from graphsplit.capture.checkpoints import run_reentrant_checkpoint
from graphsplit.capture.observe import Observer, unrecorded
from graphsplit.capture.opaque.record import OpaqueCode, OpaqueRecorder
from graphsplit.capture.reach.names import names_in
from graphsplit.capture.reach.reach import Walk, is_of_library
from graphsplit.capture.reach.state import Reached
from graphsplit.errors import CaptureError
from graphsplit.frames import users_line_now
from graphsplit.torch_ext.private import (
    SingleLevelFunction,
    are_transforms_active,
    leaves_of,
)
from graphsplit.torch_ext.replaced import APPLY_FUNCTION, replaced
from graphsplit.torch_ext.stand_ins import DRAWS

Apply = Callable[..., Any]
_SINGLE_LEVEL: Any = SingleLevelFunction
# Raised by torch where code asks for values, and by code that looks at what it was given.
_LACKS_VALUES = (RuntimeError, TypeError, ValueError)
_DRAWING = frozenset(
    ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal",
     "bernoulli", "multinomial", "poisson", "binomial", "random", "dropout", "rrelu",
     "gumbel_softmax", "sample", "rsample", *(function.__name__ for function in DRAWS))
)  # fmt: skip


@contextmanager
def custom_functions_whole(recorder: OpaqueRecorder) -> Iterator[None]:
    """Record every custom autograd function that autograd asks something of as one node.

    Where torch itself goes on from ``Function.apply``: scripts keep that one, ``f = STE.apply``.
    """
    with (
        replaced(*APPLY_FUNCTION, classmethod(_refusing_transforms(recorder))),
        replaced(_SINGLE_LEVEL, "apply", classmethod(_recording(recorder))),
    ):
        yield


def _refusing_transforms(recorder: OpaqueRecorder) -> Apply:
    original = vars(APPLY_FUNCTION[0])["apply"].__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.is_recording and are_transforms_active():
            raise CaptureError(
                f"{cls.__qualname__}.apply is a custom torch.autograd.Function inside torch.func "
                f"or torch.vmap; its own backward would be lost\n  {users_line_now()}\n"
                f"  Fix: keep the function that calls torch.func whole, with gs.opaque."
            )
        return original(cls, *args, **kwargs)

    return apply


def _recording(recorder: OpaqueRecorder) -> Apply:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        def apply_it(*args: Any, **kwargs: Any) -> Any:
            return super(_SINGLE_LEVEL, cls).apply(*args, **kwargs)

        if not recorder.is_recording:
            return apply_it(*args, **kwargs)
        return _record(recorder, cls, apply_it, args, kwargs)

    return apply


def _record(
    recorder: OpaqueRecorder, cls: Any, apply: Apply, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    label = f"{cls.__qualname__}.apply"
    if cls is CheckpointFunction:
        is_on = torch.is_grad_enabled()
        return run_reentrant_checkpoint(*args) if is_on else apply(*args, **kwargs)
    given = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor)]
    forward, backward = _code_of(cls, "forward", "setup_context"), _code_of(cls, "backward", "vjp")
    is_asked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    if not is_asked:
        with torch.no_grad():  # forward runs so, and its results carry no gradient
            if not _keeps_state(recorder, forward, apply, args, kwargs):
                return apply(*args, **kwargs)
        backward = ()
    whole = OpaqueCode(cls.apply, label, in_parts=False, forward=forward, backward=backward)
    results = recorder.record(whole, args, kwargs)
    if not is_asked:
        return results
    seen = Reached()
    roots = (*backward, *recorder.hooks, *args)
    with recorder.not_recording(), seen.leaving_no_trace(roots):
        _refuse_random_backward(label, given, results, backward)
    recorder.calls[-1].reached.note_backward(seen)
    return results


def _keeps_state(
    recorder: OpaqueRecorder,
    forward: tuple[Any, ...],
    apply: Apply,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool:
    """Whether forward changes Python state: it then lives where the call runs, in training too."""
    reached = Reached()
    with recorder.not_recording(), reached.leaving_no_trace((*forward, *args, *kwargs.values())):
        try:
            with unrecorded(Observer(lambda tensor: False)):
                apply(*args, **kwargs)
        except _LACKS_VALUES:  # recorded, it ends here too; what it has changed until then counts
            pass
    return reached.has_changed_python()


def _code_of(cls: Any, *names: str) -> tuple[Any, ...]:
    return tuple(inspect.getattr_static(cls, name) for name in names)


def _refuse_random_backward(
    label: str, given: list[torch.Tensor], results: Any, backward: tuple[Any, ...]
) -> None:
    """Refuse a function whose backward draws: backward runs in no fixed order over workers."""
    outputs = [one for one in leaves_of(torch.Tensor, results) if one.grad_fn is not None]
    inputs = [tensor for tensor in given if tensor.requires_grad]
    if not outputs:
        return
    observer = Observer(lambda tensor: False)
    try:
        with unrecorded(observer):
            torch.autograd.grad(
                outputs,
                inputs,
                [torch.zeros_like(output) for output in outputs],
                retain_graph=True,
                allow_unused=True,
            )
    except _LACKS_VALUES:  # nobody sees what it would do with values: what it names counts
        observer.is_random |= not names_within_reach(backward).isdisjoint(_DRAWING)
    if observer.is_random:
        raise CaptureError(
            f"{label} draws random numbers in its backward; over workers they would be other "
            f"numbers than in one process\n  {users_line_now()}\n"
            f"  Fix: draw in forward, and keep what was drawn with ctx.save_for_backward."
        )


def names_within_reach(roots: Iterable[Any]) -> frozenset[str]:
    """All names in the code that some values lead to; that of libraries apart."""
    walk = Walk(())
    walk.run(roots)
    functions = (value for value in walk.seen.values() if isinstance(value, types.FunctionType))
    own = (function for function in functions if not is_of_library(function.__module__))
    return frozenset().union(*(names_in(function.__code__).every for function in own))
