"""The token of a job that ``graphsplit run`` has started, kept for ``graphsplit status``.

A file that the launcher holds: what a killed launcher left is nobody's token, though another job
has its port.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from graphsplit.security.held_files import HeldFile, held_like, read_held
from graphsplit.security.private_files import own_folder


def _path(host: str, port: int | str) -> Path:
    return own_folder() / f"{re.sub(r'[^A-Za-z0-9.]', '_', host)}_{port}.token"


@contextlib.contextmanager
def kept_token(variables: Mapping[str, str], host: str, port: int) -> Iterator[None]:
    """Keep a job's token where ``find_token`` looks, as long as this lasts.

    Args:
        variables: The environment of one of the job's processes.
        host: Where the scheduler listens.
        port: Its port.
    """
    token, kept = variables.get("GS_JOB_TOKEN", ""), None
    if token:
        with contextlib.suppress(OSError):  # then ``graphsplit status`` must be given it
            kept = HeldFile(_path(host, port), token.encode())
    try:
        yield
    finally:
        if kept is not None:
            kept.take_away()


def find_token(host: str, port: int) -> str:
    """The token of a job that this user's launcher runs at this address; empty if there is none."""
    return (read_held(_path(host, port)) or b"").decode("ascii", errors="replace")


def local_jobs() -> list[tuple[str, int]]:
    """Host and port of the schedulers of this user's jobs on this machine."""
    found = (path.stem.rpartition("_") for path in held_like(_path("any", "port")))
    return [(host, int(port)) for host, _, port in found if port.isdecimal()]
