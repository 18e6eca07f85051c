"""The command ``graphsplit``: Ctrl-C is understood before the rest is imported."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn


def main(prog_name: str | None = None) -> None:
    """Run the command line of this process.

    Args:
        prog_name: What usage texts call the command; None: as it was started.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from graphsplit.cli.commands import main as command  # takes a few tenths of a second

    command(prog_name=prog_name)


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    """End without a traceback, as long as nothing is started that would have to be ended."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.write(2, b"graphsplit: interrupted by SIGINT; exit status 130\n")
    raise SystemExit(130)
