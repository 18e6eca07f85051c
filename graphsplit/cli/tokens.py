"""Where ``graphsplit run`` keeps the token of a job that it has started, for ``graphsplit status``.

A file of this user's own, in a folder of this user's own, which goes when the job does.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from graphsplit.errors import ConfigurationError
from graphsplit.security.private_files import read_private_file

_TRIES = 100


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) if runtime and Path(runtime).is_dir() else Path(tempfile.gettempdir())
    return base / f"graphsplit-{os.getuid()}"


def _is_private(folder: Path) -> bool:
    """Whether a folder is this user's, and nobody else can look into it.

    Raises:
        FileNotFoundError: There is none.
    """
    found = folder.lstat()
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    )


def _path(host: str, port: int) -> Path:
    return _folder() / f"{re.sub(r'[^A-Za-z0-9.]', '_', host)}_{port}.token"


@contextlib.contextmanager
def kept_token(variables: Mapping[str, str], host: str, port: int) -> Iterator[None]:
    """Keep a job's token where ``find_token`` looks, as long as this lasts.

    Args:
        variables: The environment of one of the job's processes.
        host: Where the scheduler listens.
        port: Its port.
    """
    token, path = variables.get("GS_JOB_TOKEN", ""), _path(host, port)
    if not token or not _write(path, token):
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # tokens of other jobs may be in it
            path.parent.rmdir()


def _write(path: Path, token: str) -> bool:
    """Whether the token could be kept. Where not, ``graphsplit status`` must be given it."""
    for _ in range(_TRIES):
        try:
            return _try_to_write(path, token)
        except (FileNotFoundError, FileExistsError):
            continue  # another job was the last one there, and took the folder with it
        except OSError:
            return False
    return False


def _try_to_write(path: Path, token: str) -> bool:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(path.parent):
        return False
    path.unlink(missing_ok=True)  # of a launcher that was killed
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(number, "w") as file:
        file.write(token)
    return True


def find_token(host: str, port: int) -> str:
    """The token of a job that this user has started at this address; empty if there is none."""
    path = _path(host, port)
    try:
        if not _is_private(path.parent):
            return ""
        return read_private_file("GS_JOB_TOKEN_FILE", str(path)).decode("ascii", errors="replace")
    except (ConfigurationError, OSError):
        return ""
