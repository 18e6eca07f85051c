"""The user's lines that recorded operations come of."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from traceback import FrameSummary, StackSummary
from types import FrameType
from typing import Any

import torch
import torch.fx.proxy

from graphsplit.torch_ext.private import STACK_TRACE_ANCHORS
from graphsplit.torch_ext.replaced import replaced

_OF_TORCH = "torch/__init__.py"


def keeping_lines_of_forward() -> AbstractContextManager[None]:
    """Let torch look at no frame but those whose lines it keeps.

    By itself it reads the source lines of a hundred for each operation, and leaves out all but one
    or two: a tenth of a capture's time.
    """
    return replaced(torch.fx.proxy, "CapturedTraceback", _FramesOfForward)


class _FramesOfForward:
    """Stands for the stack of a call where ``torch.fx`` asks for one."""

    def __init__(self, frame: FrameType | None) -> None:
        self._frame = frame

    @classmethod
    def extract(cls) -> _FramesOfForward:
        """The stack of the caller."""
        return cls(sys._getframe(1))

    def summary(self) -> StackSummary:
        """The frames that ``torch.fx`` keeps, the outermost first."""
        found, frame = StackSummary(), self._frame
        while frame is not None:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            is_forward = name == "forward" or file.endswith(_OF_TORCH)
            if is_forward or (file, name) in STACK_TRACE_ANCHORS:
                found.append(FrameSummary(file, frame.f_lineno, name, lookup_line=False))
            frame = frame.f_back
        found.reverse()
        return found


@contextmanager
def keeping_lines_of(function: Any) -> Iterator[None]:
    """Let the operations of a function have its lines; otherwise only those of a ``forward`` do."""
    while isinstance(function, partial):
        function = function.func
    if not inspect.isroutine(function):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    anchor = (code.co_filename, code.co_name) if code is not None else ("", "")
    is_new = anchor not in STACK_TRACE_ANCHORS
    STACK_TRACE_ANCHORS.add(anchor)
    try:
        yield
    finally:
        if is_new:
            STACK_TRACE_ANCHORS.discard(anchor)
