"""Kinds of fields: each reads values that may come from anybody, within a bound.

A dataclass says with its type hints which kind each of its fields is, as ``Annotated``::

    name: Annotated[str, string(128, required=True)]
    watched: Annotated[tuple[int, ...], AtMost(64)]

A kind writes values of our own, which are trusted, and reads what arrived: it checks type and
bound, and raises ``MessageError`` with what is wrong. Nothing is cut to fit, and entries are
counted before they are looked at. ``records`` makes JSON of whole dataclasses, the cluster's codec
makes protobuf messages of them. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, get_args, get_origin


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


def of_type(*kinds: type) -> Field:
    """A value of one of these types, and of no other; for one that a format bounds well enough."""

    def read(raw: Any, name: str) -> Any:
        if type(raw) not in kinds:
            raise MessageError(f"{name} is {repr(raw)[:80]}, no {kinds[-1].__name__}")
        return raw

    return Field(read)


INT, BOOL, FLOAT, STR = of_type(int), of_type(bool), of_type(int, float), of_type(str)


def integer(lowest: int, highest: int) -> Field:
    """A number within bounds. One that nobody set is 0."""

    def read(raw: Any, name: str) -> int:
        found: int = INT.read(raw, name)
        if not lowest <= found <= highest:
            raise MessageError(f"{name} is {found}, not {lowest} to {highest}")
        return found

    return Field(read)


def number(lowest: float, highest: float) -> Field:
    """A number with a fraction, within bounds."""

    def read(raw: Any, name: str) -> float:
        found = float(FLOAT.read(raw, name))
        if not lowest <= found <= highest:
            raise MessageError(f"{name} is {found}, not {lowest:g} to {highest:g}")
        return found

    return Field(read)


def string(most: int, *, required: bool = False, lines: bool = False) -> Field:
    """A text.

    Args:
        most: How many characters it may have.
        required: Whether it must not be empty.
        lines: Whether it may have several lines.
    """

    def read(raw: Any, name: str) -> str:
        STR.read(raw, name)
        if required and not raw:
            raise MessageError(f"{name} is missing")
        if len(raw) > most:
            raise MessageError(f"{name} has {len(raw)} characters, more than {most}")
        # Names go into logs and errors: no line breaks or terminal codes from strangers.
        if not lines and not raw.isprintable():
            raise MessageError(f"{name} has characters that cannot be printed")
        return str(raw)

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
        if not isinstance(raw, (int, str)) or raw not in value_of:
            raise MessageError(f"the {what} {repr(raw)[:40]} is not known")
        return value_of[raw]

    return Field(read, raw_of)


@dataclass(frozen=True)
class AtMost:
    """Bounds how many entries a tuple or a mapping has."""

    most: int

    def of_tuple(self, item: Field) -> Field:
        """Values in order."""

        def read(raw: Any, name: str) -> tuple[Any, ...]:
            if isinstance(raw, (str, Mapping)) or not isinstance(raw, Sequence):
                raise MessageError(f"{name} is {repr(raw)[:80]}, no list")
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


def field_of(hint: Any, default: Any, plain: Callable[[Any, Any], Field]) -> Field:
    """The kind of field that a type hint names.

    Args:
        hint: The hint.
        default: The field's default; ``MISSING`` for none.
        plain: Gives the kind for a hint and a default where the hint itself names none.
    """
    if get_origin(hint) is Annotated:
        base, kind = get_args(hint)
        if isinstance(kind, Field):
            return kind
        items = [field_of(one, MISSING, plain) for one in get_args(base) if one is not ...]
        is_tuple = get_origin(base) is tuple
        made: Field = kind.of_tuple(*items) if is_tuple else kind.of_mapping(*items)
        return made
    if type(None) in get_args(hint):
        (given,) = (one for one in get_args(hint) if one is not type(None))
        return optional(field_of(given, MISSING, plain))
    return plain(hint, default)
