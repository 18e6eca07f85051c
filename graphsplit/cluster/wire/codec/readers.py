"""Values that arrived, each read within its bound: the one place where ``limits`` are kept.

A reader returns the value as it came, or raises ``MessageError`` with what is wrong about it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from graphsplit.cluster.wire import limits
from graphsplit.settings import RECOVERY_POLICIES

_MAX_PID = (1 << 31) - 1
_Parsed = TypeVar("_Parsed", bound=Message)


class MessageError(ValueError):
    """What arrived is not a valid message; the text says why."""


# Whole messages.


def parse(message: _Parsed, data: bytes) -> _Parsed:
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


def kind_of(message: Message) -> str:
    """Which of its kinds a message is."""
    kind: str | None = message.WhichOneof("kind")
    if kind is None:
        raise MessageError("the message is empty")
    return kind


# Texts.


def read_text(
    value: str, name: str, most: int, *, required: bool = False, lines: bool = False
) -> str:
    """A text.

    Args:
        value: The text.
        name: What it is, for the message.
        most: How many characters it may have.
        required: Whether it must not be empty.
        lines: Whether it may have several lines.
    """
    if required and not value:
        raise MessageError(f"{name} is missing")
    if len(value) > most:
        raise MessageError(f"{name} has {len(value)} characters, more than {most}")
    # Names go into logs and errors: no line breaks or terminal codes from strangers.
    if not lines and not value.isprintable():
        raise MessageError(f"{name} has characters that cannot be printed")
    return value


def read_name(value: str, name: str, *, required: bool = False) -> str:
    """A short name: of a job, a phase, a meeting."""
    return read_text(value, name, limits.MAX_NAME_CHARS, required=required)


def read_node_id(value: str, *, required: bool = False) -> str:
    """The name that a worker goes by before it has a rank."""
    return read_text(value, "node_id", limits.MAX_NODE_ID_CHARS, required=required)


def read_incarnation(value: str, *, required: bool = False) -> str:
    """Which life of a process this is."""
    return read_text(value, "incarnation", limits.MAX_INCARNATION_CHARS, required=required)


def read_host(value: str, *, required: bool = False) -> str:
    """The name of a machine."""
    return read_text(value, "host", limits.MAX_HOST_CHARS, required=required)


def read_position(value: str) -> str:
    """Where a worker is, in words, on as many lines as it takes."""
    return read_text(value, "position", limits.MAX_POSITION_CHARS, lines=True)


def read_lines(value: str, name: str) -> str:
    """What is told to a person, on as many lines as it takes."""
    return read_text(value, name, limits.MAX_MESSAGE_CHARS, lines=True)


def read_recovery(name: str) -> str:
    """A recovery policy."""
    if name not in RECOVERY_POLICIES:
        raise MessageError("the recovery policy is not known")
    return name


# Texts by name.


def read_versions(raw: Mapping[str, str]) -> dict[str, str]:
    """The versions of what a worker runs."""
    return _map(raw, "versions", limits.MAX_VERSIONS, limits.MAX_VERSION_CHARS)


def read_endpoints(raw: Mapping[str, str]) -> dict[str, str]:
    """Where a worker can be reached."""
    return _map(raw, "endpoints", limits.MAX_ENDPOINTS, limits.MAX_ENDPOINT_CHARS)


def _map(raw: Mapping[str, str], name: str, most: int, most_chars: int) -> dict[str, str]:
    if len(raw) > most:
        raise MessageError(f"{name} has {len(raw)} entries, more than {most}")
    return {
        read_name(key, f"a key of {name}", required=True): read_text(
            value, f"{name}[{key[:40]!r}]", most_chars
        )
        for key, value in raw.items()
    }


# Numbers.


def read_rank(value: int) -> int:
    """A rank of some job."""
    if value >= limits.MAX_WORKERS:
        raise MessageError(f"rank is {value}, not 0 to {limits.MAX_WORKERS - 1}")
    return value


def read_pid(value: int, *, lowest: int) -> int:
    """The number of a process."""
    if not lowest <= value <= _MAX_PID:
        raise MessageError(f"pid is {value}, not {lowest} to {_MAX_PID}")
    return value


def read_generation(value: int) -> int:
    """A generation of a job, which has begun."""
    return _from_one(value, "generation")


def read_attempt(value: int) -> int:
    """Which attempt to register this is."""
    return _from_one(value, "number of the attempt")


def read_meeting(value: int) -> int:
    """Which meeting of its kind this is."""
    return _from_one(value, "number of the meeting")


def _from_one(value: int, what: str) -> int:
    """A count from 1: that of a field which nobody set is 0."""
    if value < 1:
        raise MessageError(f"the {what} is missing")
    return value


def read_seconds(value: float) -> float:
    """A length of time."""
    if not math.isfinite(value) or value < 0:
        raise MessageError(f"{value} seconds")
    return value
