"""Shows the output of several processes on one terminal, or in one file."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import click

from graphsplit.cli.launch.ending import SCHEDULER
from graphsplit.cli.launch.lines import LinePart

UPDATE_INTERVAL_S = 10.0
COLOURS = (36, 33, 32, 35, 34, 31)
_LAUNCHER, _SPINNER = "graphsplit", "|/-\\"
TURN_S = 0.1  # how often a spinner turns
# They last until a worker says something else. What is done again is said in a line of its own.
_LASTS = re.compile(rb"\[graphsplit\] ((?:capturing|planning) (?!.* again: ).*)")
# What follows from the job's end. The launcher's last line names its cause, once for all of them;
# what each process says of it stands in its log.
_ECHO = re.compile(
    rb"\[graphsplit\] (worker \d+ ended because (?!of an error).*|the same error as .*"
    rb"|(worker \d+|this process) was interrupted: ended by SIG(INT|TERM).*)"
    rb"|\[scheduler\] the job failed: (.*; its log has the whole story|.*\) was lost: .*)"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass
class Sink:
    """One of the launcher's own output streams."""

    stream: BinaryIO
    is_terminal: bool

    @classmethod
    def of(cls, stream: BinaryIO) -> Sink:
        """Wrap a stream and look whether a person is watching it."""
        return cls(stream, is_terminal=stream.isatty())


class Console:
    """Prefixes each line with its process; leaves out what only echoes the launcher's last line.

    A terminal has one status line at the bottom, for the progress bar of the process that first
    draws one; lines scroll above it. Elsewhere a progress bar becomes a line now and then.
    """

    def __init__(
        self,
        out: Sink,
        err: Sink,
        *,
        clock: Callable[[], float],
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._sinks = {"stdout": out, "stderr": err}
        self._clock = clock
        self._use_colour = not environ.get("NO_COLOR")
        self._colours: dict[str, int] = {}
        self._status_owner = ""
        self._status = b""
        self._last_update_s: dict[str, float] = {}
        self._turns = 0
        self._waits_for = ""

    @property
    def turns(self) -> bool:
        """Whether a spinner is shown, which wants to be turned every ``TURN_S`` seconds."""
        return bool(self._waits_for)

    def show(self, name: str, channel: str, piece: LinePart) -> None:
        """Show what process ``name`` wrote to ``channel``, ``"stdout"`` or ``"stderr"``."""
        sink = self._sinks[channel]
        if _ECHO.fullmatch(piece.text):
            return
        if self._sinks["stderr"].is_terminal and (lasts := _LASTS.fullmatch(piece.text)):
            self.turn(lasts[1].decode(errors="replace"))
            return
        if self._waits_for and name != SCHEDULER:
            self.turn("")
        if not piece.is_update:
            if self._status_owner == name and channel == "stderr":
                self._set_status("", b"")
            # The scheduler's own lines begin with its name already, for logs of other launchers.
            text = piece.text.removeprefix(f"[{name}] ".encode())
            self._write_line(sink, self._prefix(sink, name) + text)
        elif self._sinks["stderr"].is_terminal:
            if self._status_owner in ("", name):
                is_blank = not piece.text.strip()
                self._set_status("" if is_blank else name, b"" if is_blank else piece.text)
        elif self._is_update_due(name) and piece.text.strip():
            self._write_line(sink, self._prefix(sink, name) + piece.text)

    def say(self, text: str) -> None:
        """Show a line of the launcher itself."""
        self._write_line(self._sinks["stderr"], text.encode())

    def turn(self, text: str | None = None) -> None:
        """Turn the spinner, which a terminal alone has.

        Args:
            text: What is waited for now; empty: nothing any more; None: what was said last.
        """
        if not self._sinks["stderr"].is_terminal:
            return
        self._waits_for = self._waits_for if text is None else text
        if self._status_owner in ("", _LAUNCHER):
            sign = _SPINNER[self._turns % len(_SPINNER)]
            self._turns += 1
            owner, shown = (_LAUNCHER, f"{sign} {self._waits_for}") if self._waits_for else ("", "")
            self._set_status(owner, shown.encode())

    def close(self) -> None:
        """Take the status line away."""
        self._waits_for = ""
        self._set_status("", b"")

    def _prefix(self, sink: Sink, name: str) -> bytes:
        text = f"[{name}] "
        if sink.is_terminal and self._use_colour:
            colour = self._colours.setdefault(name, COLOURS[len(self._colours) % len(COLOURS)])
            text = f"\x1b[{colour}m{text}\x1b[0m"
        return text.encode()

    def _is_update_due(self, name: str) -> bool:
        now_s = self._clock()
        if now_s - self._last_update_s.get(name, float("-inf")) < UPDATE_INTERVAL_S:
            return False
        self._last_update_s[name] = now_s
        return True

    def _write_line(self, sink: Sink, line: bytes) -> None:
        has_status = bool(self._status) and sink.is_terminal
        if has_status:
            self._erase_status()
        try:
            sink.stream.write(line + b"\n")
            sink.stream.flush()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise click.ClickException(
                f"what the job prints cannot be written: {error.strerror}\n"
                f"  Fix: free space where the output goes, or send it elsewhere."
            ) from error
        if has_status:
            self._draw_status()

    def _set_status(self, owner: str, text: bytes) -> None:
        if self._status:
            self._erase_status()
        self._status_owner, self._status = owner, text
        if text:
            self._draw_status()

    def _erase_status(self) -> None:
        stream = self._sinks["stderr"].stream
        stream.write(b"\r\x1b[K")
        stream.flush()

    def _draw_status(self) -> None:
        plain = _ESCAPES.sub("", self._status.decode(errors="replace"))
        # A line that wraps could not be erased again.
        width = shutil.get_terminal_size().columns - 1
        stream = self._sinks["stderr"].stream
        stream.write(f"[{self._status_owner}] {plain}"[:width].encode())
        stream.flush()
