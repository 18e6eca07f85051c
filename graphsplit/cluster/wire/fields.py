"""Kinds of fields in messages: each reads values that may come from anybody, within a bound.

A message says with its type hints which kind each of its fields is, as ``Annotated``::

    name: NeededName
    watched: Annotated[tuple[Rank, ...], AtMost(limits.MAX_WATCHED)]

A kind writes values of our own, which are trusted, and reads what arrived: it checks the bound, and
raises ``MessageError`` with what is wrong. Nothing is cut to fit, and entries are counted before
they are looked at. ``codec`` makes whole messages of them. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from graphsplit.cluster.wire import limits
from graphsplit.settings import RECOVERY_POLICIES

_MAX_PID = (1 << 31) - 1


class MessageError(ValueError):
    """The bytes that arrived are not a valid message; the text says why."""


@dataclass(frozen=True)
class Field:
    """One kind of field.

    Attributes:
        read: Maps what arrived, and its name for errors, to the value; raises ``MessageError``.
        write: Maps a value to what protobuf takes; None leaves the field out.
        may_lack: Whether a message may lack the field. Else it reads as empty, 0 or false.
        absent: The value where it does.
    """

    read: Callable[[Any, str], Any]
    write: Callable[[Any], Any] = lambda value: value
    may_lack: bool = False
    absent: Any = None


ANY = Field(lambda raw, _: raw)
"""A number or a truth value that its type in the proto file bounds well enough."""


def integer(lowest: int, highest: int) -> Field:
    """A number within bounds. One that nobody set is 0."""

    def read(raw: int, name: str) -> int:
        if not lowest <= raw <= highest:
            raise MessageError(f"{name} is {raw}, not {lowest} to {highest}")
        return raw

    return Field(read)


def _read_seconds(raw: float, name: str) -> float:
    if not math.isfinite(raw) or raw < 0:
        raise MessageError(f"{name} is {raw} seconds")
    return raw


def string(most: int, *, required: bool = False, lines: bool = False) -> Field:
    """A text.

    Args:
        most: How many characters it may have.
        required: Whether it must not be empty.
        lines: Whether it may have several lines.
    """

    def read(raw: str, name: str) -> str:
        if required and not raw:
            raise MessageError(f"{name} is missing")
        if len(raw) > most:
            raise MessageError(f"{name} has {len(raw)} characters, more than {most}")
        # Names go into logs and errors: no line breaks or terminal codes from strangers.
        if not lines and not raw.isprintable():
            raise MessageError(f"{name} has characters that cannot be printed")
        return raw

    return Field(read)


def chunk(most: int) -> Field:
    """At most so many bytes."""

    def read(raw: bytes, name: str) -> bytes:
        if len(raw) > most:
            raise MessageError(f"{name} has {len(raw)} bytes, more than {most}")
        return raw

    return Field(read)


def choice(
    values: Iterable[Any], what: str, raw_of: Callable[[Any], Any] = lambda value: value
) -> Field:
    """One of a few values.

    Args:
        values: The values.
        what: Their name in errors.
        raw_of: Gives what stands for a value in a message.
    """
    value_of = {raw_of(value): value for value in values}

    def read(raw: Any, _: str) -> Any:
        if raw not in value_of:
            raise MessageError(f"the {what} {repr(raw)[:40]} is not known")
        return value_of[raw]

    return Field(read, raw_of)


@dataclass(frozen=True)
class AtMost:
    """Bounds how many entries a tuple or a mapping has."""

    most: int

    def of_tuple(self, item: Field) -> Field:
        """Values in order."""

        def read(raw: Sequence[Any], name: str) -> tuple[Any, ...]:
            self._check(raw, name)
            return tuple(item.read(one, f"an entry of {name}") for one in raw)

        return Field(read, lambda values: [item.write(one) for one in values])

    def of_mapping(self, key: Field, value: Field) -> Field:
        """Values by key."""

        def read(raw: Mapping[Any, Any], name: str) -> dict[Any, Any]:
            self._check(raw, name)
            return {
                key.read(each, f"a key of {name}"): value.read(one, f"{name}[{repr(each)[:42]}]")
                for each, one in raw.items()
            }

        return Field(read)

    def _check(self, raw: Mapping[Any, Any] | Sequence[Any], name: str) -> None:
        if len(raw) > self.most:
            raise MessageError(f"{name} has {len(raw)} entries, more than {self.most}")


def optional(field: Field, absent: Any = None) -> Field:
    """A field that a message lacks where its value is ``absent``."""

    def write(value: Any) -> Any:
        return None if value == absent else field.write(value)

    return Field(field.read, write, may_lack=True, absent=absent)


# The kinds that several messages have.

Name = Annotated[str, string(limits.MAX_NAME_CHARS)]
NeededName = Annotated[str, string(limits.MAX_NAME_CHARS, required=True)]
NodeId = Annotated[str, string(limits.MAX_NODE_ID_CHARS)]
NeededNodeId = Annotated[str, string(limits.MAX_NODE_ID_CHARS, required=True)]
Incarnation = Annotated[str, string(limits.MAX_INCARNATION_CHARS)]
NeededIncarnation = Annotated[str, string(limits.MAX_INCARNATION_CHARS, required=True)]
Host = Annotated[str, string(limits.MAX_HOST_CHARS)]
NeededHost = Annotated[str, string(limits.MAX_HOST_CHARS, required=True)]
PlaceText = Annotated[str, string(limits.MAX_PLACE_CHARS)]
PositionText = Annotated[str, string(limits.MAX_POSITION_CHARS, lines=True)]
Lines = Annotated[str, string(limits.MAX_MESSAGE_CHARS, lines=True)]
Traceback = Annotated[str, string(limits.MAX_TRACEBACK_CHARS, lines=True)]
Rank = Annotated[int, integer(0, limits.MAX_WORKERS - 1)]
RankOrNone = Annotated[int, integer(-1, limits.MAX_WORKERS - 1)]
Pid = Annotated[int, integer(1, _MAX_PID)]
PidOrNone = Annotated[int, integer(0, _MAX_PID)]
FromOne = Annotated[int, integer(1, (1 << 32) - 1)]
Seconds = Annotated[float, Field(_read_seconds)]
RecoveryPolicy = Annotated[str, choice(RECOVERY_POLICIES, "recovery policy")]
Endpoints = Annotated[
    Mapping[NeededName, Annotated[str, string(limits.MAX_ENDPOINT_CHARS)]],
    AtMost(limits.MAX_ENDPOINTS),
]
Versions = Annotated[
    Mapping[NeededName, Annotated[str, string(limits.MAX_VERSION_CHARS)]],
    AtMost(limits.MAX_VERSIONS),
]
