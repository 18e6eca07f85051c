"""Which frames of a stack are the user's own, and tracebacks that show those."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException
from types import CodeType, FrameType, TracebackType
from typing import Any

from graphsplit.errors import CaptureError, GraphsplitError

# Folders of packages, not their names: a user's own folder may be called torch.
OWN = f"{Path(__file__).parent}/"
_INTEGRATIONS = f"{OWN}integrations/"
_TRAINERS = re.compile("/site-packages/(accelerate|lightning|lightning_fabric|transformers)/")
_PYTHON = f"{Path(contextlib.__file__).parent}/"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_NOWHERE = "(no line of your own code is involved)"


def is_own(file: str) -> bool:
    """Whether a file is one of graphsplit's."""
    return file.startswith(OWN)


def own_and_torchs() -> tuple[str, ...]:
    """The folders of graphsplit and of torch, with which their files begin."""
    return _own_and_torchs(getattr(sys.modules.get("torch"), "__file__", None))


@functools.lru_cache(maxsize=4096)
def is_trainers(file: str) -> bool:
    """Whether a file is one of a library that trains for the script, or of what stands before it.

    The script calls such a library; what that calls in turn, the script has not written.
    """
    return file.startswith(_INTEGRATIONS) or bool(_TRAINERS.search(file))


def is_users(file: str) -> bool:
    """Whether a file is not Python's own, nor torch's, nor graphsplit's, nor generated code."""
    # Not imported: the scheduler's tests do without torch, and its frames are none then.
    torch = sys.modules.get("torch")
    return _is_users(file, getattr(torch, "__file__", None))


@functools.cache
def _own_and_torchs(torch_file: str | None) -> tuple[str, ...]:
    return (OWN,) if torch_file is None else (OWN, f"{Path(torch_file).parent}/")


@functools.lru_cache(maxsize=4096)  # stacks are walked for each value that a capture notes
def _is_users(file: str, torch_file: str | None) -> bool:
    if file.startswith(("<", *_own_and_torchs(torch_file))):
        return False
    return not file.startswith(_PYTHON) or "site-packages" in file


