"""The launcher's process, seen from the caller: started, shown, interrupted, waited for."""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, TextIO

from graphsplit.cli.launch.request import CallAnswer, CallRequest
from graphsplit.encoding import records
from graphsplit.encoding.fields import MessageError
from graphsplit.root_cause import FailureCause

_READ_BYTES = 1 << 16
_LAUNCHER = "graphsplit.cli.call"


def run(request: CallRequest) -> CallAnswer:
    """Start the launcher, show what it prints, and wait for its end.

    Raises:
        KeyboardInterrupt: The caller was interrupted; by then all that was started has ended.
    """
    outs = [None if _is_own(stream) else stream for stream in (sys.stdout, sys.stderr)]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    process = subprocess.Popen(
        [sys.executable, "-m", _LAUNCHER, records.to_text(request)],
        stdin=subprocess.DEVNULL,
        stdout=None if outs[0] is None else subprocess.PIPE,
        stderr=None if outs[1] is None else subprocess.PIPE,
        pass_fds=(*request.job.kept, request.answer),
        # The terminal's Ctrl-C is for the caller alone, which hands it on.
        start_new_session=True,
    )
    try:
        _serve(process, outs)
    finally:
        _end(process)
    return _answer(request.answer, process.returncode)


def _is_own(stream: TextIO) -> bool:
    """Whether a stream is this process's own; a notebook's, or a test's, is Python's alone."""
    try:
        return stream in (sys.__stdout__, sys.__stderr__) and stream.fileno() in (1, 2)
    except (OSError, ValueError):
        return False


def _serve(process: subprocess.Popen[bytes], outs: Sequence[TextIO | None]) -> None:
    """Show its output until it has ended; an interrupt is handed on, and raised at the end."""
    was_interrupted = False
    pipes = _Pipes((process.stdout, process.stderr), outs)
    while True:
        try:
            pipes.show()
            process.wait()
            break
        except KeyboardInterrupt:
            was_interrupted = True
            # It ends the job at once; one more, and it skips a wait.
            process.send_signal(signal.SIGHUP)
    if was_interrupted:
        raise KeyboardInterrupt


class _Pipes:
    """Output that is not for the caller's own streams, but for what stands in their place."""

    def __init__(self, pipes: Sequence[IO[bytes] | None], streams: Sequence[TextIO | None]) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")
        self._open = {
            pipe: (decoder(errors="replace"), stream)
            for pipe, stream in zip(pipes, streams, strict=True)
            if pipe is not None and stream is not None
        }

    def show(self) -> None:
        """Show what comes until all have ended."""
        with selectors.DefaultSelector() as selector:
            for pipe in self._open:
                selector.register(pipe, selectors.EVENT_READ)
            while self._open:
                for key, _ in selector.select():
                    pipe = next(one for one in self._open if one is key.fileobj)
                    decoder, stream = self._open[pipe]
                    chunk = os.read(pipe.fileno(), _READ_BYTES)
                    stream.write(decoder.decode(chunk, final=not chunk))
                    stream.flush()
                    if not chunk:
                        selector.unregister(pipe)
                        del self._open[pipe]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing behind, whatever was raised here."""
    if process.poll() is None:
        process.send_signal(signal.SIGHUP)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=15.0)  # longer than all that it waits for
    if process.poll() is None:
        process.kill()
        process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _answer(file: int, returncode: int) -> CallAnswer:
    text = os.pread(file, os.fstat(file).st_size, 0)
    try:
        return records.from_text(CallAnswer, text, what="the launcher's answer")
    except MessageError:
        how = f"signal {-returncode}" if returncode < 0 else f"status {returncode}"
        return CallAnswer(FailureCause("lost", f"the launcher of the job ended with {how}"))
