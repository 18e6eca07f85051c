"""The end of a gRPC stream, and its reason, from gRPC's status and words. Pure.

gRPC reports a peer that has left, one that refuses, and one from which nothing comes back alike:
as ``UNAVAILABLE``, and a few words. The last one is out of reach though nobody may have ended, so
it is told apart: it ends both directions, and whatever else runs beside the stream.
"""

from __future__ import annotations

from dataclasses import dataclass

# What gRPC says when its pings, the kernel's limit, or an attempt to connect ran out of time; and
# when this host knows of no way to the other one.
_SILENT = ("timed out", "timeout", "no route to host", "unreachable", "host is down")
# What only somebody who is there can do.
_ANSWERED = ("refused", "reset", "socket closed", "goaway")


@dataclass(frozen=True)
class StreamEnd:
    """The reason why nothing more comes.

    Attributes:
        reason: In words.
        is_silence: Whether the peer is out of reach, rather than gone.
    """

    reason: str
    is_silence: bool = False


CLOSED = StreamEnd("closed its end")
BROKEN = StreamEnd("the connection to it broke")


def out_of_reach(silence_s: float) -> StreamEnd:
    """The end of a stream from which nothing came back."""
    return StreamEnd(
        f"nothing came back from it for {silence_s:g} s (see MS_NODE_TIMEOUT), so it is frozen, or "
        f"the network between the two is cut",
        is_silence=True,
    )


def is_silence(detail: str) -> bool:
    """Whether an attempt or a stream ended because nothing came back."""
    words = detail.lower()
    return any(word in words for word in _SILENT)


def end_of(status: str, detail: str, silence_s: float) -> StreamEnd:
    """The end of a stream that had begun."""
    if is_silence(detail):
        return out_of_reach(silence_s)
    return StreamEnd(f"{status.lower()}: {detail}")


class Patience:
    """For how long nothing has come back from a peer that is yet to be reached.

    Args:
        silence_s: How long that may last.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._since: float | None = None

    def is_over(self, detail: str, began: float, now: float) -> bool:
        """Take in a failed attempt; whether another one is of no use.

        Args:
            detail: What gRPC said.
            began: When the attempt began.
            now: When it failed.
        """
        if any(word in detail.lower() for word in _ANSWERED):
            self._since = None  # not there yet, or full; but something answers
            return False
        self._since = began if self._since is None else self._since
        return now - self._since >= self._silence_s
