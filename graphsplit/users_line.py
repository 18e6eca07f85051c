"""Which line of a stack is the user's own: the innermost outside Python, torch and graphsplit."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from traceback import FrameSummary

from graphsplit.frames import is_users

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def users_frame(frames: Sequence[FrameSummary]) -> FrameSummary | None:
    """The innermost frame that is the user's, if any."""
    return next((frame for frame in reversed(frames) if is_users(frame.filename)), None)


def users_line_of_trace(trace: str) -> str:
    """``file:line`` of the innermost frame of a printed stack that is the user's, or ``""``."""
    for frame in reversed(list(_FRAME.finditer(trace))):
        if is_users(frame["file"]):
            return f"{frame['file']}:{frame['line']}"
    return ""


def users_line_now() -> str:
    """``file:line  code`` of the user's own call that is running."""
    return users_line_of(traceback.extract_stack())


def users_line_of(frames: Sequence[FrameSummary]) -> str:
    """``file:line  code`` of the innermost frame that is the user's."""
    frame = users_frame(frames)
    if frame is None:
        return "(no line of your own code is involved)"
    return f"{frame.filename}:{frame.lineno}  {frame.line}"
