"""The token of a job that ``graphsplit run`` has started, kept for ``graphsplit status``.

A file of this user's own, in a folder of this user's own, which goes when the job does. The
launcher holds a lock on it: what a killed launcher left is nobody's token, though another job has
its port, and the next launcher or ``graphsplit status`` takes it away.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from graphsplit.errors import ConfigurationError
from graphsplit.security.private_files import is_private, own_folder, read_private_file

_TRIES = 100


def _path(host: str, port: int) -> Path:
    return own_folder() / f"{re.sub(r'[^A-Za-z0-9.]', '_', host)}_{port}.token"


@contextlib.contextmanager
def kept_token(variables: Mapping[str, str], host: str, port: int) -> Iterator[None]:
    """Keep a job's token where ``find_token`` looks, as long as this lasts.

    Args:
        variables: The environment of one of the job's processes.
        host: Where the scheduler listens.
        port: Its port.
    """
    token, path = variables.get("GS_JOB_TOKEN", ""), _path(host, port)
    number = _write(path, token) if token else None
    if number is None:
        yield
        return
    try:
        yield
    finally:
        _take_away(path, number)


def _write(path: Path, token: str) -> int | None:
    """The locked file that has the token; None where ``graphsplit status`` must be given it."""
    for _ in range(_TRIES):
        try:
            return _try_to_write(path, token)
        except (FileNotFoundError, FileExistsError):
            continue  # another job was the last one there, and took the folder with it
        except OSError:
            return None
    return None


def _try_to_write(path: Path, token: str) -> int | None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not is_private(path.parent):
        return None
    _clean(path.parent)
    path.unlink(missing_ok=True)  # another job's, which had this port before
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        # Who cleans up may have seen it before it was locked: then it is gone, and written again.
        if not os.path.samestat(os.fstat(number), path.lstat()):
            raise FileNotFoundError(path)
        os.write(number, token.encode())
    except BaseException:
        os.close(number)
        raise
    return number


def _take_away(path: Path, number: int) -> None:
    """Remove a job's token, unless another job has put its own in its place by now."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(number), path.lstat()):
            path.unlink()
    os.close(number)
    with contextlib.suppress(OSError):  # tokens of other jobs may be in it
        path.parent.rmdir()


def _clean(folder: Path) -> None:
    """Take away the tokens that killed launchers left in a folder of this user's own."""
    for path in folder.glob("*.token"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where it is held
            if os.path.samestat(os.fstat(file.fileno()), path.lstat()):
                path.unlink()


def _is_held(path: Path) -> bool:
    """Whether the launcher that wrote a token still runs: its lock goes when it does.

    Raises:
        OSError: The file cannot be opened.
    """
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def find_token(host: str, port: int) -> str:
    """The token of a job that this user's launcher runs at this address; empty if there is none."""
    path = _path(host, port)
    try:
        if not is_private(path.parent):
            return ""
        _clean(path.parent)
        if not _is_held(path):
            return ""
        return read_private_file("GS_JOB_TOKEN_FILE", str(path)).decode("ascii", errors="replace")
    except (ConfigurationError, OSError):
        return ""


def local_jobs() -> list[tuple[str, int]]:
    """Host and port of the schedulers of this user's jobs on this machine."""
    found = []
    with contextlib.suppress(OSError):
        folder = own_folder()
        if not is_private(folder):
            return []
        _clean(folder)
        for path in sorted(folder.glob("*.token")):
            host, _, port = path.stem.rpartition("_")
            if port.isdecimal() and _is_held(path):
                found.append((host, int(port)))
    return found
