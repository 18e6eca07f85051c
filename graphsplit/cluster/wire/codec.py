"""Messages to bytes and back. Everything that arrives is checked here, before any state sees it.

A message is refused, with a reason, when it is not one, lacks a field, has a field this version
does not know, or breaks a bound: those that its type hints name. Nothing is unpickled.

A message is one JSON object, in one or more lines of which each has some of its entries::

    {"kind":"Ready","message":{"generation":2}}
    {"fence":{"job":"5f","generation":2,"incarnation":"c1","number":7}}

So a message to many is encoded once, and followed by the fence of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Generic, TypeVar, get_args

from graphsplit.cluster.wire.messages import (
    DIGEST_CHARS,
    Arrive,
    Fence,
    Formed,
    MeetingKind,
    Peer,
    SchedulerMessage,
    WorkerMessage,
)
from graphsplit.encoding import records
from graphsplit.encoding.fields import MessageError, choice

_Sent = TypeVar("_Sent")
_ENTRIES = {"kind", "message", "peers", "fence"}
_MOST_LINES = 3
_NO_MESSAGE = "the bytes are not a message of this protocol"


def _check_arrival(arrival: Arrive) -> None:
    if arrival.kind is MeetingKind.AGREEMENT and len(arrival.digest) != DIGEST_CHARS:
        raise MessageError(f"an agreement needs a SHA-256 digest of {DIGEST_CHARS} characters")
    if arrival.kind is not MeetingKind.FINISH and not arrival.name:
        raise MessageError("name is missing")


def _check_plan(formed: Formed) -> None:
    if formed.rank >= len(formed.peers):
        raise MessageError(f"rank {formed.rank} of {len(formed.peers)} workers")
    if any(one.rank >= next_one.rank for one, next_one in pairwise(formed.peers)):
        raise MessageError("the peers are not in the order of their ranks")


# Looks at several fields together.
_CHECKS: Mapping[type, Callable[[Any], None]] = {Arrive: _check_arrival, Formed: _check_plan}


class _Direction(Generic[_Sent]):
    """All messages of one side.

    Args:
        kinds: The dataclasses.
    """

    def __init__(self, kinds: Sequence[type]) -> None:
        self._kind = choice(kinds, "kind of message", lambda kind: kind.__name__)

    def encode(self, message: _Sent) -> bytes:
        """The bytes of a message, to be followed by those of its fence."""
        kind = type(message)
        return _line({"kind": self._kind.write(kind), "message": records.to_node(message)})

    def open(self, data: bytes) -> tuple[Fence, _Sent]:
        """The fence of a message, and the message.

        Raises:
            MessageError: The bytes are not a valid message.
        """
        entries = _entries(data)
        kind = self._kind.read(entries.get("kind"), "kind")
        node = entries.get("message")
        if isinstance(node, dict) and "peers" in entries:
            node["peers"] = entries["peers"]
        message = records.from_node(kind, node, what=kind.__name__)
        _CHECKS.get(kind, lambda _: None)(message)
        if "fence" not in entries:
            return Fence(), message
        return records.from_node(Fence, entries["fence"], what="fence"), message


def _line(entries: Mapping[str, Any]) -> bytes:
    return f"{records.dumps(entries)}\n".encode()


def _entries(data: bytes) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    *lines, rest = data.split(b"\n", _MOST_LINES)
    if rest or not lines:
        raise MessageError(_NO_MESSAGE if data else "the message is empty")
    for line in lines:
        part = records.loads(line, what="the message")
        if not isinstance(part, dict):
            raise MessageError(_NO_MESSAGE)
        entries.update(part)
    for name in entries.keys() - _ENTRIES:
        raise MessageError(f"the message: {name[:80]} is not expected")
    return entries


_WORKER = _Direction[WorkerMessage](get_args(WorkerMessage))
_SCHEDULER = _Direction[SchedulerMessage](get_args(SchedulerMessage))
encode_worker, open_worker = _WORKER.encode, _WORKER.open
encode_scheduler, open_scheduler = _SCHEDULER.encode, _SCHEDULER.open


def encode_fence(fence: Fence) -> bytes:
    """The fence of a message of either side, to be put behind the bytes of the message."""
    return _line({"fence": records.to_node(fence)})


def encode_plan(peers: Sequence[Peer]) -> bytes:
    """The part of ``Formed`` that is the same for all workers, to be put behind the rest."""
    return _line({"peers": [records.to_node(peer) for peer in peers]})
