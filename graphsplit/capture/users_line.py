"""Which line of a stack is the user's own: the innermost outside torch and graphsplit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary

import torch

# The folders of the packages, not their names: a user's own folder may be called torch.
_NOT_THE_USERS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def is_users(file: str) -> bool:
    """Whether a file is neither torch's, nor graphsplit's, nor generated code."""
    return not file.startswith((*_NOT_THE_USERS, "<"))


def users_frame(frames: Sequence[FrameSummary]) -> FrameSummary | None:
    """The innermost frame that is the user's, if any."""
    return next((frame for frame in reversed(frames) if is_users(frame.filename)), None)


def users_line_of_trace(trace: str) -> str:
    """``file:line`` of the innermost frame of a printed stack that is the user's, or ``""``."""
    for frame in reversed(list(_FRAME.finditer(trace))):
        if is_users(frame["file"]):
            return f"{frame['file']}:{frame['line']}"
    return ""
