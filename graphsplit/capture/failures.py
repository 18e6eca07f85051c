"""Why a network could not be captured, in the user's terms; torch's own words are silenced."""

from __future__ import annotations

import io
import logging
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from graphsplit.capture.own_errors import OwnError
from graphsplit.errors import CaptureError, RaisedInEagerError
from graphsplit.frames import users_line_of, users_summary
from graphsplit.guards.values import SYMBOLIC
from graphsplit.marks.annotations import INSIDE_BRANCH
from graphsplit.torch_ext.attributes import is_module_call
from graphsplit.torch_ext.private import LOGGERS_OF_CAPTURE, export_trace
from graphsplit.torch_ext.replaced import replaced

_OPAQUE = "keep the module around it whole with gs.opaque"
_VALUES = "the code that runs depends on the values of a tensor"
_LEAVES = (
    "a tensor leaves PyTorch (NumPy, a data pointer, or a tensor that is not part of the model)"
)
_TOO_LATE = (
    "A script that catches it cannot go on: it holds a tensor, or what was changed before it came "
    "cannot be captured. To skip a batch, look at it where forward begins, or before the step."
)
_CAUSAL = "_detect_is_causal_mask"  # a function of torch
_TOLD_CAUSAL = (
    "say with the mask whether it is a causal one, there and in one process: is_causal=True or "
    "False; for a decoder tgt_is_causal=, for nn.Transformer src_is_causal= and tgt_is_causal="
)
_PACKING = r"pack_padded_sequence|PackedSequence|_pack_padded|argument 'size' failed to unpack"
TEXT_OF_TENSOR = "the text of a tensor"
_REASONS: tuple[tuple[str, str, str], ...] = (
    (
        TEXT_OF_TENSOR,
        "the code writes out a tensor, whose values are not there yet (str, repr, print)",
        f"write out its shape, or a number of it (f'{{h.mean():.3f}}'), or {_OPAQUE}",
    ),
    (
        r"GuardOnDataDependent|data-dependent|Could not guard|unbacked|\.item\(\)"
        r"|Sym(Float|Int|Bool)\b|DataDependentOutput|DynamicOutputShape|NestedTensor"
        r"|sympy expression is NaN",  # a value and an infinite number
        _VALUES,
        "replace the Python branch by torch.where, or compute the condition from shapes or "
        f"arguments, or {_OPAQUE}",
    ),
    (
        _PACKING,
        "packed sequences have sizes that depend on the values of a tensor",
        "put packing, the recurrent layer and unpacking into one module, and keep it whole with "
        "gs.opaque(module, outputs=f), as docs/how-to/what-cannot-be-captured.md shows; or pad "
        "the sequences and leave packing out",
    ),
    (
        r"fake tensor|FakeTensor|non-fake|data_ptr|numpy|data is not allocated",
        _LEAVES,
        "keep the computation in torch operations, and register extra tensors with "
        f"register_buffer, or {_OPAQUE}",
    ),
)


def explain(network: nn.Module, error: BaseException, own: OwnError | None = None) -> CaptureError:
    """The text for the user on an error that came out of ``torch.export``.

    Args:
        network: The network.
        error: The error.
        own: The same in plain PyTorch; None: it does not come there.
    """
    text = f"{type(error).__name__}: {error}"
    reason, fix = (
        "torch.export does not support something this code does",
        f"write the code named above with torch operations, or {_OPAQUE}",
    )
    for pattern, why, way_out in _REASONS:
        if re.search(pattern, text):
            reason, fix = why, way_out
            break
    if INSIDE_BRANCH in text:
        reason = "a part of a branch or loop is placed, which runs whole on one worker"
        fix = "put gs.place around the branch or loop"
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.name == _CAUSAL for frame in frames):
        reason, fix = "nn.Transformer compares the values of a mask with a causal one", _TOLD_CAUSAL
    line = users_line_of(frames)
    is_users = bool(frames) and line.startswith(f"{frames[-1].filename}:{frames[-1].lineno}")
    if own is not None and INSIDE_BRANCH not in text:
        fix = "look at the shapes and dtypes of the batch, and at how many values it has"
        fix = "mend the line named above" if is_users else fix
        told = f"{own}\n  {line}\n  Plain PyTorch raises it too. Fix: {fix}."
        if own.holds_tensor:
            return too_late(told)
        raised = RaisedInEagerError(told, own.error)
        raised.is_first = own.is_first
        return raised
    if is_users:
        reason, fix = "its own code raised an error", "mend the line named above"
    # Torch's words for a length that it does not know would lead astray.
    first = "" if is_of_packing(error) else text.strip().splitlines()[0][:300]
    was = f"  the error was: {first}\n" if first else ""
    if frames and users_summary(frames) is None:
        was += f"  at {frames[-1].filename}:{frames[-1].lineno}  {frames[-1].line}\n"
    return CaptureError(
        f"{type(network).__name__} cannot be captured as one graph: {reason}\n"
        f"  {line}\n{was}  Fix: {fix}."
    )


def too_late(told: str) -> CaptureError:
    """An error that the script cannot go on after.

    Args:
        told: The error, and that it comes in plain PyTorch too.
    """
    return CaptureError(f"{told}\n  {_TOO_LATE}")


def failing_module(error: BaseException) -> nn.Module | None:
    """The innermost module whose forward ran when an error was raised, if values decided there.

    Other errors would come again however the module is run. So would those of packed sequences:
    their lengths are no less unknown to a recurrent layer that is kept whole.
    """
    return None if not comes_of_capture(error) or is_of_packing(error) else running_module(error)


def running_module(error: BaseException) -> nn.Module | None:
    """The innermost module whose forward ran when an error was raised."""
    found: nn.Module | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if is_module_call(frame):
            found = frame.f_locals.get("self")
    return found


def holds_symbols(error: BaseException) -> bool:
    """Whether the code that raised an error has a number at hand whose value is not there yet.

    ``random.Random(h.argmax().item())`` refuses what is no number of Python's.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and any(isinstance(v, SYMBOLIC) for v in frames[-1].f_locals.values())


def is_of_packing(error: BaseException) -> bool:
    """Whether an error comes of packed sequences."""
    return re.search(_PACKING, f"{type(error).__name__}: {error}") is not None


def comes_of_capture(error: BaseException) -> bool:
    """Whether an error is one that values would have spared."""
    text = f"{type(error).__name__}: {error}"
    return any(re.search(pattern, text) for pattern, _, _ in _REASONS)


@contextmanager
def quiet_export() -> Iterator[None]:
    """Silence what ``torch.export`` prints and logs of a failure: graphsplit's error says it."""
    trace = export_trace()
    loggers = [logging.getLogger(name) for name in LOGGERS_OF_CAPTURE]
    were = [logger.disabled for logger in loggers]
    for logger in loggers:  # by its level, each would have every logger of the process look again
        logger.disabled = True
    try:
        with replaced(trace, "sys", _QuietSys()):
            yield
    finally:
        for logger, was in zip(loggers, were, strict=True):
            logger.disabled = was


class _QuietSys:
    """The module ``sys``, but for where errors are printed."""

    def __init__(self) -> None:
        self.stderr = io.StringIO()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)
