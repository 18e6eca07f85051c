"""Kinds of fields: each reads values that may come from anybody, within a bound.

A dataclass says with its type hints which kind each of its fields is, as ``Annotated``::

    name: Annotated[str, string(128, required=True)]
    watched: Annotated[tuple[int, ...], AtMost(64)]

A kind writes values of our own, which are trusted, and reads what arrived: it checks type and
bound, and raises ``MessageError`` with what is wrong. Nothing is cut to fit, and entries are
counted before they are looked at. ``records`` makes JSON of whole dataclasses. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any


class MessageError(ValueError):
    """The bytes that arrived are not a valid message; the text says why."""


@dataclass(frozen=True)
class Field:
    """One kind of field.

    Attributes:
        read: Maps what arrived, and its name for errors, to the value; raises ``MessageError``.
        write: Maps a value to what JSON has for it.
    """

    read: Callable[[Any, str], Any]
    write: Callable[[Any], Any] = lambda value: value


def of_type(*kinds: type) -> Field:
    """A value of one of these types, and of no other; for one that a format bounds well enough."""

    def read(raw: Any, name: str) -> Any:
        if type(raw) not in kinds:
            raise MessageError(f"{name} is {repr(raw)[:80]}, no {kinds[-1].__name__}")
        return raw

    return Field(read)


_SURROGATE = re.compile("[\ud800-\udfff]")
INT, BOOL, FLOAT, STR = of_type(int), of_type(bool), of_type(int, float), of_type(str)


def integer(lowest: int, highest: int) -> Field:
    """A number within bounds."""

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
        if _SURROGATE.search(raw):
            raise MessageError(f"{name} has halves of characters")
        return str(raw)

    return Field(read)


def chunk(most: int) -> Field:
    """At most so many bytes; written as a hexadecimal number."""

    def read(raw: Any, name: str) -> bytes:
        STR.read(raw, name)
        if len(raw) > 2 * most:
            raise MessageError(f"{name} has {len(raw) // 2} bytes, more than {most}")
        try:
            return bytes.fromhex(raw)
        except ValueError:
            raise MessageError(f"{name} is {repr(raw)[:80]}, no hexadecimal number") from None

    return Field(read, bytes.hex)


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


def fixed(*items: Field) -> Field:
    """A tuple of so many values."""

    def read(raw: Any, name: str) -> tuple[Any, ...]:
        if not isinstance(raw, list) or len(raw) != len(items):
            raise MessageError(f"{name} is {repr(raw)[:80]}, no list of {len(items)} values")
        return tuple(item.read(one, name) for item, one in zip(items, raw, strict=True))

    return Field(read, lambda value: [i.write(v) for i, v in zip(items, value, strict=True)])


@dataclass(frozen=True)
class AtMost:
    """Bounds how many entries a tuple or a mapping has."""

    most: int

    def of_tuple(self, item: Field) -> Field:
        """Values in order."""

        def read(raw: Any, name: str) -> tuple[Any, ...]:
            if not isinstance(raw, list):
                raise MessageError(f"{name} is {repr(raw)[:80]}, no list")
            self._check(raw, name)
            return tuple(item.read(one, f"{name}: an entry") for one in raw)

        return Field(read, lambda values: [item.write(one) for one in values])

    def of_mapping(self, key: Field, value: Field) -> Field:
        """Values by key: an object, or a list of pairs where not all keys are texts."""
        pair = fixed(key, value)

        def read(raw: Any, name: str) -> dict[Any, Any]:
            if not isinstance(raw, (list, dict)):
                raise MessageError(f"{name} is {repr(raw)[:80]}, no mapping")
            self._check(raw, name)
            if isinstance(raw, list):
                return dict(pair.read(one, name) for one in raw)
            return {
                key.read(each, f"{name}: a key"): value.read(one, f"{name}[{repr(each)[:42]}]")
                for each, one in raw.items()
            }

        def write(given: Mapping[Any, Any]) -> Any:
            if all(isinstance(one, str) for one in given):
                return {one: value.write(item) for one, item in given.items()}
            return [pair.write(item) for item in given.items()]

        return Field(read, write)

    def _check(self, raw: Sized, name: str) -> None:
        if len(raw) > self.most:
            raise MessageError(f"{name} has {len(raw)} entries, more than {self.most}")


def optional(field: Field) -> Field:
    """A field that may be None."""
    return Field(
        lambda raw, name: None if raw is None else field.read(raw, name),
        lambda value: None if value is None else field.write(value),
    )
