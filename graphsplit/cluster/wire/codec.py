"""Messages to bytes and back. Everything that arrives is checked here, before any state sees it.

A message is refused, with a reason, when it is not one, lacks a field, has a field this version
does not know, or breaks a bound: those that its type hints name, see ``fields``. Nothing is
unpickled. Messages travel as the protobuf messages of the same name, see cluster.proto.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Generic, TypeVar, cast, get_args, get_type_hints

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from graphsplit._proto import cluster_pb2 as pb
from graphsplit.cluster.wire.fields import (
    Host,
    Lines,
    PidOrNone,
    PlaceText,
    PositionText,
    Rank,
    RankOrNone,
    Traceback,
)
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
from graphsplit.encoding.fields import BOOL, INT, Field, MessageError, choice, field_of, optional
from graphsplit.root_cause import FailureCause, Location

_Value = TypeVar("_Value")
_Parsed = TypeVar("_Parsed", bound=Message)
_Sent = TypeVar("_Sent")

# The bounds of values that are not the cluster's own.
_FAILURE_KIND = choice(
    ("exception", "lost", "refused", "disagreement", "interrupted", "scheduler_lost", "timeout"),
    "kind of failure",
)
_HINTS: Mapping[type, Mapping[str, Any]] = {
    Location: {
        "instruction": PlaceText,
        "operation": PlaceText,
        "module": PlaceText,
        "source": PlaceText,
        "waits_for": Rank | None,
        "waits_what": PlaceText,
    },
    FailureCause: {
        "kind": Annotated[str, _FAILURE_KIND],
        "message": Lines,
        "rank": RankOrNone,
        "host": Host,
        "pid": PidOrNone,
        "position": PositionText,
        "traceback": Traceback,
    },
}


def _check_arrival(arrival: Arrive) -> None:
    if arrival.kind is MeetingKind.AGREEMENT and len(arrival.digest) != DIGEST_CHARS:
        raise MessageError(f"an agreement needs a SHA-256 digest of {DIGEST_CHARS} characters")
    if arrival.kind is not MeetingKind.FINISH and not arrival.name:
        raise MessageError("name is missing")


def _check_plan(formed: Formed) -> None:
    if formed.rank >= len(formed.peers):
        raise MessageError(f"rank {formed.rank} of {len(formed.peers)} workers")
    if any(peer.rank != rank for rank, peer in enumerate(formed.peers)):
        raise MessageError("the peers are not in the order of their ranks")


# Looks at several fields together.
_CHECKS: Mapping[type, Callable[[Any], None]] = {Arrive: _check_arrival, Formed: _check_plan}


class Layout(Generic[_Value]):
    """A frozen dataclass as a protobuf message, field by field. Get it from ``layout_of``.

    Args:
        value_type: The dataclass.
        message_type: The protobuf message, whose fields have the same names.

    Raises:
        TypeError: The names of the fields differ, or a field has no bound.
    """

    def __init__(self, value_type: type[_Value], message_type: Any) -> None:
        self._value_type = value_type
        self._message_type = message_type
        self._check = _CHECKS.get(value_type, lambda _: None)
        hints = {**get_type_hints(value_type, include_extras=True), **_HINTS.get(value_type, {})}
        if set(hints) != set(message_type.DESCRIPTOR.fields_by_name):
            raise TypeError(f"{value_type.__name__} and its message have different fields")
        self._fields = {
            name: field_of(hint, getattr(value_type, name, dataclasses.MISSING), _plain_field)
            for name, hint in hints.items()
        }

    def write(self, value: _Value) -> Any:
        """A value of our own, which is trusted, as a message."""
        return self._message_type(
            **{name: field.write(getattr(value, name)) for name, field in self._fields.items()}
        )

    def read(self, raw: Any) -> _Value:
        """The value of a message that arrived.

        Raises:
            MessageError: It breaks a bound.
        """
        value = self._value_type(
            **{
                name: field.absent
                if field.may_lack and not raw.HasField(name)
                else field.read(getattr(raw, name), name)
                for name, field in self._fields.items()
            }
        )
        self._check(value)
        return value

    def encode(self, value: _Value) -> bytes:
        """The bytes of a value."""
        return bytes(self.write(value).SerializeToString())

    def decode(self, data: bytes) -> _Value:
        """A value from bytes that may come from anybody.

        Raises:
            MessageError: They are not a valid one.
        """
        return self.read(_parse(self._message_type(), data))


@cache
def layout_of(value_type: type[_Value]) -> Layout[_Value]:
    """How values of a dataclass travel: as the protobuf message of the same name."""
    name = "Cause" if value_type is FailureCause else value_type.__name__
    return Layout(value_type, getattr(pb, name))


def _plain_field(hint: Any, default: Any) -> Field:
    if hint in (int, bool):  # their types in the proto file bound them well enough
        return INT if hint is int else BOOL
    if not dataclasses.is_dataclass(hint):
        raise TypeError(f"a field of type {hint} has no bound")
    layout = layout_of(cast(Any, hint))
    nested = Field(lambda raw, _: layout.read(raw), layout.write)
    return nested if default is dataclasses.MISSING else optional(nested, default)


def _parse(message: _Parsed, data: bytes) -> _Parsed:
    """Fill an empty message from bytes that may come from anybody.

    Raises:
        MessageError: They are no message, or have a field that this version does not know.
    """
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MessageError("the bytes are not a message of this protocol") from error
    _refuse_unknown_fields(message)
    return message


def _refuse_unknown_fields(message: Message) -> None:
    """Refuse a message from another version, at any depth."""
    if len(UnknownFieldSet(message)):
        name = message.DESCRIPTOR.name
        raise MessageError(f"{name} has a field that this version of graphsplit does not know")
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            _refuse_unknown_fields(part)


class _CauseAlone:
    """The layout of a message of nothing but a cause: it travels as the cause itself."""

    def __init__(self, value_type: Any) -> None:
        self._value_type = value_type

    def write(self, message: Any) -> Any:
        return layout_of(FailureCause).write(message.cause)

    def read(self, raw: Any) -> Any:
        return self._value_type(layout_of(FailureCause).read(raw))


class _Direction(Generic[_Sent]):
    """All messages of one side; the kind that protobuf notes says which of them one is.

    Args:
        message_type: The protobuf message, with a field for each kind: ``text_wanted`` for
            ``TextWanted``. One of nothing but a cause travels as the cause itself.
        kinds: The dataclasses.
    """

    def __init__(self, message_type: Any, kinds: Sequence[type]) -> None:
        self._message_type = message_type
        self._kind_of = {
            one: re.sub(r"(?<!^)(?=[A-Z])", "_", one.__name__).lower() for one in kinds
        }
        in_proto = message_type.DESCRIPTOR.fields_by_name
        self._layouts: dict[str, Any] = {
            kind: _CauseAlone(one)
            if in_proto[kind].message_type.name == "Cause"
            else layout_of(one)
            for one, kind in self._kind_of.items()
        }

    def encode(self, message: _Sent) -> bytes:
        """The bytes of a message, to be followed by those of its fence."""
        kind = self._kind_of[type(message)]
        raw = self._message_type(**{kind: self._layouts[kind].write(message)})
        return bytes(raw.SerializeToString())

    def open(self, data: bytes) -> tuple[Fence, _Sent]:
        """The fence of a message, and the message.

        Raises:
            MessageError: The bytes are not a valid message.
        """
        raw = _parse(self._message_type(), data)
        kind = raw.WhichOneof("kind")
        if kind is None:
            raise MessageError("the message is empty")
        return layout_of(Fence).read(raw.fence), self._layouts[kind].read(getattr(raw, kind))


_WORKER = _Direction[WorkerMessage](pb.WorkerMessage, get_args(WorkerMessage))
_SCHEDULER = _Direction[SchedulerMessage](pb.SchedulerMessage, get_args(SchedulerMessage))
encode_worker, open_worker = _WORKER.encode, _WORKER.open
encode_scheduler, open_scheduler = _SCHEDULER.encode, _SCHEDULER.open


def encode_fence(fence: Fence) -> bytes:
    """The fence of a message of either side, to be put behind the bytes of the message.

    A message of bytes that stand one behind the other is all of their fields together. So a
    message to many is encoded once.
    """
    return pb.SchedulerMessage(fence=layout_of(Fence).write(fence)).SerializeToString()


def encode_plan(peers: Sequence[Peer]) -> bytes:
    """The part of ``Formed`` that is the same for all workers, to be put behind the rest."""
    plan = pb.Formed(peers=[layout_of(Peer).write(peer) for peer in peers])
    return pb.SchedulerMessage(formed=plan).SerializeToString()
