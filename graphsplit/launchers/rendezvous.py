"""Where rank 0 leaves for the others what they cannot know: the scheduler's port, and the secret.

On one host that is a file of this user's own, mode 0600, which rank 0 holds a lock on: what a
killed one left is nobody's. Between hosts only the port is told, never the secret: a shared folder
and torchrun's store are read by whoever reaches them.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from graphsplit.encoding import records
from graphsplit.encoding.fields import MessageError
from graphsplit.errors import ConfigurationError
from graphsplit.launchers.environment import IN_WORDS, Found
from graphsplit.security.held_files import HeldFile, NotOwnFolderError, read_held
from graphsplit.security.private_files import open_to_read, own_folder, replace_file

_LOOK_AGAIN_S = 0.05
_MAX_BYTES = 4096


@dataclass(frozen=True)
class Whereabouts:
    """The words of rank 0 to the others.

    Attributes:
        port: The scheduler's port.
        token: The job's secret; empty where all have it already.
    """

    port: int
    token: str = ""


class RendezvousPlace(Protocol):
    """Takes what rank 0 says, and tells it to the others."""

    def tell(self, said: Whereabouts) -> None:
        """Leave it for the others."""

    def look(self) -> Whereabouts | None:
        """The words of rank 0; None while it has left none."""

    def close(self) -> None:
        """Take it away."""


def _name(found: Found) -> str:
    about = f"{found.launcher} {found.job or f'{found.host}:{found.port}'} {found.num_workers}"
    return hashlib.sha256(about.encode()).hexdigest()[:32]


class OwnFile:
    """A file that this user alone can read, for processes of one host."""

    def __init__(self, found: Found) -> None:
        self._path = own_folder() / f"{_name(found)}.job"
        self._kept: HeldFile | None = None

    def tell(self, said: Whereabouts) -> None:
        """See ``RendezvousPlace.tell``. It is held as long as this process runs."""
        try:
            self._kept = HeldFile(self._path, records.to_text(said).encode())
        except NotOwnFolderError as error:
            raise ConfigurationError(
                f"{error}, and the job's secret must not lie in it\n"
                f"  Fix: set XDG_RUNTIME_DIR to a folder of this user's, of mode 0700"
            ) from None

    def look(self) -> Whereabouts | None:
        """See ``RendezvousPlace.look``."""
        content = read_held(self._path)
        return None if content is None else _read(content)

    def close(self) -> None:
        """Take it away."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.take_away()


class SharedFolder:
    """``GS_RENDEZVOUS_DIR``: a folder that all hosts see."""

    def __init__(self, found: Found, folder: str) -> None:
        self._path = Path(folder) / f"graphsplit-{_name(found)}.port"

    def tell(self, said: Whereabouts) -> None:
        """See ``RendezvousPlace.tell``."""
        try:
            replace_file(self._path, records.to_text(said).encode())
        except OSError as error:
            raise ConfigurationError(
                f"GS_RENDEZVOUS_DIR={str(self._path.parent)!r} takes no file: {error.strerror}\n"
                f"  Fix: name a folder that all hosts see, and this user can write to"
            ) from None

    def look(self) -> Whereabouts | None:
        """See ``RendezvousPlace.look``."""
        try:
            with open_to_read(self._path) as file:
                return _read(file.read(_MAX_BYTES))
        except OSError:
            return None

    def close(self) -> None:
        """Take it away."""
        self._path.unlink(missing_ok=True)


class TorchStore:
    """The store that torchrun's agent keeps for its processes."""

    def __init__(self, found: Found) -> None:
        import torch.distributed as dist

        self._key = f"graphsplit/{_name(found)}"
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]  # not in its stubs
            found.host, found.port, is_master=False, wait_for_workers=False
        )

    def tell(self, said: Whereabouts) -> None:
        """See ``RendezvousPlace.tell``."""
        self._store.set(self._key, records.to_text(said))

    def look(self) -> Whereabouts | None:
        """See ``RendezvousPlace.look``."""
        return _read(self._store.get(self._key)) if self._store.check([self._key]) else None

    def close(self) -> None:
        """Nothing: it goes when the agent does."""


def wait_for(
    place: RendezvousPlace,
    found: Found,
    *,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Whereabouts:
    """The words of rank 0; waits for them.

    Raises:
        ConfigurationError: It left nothing in time, or the launcher has ended.
    """
    parent, end_s = os.getppid(), clock() + limit_s
    while (said := place.look()) is None:
        if os.getppid() != parent:
            raise ConfigurationError(
                f"{IN_WORDS[found.launcher]} has ended; so does rank {found.rank}"
            )
        if clock() >= end_s:
            raise ConfigurationError(
                f"rank 0 of {IN_WORDS[found.launcher]} did not say where its scheduler is within "
                f"{limit_s:g} s (MS_TOPO_TIMEOUT)\n  Fix: look at the output of rank 0; it calls "
                f"gs.init() too"
            )
        sleep(_LOOK_AGAIN_S)
    return said


def _read(text: bytes) -> Whereabouts | None:
    try:
        return records.from_text(Whereabouts, text, what="what rank 0 said")
    except MessageError:
        return None  # it is still being written