def line_of(trace: TracebackType | None, *, of_script: bool = False) -> str:
    """The user's innermost line of a traceback, ``train.py:31, in forward``; empty if none.

    Args:
        trace: The traceback.
        of_script: In no library that trains for the user, if there is such a line.
    """
    found = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        is_passed_by = of_script and found and is_trainers(code.co_filename)
        if is_users(code.co_filename) and not is_passed_by:
            found = _line(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return found


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The user's innermost frame of a running stack."""
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    while frame is not None and not _is_users(frame.f_code.co_filename, torch_file):
        frame = frame.f_back
    return frame


def past_pythons(frame: FrameType | None) -> FrameType | None:
    """A frame, or the innermost around it that is not of Python's own library."""
    while frame is not None:
        file = frame.f_code.co_filename
        if "site-packages" in file or not file.startswith((_PYTHON, "<frozen ")):
            break
        frame = frame.f_back
    return frame


def script_frame(frame: FrameType | None) -> FrameType | None:
    """The user's innermost frame of a running stack that is in no library that trains for him."""
    found = inner = users_frame(frame)
    while found is not None and is_trainers(found.f_code.co_filename):
        found = users_frame(found.f_back)
    return found or inner


def line_now(frame: FrameType | None, *, most: int = 1) -> str:
    """The user's innermost line of a running stack, ``train.py:31, in forward``.

    Args:
        frame: The innermost frame.
        most: How many lines to show, ``load.py:9, in read, from train.py:31``: of an installed
            package the innermost alone.
    """
    lines: list[str] = []
    while len(lines) < most and (frame := users_frame(frame)) is not None:
        file = frame.f_code.co_filename
        if not lines or "site-packages" not in file:
            lines.append(_line(file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return ", from ".join(lines)


def users_line_now() -> str:
    """``file:line  code`` of the user's own call that is running."""
    found = users_frame(sys._getframe(1))
    if found is None:
        return _NOWHERE
    file, number = found.f_code.co_filename, found.f_lineno
    return f"{file}:{number}  {linecache.getline(file, number, found.f_globals).strip()}"


def users_summary(frames: Sequence[FrameSummary]) -> FrameSummary | None:
    """The user's innermost frame of an extracted stack."""
    return next((frame for frame in reversed(frames) if is_users(frame.filename)), None)


def users_line_of(frames: Sequence[FrameSummary]) -> str:
    """``file:line  code`` of the user's innermost frame of an extracted stack."""
    frame = users_summary(frames)
    return _NOWHERE if frame is None else f"{frame.filename}:{frame.lineno}  {frame.line}"


def users_line_of_node(node: Any) -> str:
    """``file:line`` of the user's call that a node of ``torch.fx`` was traced from, or ``""``."""
    for frame in reversed(list(_FRAME.finditer(node.meta.get("stack_trace") or ""))):
        if is_users(frame["file"]):
            return f"{frame['file']}:{frame['line']}"
    return ""


def warn_users(text: str) -> None:
    """Warn, and show the user's line that it comes of, whatever called this in between."""
    found = users_frame(sys._getframe(1))
    if found is None:
        warnings.warn(text, stacklevel=2)
        return
    registry = found.f_globals.setdefault("__warningregistry__", {})
    file, number = found.f_code.co_filename, found.f_lineno
    warnings.warn_explicit(text, UserWarning, file, number, registry=registry)


def line_at(code: CodeType, number: int) -> str:
    """A line of the user's, ``train.py:31, in forward``; empty if it is not."""
    return _line(code.co_filename, number, code.co_name) if is_users(code.co_filename) else ""


def _line(file: str, number: int, function: str) -> str:
    where = f"{short_path(file)}:{number}"
    return where if function == "<module>" else f"{where}, in {function}"


def where_defined(code: CodeType) -> str:
    """``file:line`` where the code of a function begins."""
    return f"{short_path(code.co_filename)}:{code.co_firstlineno}"


def short_path(file: str) -> str:
    """A path as seen from the working folder, if it is below that."""
    try:
        return _below(os.getcwd(), file)
    except OSError:  # the folder is gone
        return file


@functools.lru_cache(maxsize=4096)  # asked for each value that a capture notes
def _below(folder: str, file: str) -> str:
    return os.path.relpath(file, folder) if file.startswith(f"{folder}{os.sep}") else file


def shows_all(environ: Mapping[str, str]) -> bool:
    """Whether ``GS_FULL_TRACEBACK`` asks for graphsplit's own frames, too."""
    value = environ.get("GS_FULL_TRACEBACK", "").strip().lower()
    return value not in ("", "0", "false", "no", "off")


def users_traceback(error: BaseException, *, is_full: bool = False) -> str:
    """A traceback without what happens inside graphsplit, and below it.

    What graphsplit calls is left out up to the next line of the user's: a callback, ``forward``.
    An error of graphsplit's shows lines of the user's alone; one that stands for a mistake says
    itself what it came from.

    Args:
        error: The error.
        is_full: Leave nothing out.
    """
    shown = TracebackException.from_exception(error)
    if not is_full:
        _prune(shown, error, _kept)
    return "".join(shown.format())


def _prune(
    shown: TracebackException, error: BaseException, keep: Callable[..., list[FrameSummary]]
) -> None:
    if isinstance(error, GraphsplitError):
        keep = _users_only
    frames = keep(shown.stack)
    # An empty stack would still be printed as a headline with nothing below it.
    shown.stack = StackSummary.from_list(frames) if frames else None  # type: ignore[assignment]
    of_own = isinstance(error, GraphsplitError)
    is_a_mistake = of_own and isinstance(error, ValueError | CaptureError)
    for name in ("__cause__", "__context__"):
        part, origin = getattr(shown, name), getattr(error, name)
        if part is None or origin is None:
            continue
        _prune(part, origin, keep)
        if is_a_mistake or (of_own and not part.stack):
            setattr(shown, name, None)


def _kept(frames: Iterable[FrameSummary]) -> list[FrameSummary]:
    kept, keeps = [], True
    for frame in frames:
        if is_own(frame.filename):
            keeps = False
            continue
        keeps = keeps or is_users(frame.filename)
        if keeps:
            kept.append(frame)
    return kept


def _users_only(frames: Iterable[FrameSummary]) -> list[FrameSummary]:
    return [frame for frame in frames if is_users(frame.filename)]


def without_own_frames(text: str) -> str:
    """A printed traceback without graphsplit's own frames."""
    kept, drops = [], False
    for line in text.splitlines():
        if line.startswith('  File "'):
            drops = is_own(line.removeprefix('  File "'))
        elif not line.startswith("    "):
            drops = False
        if not drops:
            kept.append(line)
    return "\n".join(kept)


def whole_traceback(error: BaseException) -> str:
    """The traceback as Python prints it where nobody catches the error: from the first frame on."""
    shown, trace = TracebackException.from_exception(error), error.__traceback__
    if trace is not None and (outer := trace.tb_frame.f_back) is not None:  # still on its way
        shown.stack = StackSummary.from_list([*traceback.extract_stack(outer), *shown.stack])
    return "".join(shown.format())
