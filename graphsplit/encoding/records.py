"""Frozen dataclasses as JSON and back, by their type hints.

Whoever may have written the JSON, what is read is a value as the hints say: with all of its fields
and no others, each of its type and within the bound that ``Annotated`` names (see ``fields``)::

    @dataclass(frozen=True)
    class Host:
        workers: tuple[int, ...]
        cores: Annotated[int, integer(1, 1 << 20)]

    Host((0, 1), 2)    {"workers": [0, 1], "cores": 2}

Mappings whose keys are no texts are lists of pairs, members of an enumeration their names, bytes
hexadecimal.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from graphsplit.encoding.fields import (
    BOOL,
    AtMost,
    Field,
    MessageError,
    choice,
    field_of,
    integer,
    number,
    string,
)

_T = TypeVar("_T")
_MOST = AtMost(1 << 24)
_PLAIN: dict[Any, Field] = {
    int: integer(-(1 << 63), 1 << 64),
    bool: BOOL,
    float: number(float("-inf"), float("inf")),
    str: string(1 << 30, lines=True),
}


def to_node(value: Any) -> Any:
    """A value of our own, which is trusted, as JSON has it."""
    return _field(type(value)).write(value)


def from_node(kind: type[_T], node: Any, *, what: str = "it") -> _T:
    """The value of a dataclass from JSON that may come from anybody.

    Raises:
        MessageError: It is none; names the field.
    """
    return cast(_T, _field(kind).read(node, what))


def to_text(value: Any) -> str:
    """As ``to_node``, as one line."""
    return json.dumps(to_node(value), separators=(",", ":"))


def from_text(kind: type[_T], text: str | bytes, *, what: str = "it") -> _T:
    """As ``from_node``.

    Raises:
        MessageError: It is none; names the field.
    """
    try:
        node = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"{what} is no JSON: {error}") from None
    return from_node(kind, node, what=what)


def _field(hint: Any, default: Any = None) -> Field:
    """The kind of field that a type hint names by itself; a default makes no difference."""
    return _field_of(hint)


@cache
def _field_of(hint: Any) -> Field:
    if hint in _PLAIN:
        return _PLAIN[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return choice(hint, hint.__name__, lambda member: member.name)
    if dataclasses.is_dataclass(hint):
        return _record(cast(type, hint))
    origin = get_origin(hint)
    items = [field_of(one, None, _field) for one in get_args(hint) if one is not ...]
    if origin is tuple:
        return _MOST.of_tuple(*items) if len(items) == 1 else _fixed(items)
    if hint is bytes:
        return Field(_read_bytes, bytes.hex)
    if origin is Mapping:
        return _mapping(*items)
    raise TypeError(f"a field of type {hint} has no form in JSON")


def _record(kind: type) -> Field:
    hints = get_type_hints(kind, include_extras=True)
    fields = {
        one.name: field_of(hints[one.name], None, _field)
        for one in dataclasses.fields(cast(Any, kind))
    }

    def write(value: Any) -> dict[str, Any]:
        return {name: field.write(getattr(value, name)) for name, field in fields.items()}

    def read(raw: Any, what: str) -> Any:
        if not isinstance(raw, dict):
            raise MessageError(f"{what} is {repr(raw)[:80]}, no object")
        for name in [*(fields.keys() - raw.keys()), *(raw.keys() - fields.keys())]:
            problem = "is missing" if name in fields else "is not expected"
            raise MessageError(f"{what}: {name[:80]} {problem}")
        return kind(
            **{
                name: field.absent
                if field.may_lack and raw[name] is None
                else field.read(raw[name], f"{what}: {name}")
                for name, field in fields.items()
            }
        )

    return Field(read, write)


def _fixed(items: list[Field]) -> Field:
    """A tuple of so many values."""

    def read(raw: Any, name: str) -> tuple[Any, ...]:
        if not isinstance(raw, list) or len(raw) != len(items):
            raise MessageError(f"{name} is {repr(raw)[:80]}, no list of {len(items)} values")
        return tuple(item.read(one, name) for item, one in zip(items, raw, strict=True))

    return Field(read, lambda value: [i.write(v) for i, v in zip(items, value, strict=True)])


def _mapping(key: Field, value: Field) -> Field:
    pair = _fixed([key, value])

    def read(raw: Any, name: str) -> dict[Any, Any]:
        pairs = list(map(list, raw.items())) if isinstance(raw, dict) else raw
        if not isinstance(pairs, list):
            raise MessageError(f"{name} is {repr(raw)[:80]}, no mapping")
        return dict(pair.read(one, name) for one in pairs)

    def write(given: Mapping[Any, Any]) -> Any:
        if all(isinstance(one, str) for one in given):
            return {one: value.write(item) for one, item in given.items()}
        return [pair.write(item) for item in given.items()]

    return Field(read, write)


def _read_bytes(raw: Any, name: str) -> bytes:
    try:
        return bytes.fromhex(raw)
    except (TypeError, ValueError):
        raise MessageError(f"{name} is {repr(raw)[:80]}, no hexadecimal number") from None
