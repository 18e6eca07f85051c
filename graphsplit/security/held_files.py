"""Files that a process leaves for others of this user on this machine, for as long as it runs.

Each is in a folder of this user's own, which nobody else can look into. Its writer holds a lock on
it, which goes when the process does, however that ends: what a killed one left is nobody's, and
who looks next takes it away.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from graphsplit.security.private_files import is_private, open_new_file

_TRIES = 100
_MAX_BYTES = 1 << 20


class NotOwnFolderError(OSError):
    """The folder is not this user's own: what is left in it might be read by others."""


class HeldFile:
    """A file that this process has written, and holds.

    Args:
        path: Its place; the folder is made where there is none.
        content: What it holds.

    Raises:
        NotOwnFolderError: The folder is somebody else's.
        OSError: It cannot be written.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        self._path = path
        for _ in range(_TRIES - 1):
            # Another process may have been the last one there, and taken the folder with it.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                self._file = _written(path, content)
                return
        self._file = _written(path, content)

    def take_away(self) -> None:
        """Remove it, unless another process has put its own in its place by now."""
        with contextlib.suppress(OSError):
            if _is_at(self._path, self._file):
                self._path.unlink()
        self._file.close()
        with contextlib.suppress(OSError):  # others may have theirs in it
            self._path.parent.rmdir()


def read_held(path: Path) -> bytes | None:
    """The content of a file whose writer still runs; None if there is none."""
    with contextlib.suppress(OSError):
        if is_private(path.parent):
            _clean(path)
            with path.open("rb") as file:
                return file.read(_MAX_BYTES) if _is_held(file) else None
    return None


def held_like(path: Path) -> list[Path]:
    """The files beside ``path``, with the same suffix, whose writers still run; by name."""
    with contextlib.suppress(OSError):
        if is_private(path.parent):
            _clean(path)
            return sorted(path.parent.glob(f"*{path.suffix}"))
    return []


def _written(path: Path, content: bytes) -> BinaryIO:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not is_private(path.parent):
        raise NotOwnFolderError(f"{path.parent} is not this user's own")
    _clean(path)
    path.unlink(missing_ok=True)
    file = open_new_file(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        # Who cleans up may have seen it before it was locked: then it is gone, and written again.
        if not _is_at(path, file):
            raise FileNotFoundError(path)
        file.write(content)
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def _clean(path: Path) -> None:
    """Take away what killed processes left beside ``path``, of the same suffix."""
    for other in path.parent.glob(f"*{path.suffix}"):
        with contextlib.suppress(OSError), other.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where it is held
            if _is_at(other, file):
                other.unlink()


def _is_at(path: Path, file: BinaryIO) -> bool:
    return os.path.samestat(os.fstat(file.fileno()), path.lstat())


def _is_held(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
