"""How the values of this package travel in protobuf messages, field by field.

A ``Layout`` says of a frozen dataclass which protobuf message it travels as, and of each attribute
which kind of field it is. A field writes values of our own, which are trusted, and reads values
that may come from anybody: it checks their bound, and raises ``MessageError`` with what is wrong.
Nothing is cut to fit, nothing is unpickled, and entries are counted before they are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar, cast

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

_Value = TypeVar("_Value")
_Parsed = TypeVar("_Parsed", bound=Message)


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


def seconds() -> Field:
    """A length of time."""

    def read(raw: float, name: str) -> float:
        if not math.isfinite(raw) or raw < 0:
            raise MessageError(f"{name} is {raw} seconds")
        return raw

    return Field(read)


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


def mapping(key: Field, value: Field, most: int) -> Field:
    """At most so many values by key."""

    def read(raw: Mapping[Any, Any], name: str) -> dict[Any, Any]:
        _check_count(raw, name, most)
        return {
            key.read(each, f"a key of {name}"): value.read(one, f"{name}[{repr(each)[:42]}]")
            for each, one in raw.items()
        }

    return Field(read)


def repeated(item: Field, most: int, what: str) -> Field:
    """At most so many values, in order; ``what`` is one of them, for errors."""

    def read(raw: Sequence[Any], name: str) -> tuple[Any, ...]:
        _check_count(raw, name, most)
        return tuple(item.read(one, what) for one in raw)

    return Field(read, lambda values: [item.write(one) for one in values])


def _check_count(raw: Mapping[Any, Any] | Sequence[Any], name: str, most: int) -> None:
    if len(raw) > most:
        raise MessageError(f"{name} has {len(raw)} entries, more than {most}")


def optional(field: Field, absent: Any = None) -> Field:
    """A field that a message lacks where its value is ``absent``."""

    def write(value: Any) -> Any:
        return None if value == absent else field.write(value)

    return Field(field.read, write, may_lack=True, absent=absent)


class Layout(Generic[_Value]):
    """A frozen dataclass, and the protobuf message that it travels as.

    Args:
        value_type: The dataclass.
        message_type: The protobuf message, whose fields have the same names.
        check: Looks at several attributes together; raises ``MessageError``.
        kinds: The kind of each field.

    Attributes:
        value_type: The dataclass.
        nested: The field that holds such a message in another one.

    Raises:
        TypeError: The names in the three differ.
    """

    def __init__(
        self,
        value_type: type[_Value],
        message_type: Any,
        check: Callable[[_Value], None] = lambda _: None,
        **kinds: Field,
    ) -> None:
        self.value_type = cast(Any, value_type)
        self._message_type = message_type
        self.nested = Field(lambda raw, _: self.read(raw), self.write)
        self._check = check
        self._kinds = kinds
        names = {one.name for one in fields(self.value_type)}
        if not names == set(kinds) == set(self._message_type.DESCRIPTOR.fields_by_name):
            raise TypeError(f"the layout of {self.value_type.__name__} lacks a field, or has more")

    def write(self, value: _Value) -> Any:
        """A value as a message."""
        kinds = self._kinds.items()
        return self._message_type(**{name: one.write(getattr(value, name)) for name, one in kinds})

    def read(self, raw: Any) -> _Value:
        """The value of a message.

        Raises:
            MessageError: It breaks a bound.
        """
        values = {
            name: one.absent
            if one.may_lack and not raw.HasField(name)
            else one.read(getattr(raw, name), name)
            for name, one in self._kinds.items()
        }
        value: _Value = self.value_type(**values)
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
        return self.read(parse(self._message_type(), data))


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
