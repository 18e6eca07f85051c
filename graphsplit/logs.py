"""Graphsplit's own messages while a job runs: Python's ``logging``, under ``graphsplit``.

::

    logs.configure(os.environ, prefix="graphsplit", stream=lambda: sys.stderr)
    logs.say("all 5 workers registered after 3.1 s", event="formed")

prints ``[graphsplit] all 5 workers registered after 3.1 s``, or, under ``GS_LOG=json``, one object
on one line. A script that has given the logger ``graphsplit`` a handler of its own before
``gs.init()`` decides itself what becomes of the lines.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any, Protocol, TextIO

from graphsplit.settings import JSON

VARIABLE = "GS_LOG"
LOGGER = logging.getLogger("graphsplit")

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_CONTEXT = ("job", "generation", "rank", "step")


class LogLine(Protocol):
    """Takes what there is to say."""

    def __call__(self, line: str, *, event: str = "note", level: str = "info") -> None:
        """Say a line, or several that belong together."""


def say(line: str, *, event: str = "note", level: str = "info", **details: Any) -> None:
    """Log a line.

    Args:
        line: What a person reads; further lines belong to it.
        event: What happened, in one word, for programs.
        level: ``"info"``, ``"warning"`` or ``"error"``.
        details: What else a program may want to know; must fit into JSON.
    """
    LOGGER.log(_LEVELS[level], line, extra={"event": event, "details": details})


def teller(log: Callable[[str], None] | None) -> LogLine:
    """``say``, or the function that somebody gave to take the lines alone."""
    if log is None:
        return say
    take = log

    def tell(line: str, *, event: str = "note", level: str = "info") -> None:
        take(line)

    return tell


class Context:
    """The fields that every line of this process carries: job, generation, rank, step."""

    def __init__(self) -> None:
        self.source: Callable[[], Mapping[str, Any]] = dict

    def fields(self) -> dict[str, Any]:
        """The fields of a line that is logged now; None where one is not known."""
        found: Mapping[str, Any] = {}
        with contextlib.suppress(Exception):  # a line must not be lost for its context
            found = self.source()
        return {name: found.get(name) for name in _CONTEXT}


CONTEXT = Context()


def is_json(environ: Mapping[str, str]) -> bool:
    """Whether lines are to be objects."""
    return environ.get(VARIABLE, "").strip() == JSON


def configure(environ: Mapping[str, str], *, prefix: str, stream: Callable[[], TextIO]) -> None:
    """Print what is said, unless the script has decided otherwise.

    Args:
        environ: ``GS_LOG`` is read; what else it may hold is checked with the other settings.
        prefix: Begins every line of a plain log: ``"scheduler"``.
        stream: Where to print; asked for each line, as a script may put another one there.
    """
    if LOGGER.handlers:
        return
    handler = _Printer(stream)
    handler.setFormatter(JsonLines() if is_json(environ) else PlainLines(prefix))
    LOGGER.addHandler(handler)
    LOGGER.propagate = False
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)


class PlainLines(logging.Formatter):
    """``[scheduler] all 5 workers registered``; a prefix on each line of several."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        """The lines, each with its end."""
        lines = record.getMessage().splitlines()
        return "".join(f"[{self._prefix}] {line}\n" for line in lines)


class JsonLines(logging.Formatter):
    """One object per line: time, level, job, generation, rank, step, event, message."""

    def format(self, record: logging.LogRecord) -> str:
        """The object, with the end of its line."""
        time = datetime.fromtimestamp(record.created, timezone.utc)
        fields = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            **CONTEXT.fields(),
            "event": getattr(record, "event", "note"),
            "message": record.getMessage(),
            **getattr(record, "details", {}),
        }
        return json.dumps(fields, default=str) + "\n"


class _Printer(logging.Handler):
    """Writes each record at once and in one piece: processes may share a terminal."""

    def __init__(self, stream: Callable[[], TextIO]) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write; a reader that has gone must not end the job."""
        with contextlib.suppress(OSError, ValueError):
            stream = self._stream()
            with _beside_bars(stream):
                stream.write(self.format(record))
                stream.flush()


def _beside_bars(stream: TextIO) -> contextlib.AbstractContextManager[None]:
    """Progress bars that are shown make room for a line, and are drawn again below it."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is None or not getattr(bars, "_instances", None):
        return contextlib.nullcontext()
    beside: contextlib.AbstractContextManager[None] = bars.external_write_mode(file=stream)
    return beside
