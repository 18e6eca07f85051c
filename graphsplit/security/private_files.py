"""Files that hold secrets: read only if nobody else can read them, written so that nobody can."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

from graphsplit.errors import ConfigurationError

MAX_FILE_BYTES = 1 << 20
PART = ".part"  # ends the name of a file that is being written
NEW_TOKEN = "(umask 077; python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > job-token)"


def read_file(variable: str, path: str) -> bytes:
    """The content of a file that a variable names.

    Raises:
        ConfigurationError: It cannot be read, or is no such file.
    """
    content, _ = _read(variable, path)
    return content


def read_private_file(variable: str, path: str) -> bytes:
    """The content of a file that holds a secret.

    A group may read what root owns: so container systems hand out secrets.

    Raises:
        ConfigurationError: It cannot be read, or others can read it as well.
    """
    content, status = _read(variable, path)
    mode = stat.S_IMODE(status.st_mode)
    allowed = 0o740 if status.st_uid == 0 else 0o700
    if mode & ~allowed & 0o777:
        raise ConfigurationError(
            f"{variable}={path!r} holds a secret, and others than its owner may use the file: its "
            f"mode is {mode:04o}\n    expected: 0600\n    Fix: chmod 600 {path}"
        )
    return content


def _read(variable: str, path: str) -> tuple[bytes, os.stat_result]:
    try:
        with open(path, "rb") as file:
            # Of the open file, not of the path: they may differ by now.
            return file.read(MAX_FILE_BYTES), os.fstat(file.fileno())
    except OSError as error:
        makes = "`graphsplit certs` makes certificates and keys"
        if variable == "GS_JOB_TOKEN_FILE":
            makes = f"a token is made by: {NEW_TOKEN}"
        raise ConfigurationError(
            f"{variable}={path!r} cannot be read: {error.strerror}\n"
            f"    expected: a file that this process's user can read\n"
            f"    Fix: mend the path; {makes}"
        ) from None


def open_to_read(path: Path) -> BinaryIO:
    """Open a file of a folder that others may write into; a pipe in its place would never end.

    Raises:
        OSError: It cannot be opened, or is no file.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(number, "rb")


def own_folder() -> Path:
    """Where this user's processes on this machine leave secrets for each other."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    base = Path(runtime) if runtime and Path(runtime).is_dir() else Path(tempfile.gettempdir())
    return base / f"graphsplit-{os.getuid()}"


def is_private(folder: Path) -> bool:
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


def write_new_file(path: Path, content: bytes, *, mode: int) -> None:
    """Write a file that was not there; nobody else can open it in between.

    Raises:
        FileExistsError: It is there.
    """
    with open_new_file(path, mode=mode) as file:
        file.write(content)


def open_new_file(path: Path, *, mode: int = 0o600, buffering: int = -1) -> BinaryIO:
    """Make a file that was not there, and open it for writing.

    Raises:
        FileExistsError: It is there, or a link is.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return open(os.open(path, flags, mode), "wb", buffering)


def open_instead(path: Path, *, mode: int = 0o600, buffering: int = -1) -> BinaryIO:
    """Open a new file in the place of what an earlier writer left, a planted link included.

    In a folder that others write into, a link may stand there again at once: that is an error.

    Raises:
        OSError: It cannot be made.
    """
    path.unlink(missing_ok=True)
    return open_new_file(path, mode=mode, buffering=buffering)


def replace_file(path: Path, *pieces: bytes | memoryview) -> None:
    """Replace a file as a whole, durably.

    Raises:
        OSError: The write failed; what was there before is still there.
    """
    part = path.with_name(path.name + PART)
    try:
        with open_instead(part) as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def put_in_place(part: Path, path: Path) -> None:
    """Give a file that is whole on disk its name, and make that durable where the system can."""
    os.replace(part, path)
    with contextlib.suppress(OSError):  # some file systems refuse to sync a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
