"""What a worker says about itself, and where it is, in forms that fit the protocol's bounds."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from graphsplit.cluster import limits
from graphsplit.cluster.text import cut_end, cut_middle, encodable
from graphsplit.errors import (
    FrameError,
    JobFailedError,
    MembershipChangedError,
    ReceiveTimeoutError,
    TransportError,
)
from graphsplit.failure import FailureCause


@dataclass(frozen=True)
class NodeIdentity:
    """What decides whether this worker fits the others.

    Attributes:
        versions: What must be equal everywhere: ``{"graphsplit": "0.1.0", "torch": "2.13.0",
            "python": "3.11"}``. The scheduler compares every entry, whatever its name.
        script_digest: SHA-256 of the user's script in hexadecimal; empty if there is no file.
        num_threads: Threads of one operation. A difference changes bits, so it is reported.
        cpu_capability: Instruction set of the kernels. A difference is reported likewise.
        seed: The seed that the script set itself; None if it set none.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    script_digest: str = ""
    num_threads: int = 0
    cpu_capability: str = ""
    seed: int | None = None


def _nowhere() -> str:
    return ""


class Position:
    """Where this worker is. Written by the computing thread, read once a second by another.

    Both attributes are plain writes without a lock: ``progress += 1`` has one writer, and
    ``text_source`` is called only when a heartbeat is due, so it may be slow.
    """

    __slots__ = ("progress", "text_source")

    def __init__(self) -> None:
        self.progress: int = 0
        self.text_source: Callable[[], str] = _nowhere

    def text(self) -> str:
        """The position in words; empty if the source has none, or fails."""
        try:
            return cut_end(encodable(str(self.text_source())), limits.MAX_POSITION_CHARS)
        except Exception:  # a position that cannot be told must not end the job
            return ""


def failure_kind(error: BaseException) -> str:
    """The kind of ``FailureCause`` of an error that ended this worker's part.

    An error about a peer (a link that broke, a value that never came) is second-hand: the
    scheduler prefers what the peer itself has to say, or that it is gone.
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, ReceiveTimeoutError):
        return "timeout"
    if isinstance(error, TransportError) and not isinstance(error, FrameError):
        return "lost"
    return "exception"


def failure_of(
    error: BaseException, *, rank: int, host: str, pid: int, position: str
) -> FailureCause | None:
    """The failure that an error means, or None if it only echoes the end of the job."""
    if isinstance(error, (JobFailedError, MembershipChangedError)):
        return None
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    lines = summary.splitlines() or [type(error).__name__]
    return FailureCause(
        kind=failure_kind(error),
        message=lines[0],
        rank=rank,
        host=host,
        pid=pid,
        position=position,
        traceback="".join(traceback.format_exception(type(error), error, error.__traceback__)),
    )


def bounded(cause: FailureCause) -> FailureCause:
    """The cause cut to what one message may hold; both ends of a long traceback are kept."""
    return FailureCause(
        kind=cause.kind,
        message=cut_middle(encodable(cause.message), limits.MAX_MESSAGE_CHARS),
        rank=cause.rank,
        host=cut_end(encodable(cause.host), limits.MAX_HOST_CHARS),
        pid=cause.pid,
        position=cut_end(encodable(cause.position), limits.MAX_POSITION_CHARS),
        traceback=cut_middle(encodable(cause.traceback), limits.MAX_TRACEBACK_CHARS),
    )


def text_chunks(text: bytes) -> list[bytes]:
    """The text in pieces of a size for one message; what is beyond the limit is left out."""
    text = text[: limits.MAX_TEXT_BYTES]
    size = limits.TEXT_CHUNK_BYTES
    return [text[start : start + size] for start in range(0, len(text), size)] or [b""]
