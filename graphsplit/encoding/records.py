"""Frozen dataclasses as JSON and back, by their type hints.

Whoever may have written the JSON, what is read is a value as the hints say: with all of its fields
and no others, each of its type and within the bound that ``Annotated`` names (see ``fields``)::

    @dataclass(frozen=True)
    class Host:
        workers: tuple[int, ...]
        cores: Annotated[int, integer(1, 1 << 20)]

    Host((0, 1), 2)    {"workers": [0, 1], "cores": 2}

Mappings whose keys are no texts are lists of pairs, ranges their ends, members of an enumeration
their names, bytes hexadecimal.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from graphsplit.encoding.fields import (
    BOOL,
    INT,
    STR,
    AtMost,
    Field,
    MessageError,
    choice,
    chunk,
    fixed,
    integer,
    number,
    optional,
)

_T = TypeVar("_T")
_MOST = AtMost(1 << 24)
_ENDS = fixed(INT, INT)
_PLAIN: dict[Any, Field] = {
    int: integer(-(1 << 63), 1 << 64),
    bool: BOOL,
    float: number(float("-inf"), float("inf")),
    str: STR,
    bytes: chunk(1 << 30),
    Path: Field(lambda raw, name: Path(STR.read(raw, name)), str),
    range: Field(lambda raw, name: range(*_ENDS.read(raw, name)), lambda of: [of.start, of.stop]),
    Any: Field(lambda raw, _: raw),  # JSON as it is
}


def to_node(value: Any) -> Any:
    """A value of our own, which is trusted, as JSON has it."""
    return _field(cast(Any, type(value))).write(value)


def from_node(kind: type[_T], node: Any, *, what: str = "it") -> _T:
    """The value of a dataclass from JSON that may come from anybody.

    Raises:
        MessageError: It is none; names the field.
    """
    return cast(_T, _field(cast(Any, kind)).read(node, what))


def to_text(value: Any) -> str:
    """As ``to_node``, as one line."""
    return dumps(to_node(value))


def from_text(kind: type[_T], text: str | bytes, *, what: str = "it") -> _T:
    """As ``from_node``.

    Raises:
        MessageError: It is none; names the field.
    """
    return from_node(kind, loads(text, what=what), what=what)


def to_tagged(value: Any) -> str:
    """A value as one line, which names its class as well."""
    return dumps({"kind": type(value).__name__, **to_node(value)})


def from_tagged(kinds: Mapping[str, type[_T]], text: str | bytes) -> _T | None:
    """The value of one of several dataclasses, by their names; None where it is none."""
    try:
        parts = loads(text, what="a line")
        return from_node(kinds[parts.pop("kind")], parts)
    except (MessageError, KeyError, AttributeError, TypeError):
        return None


def dumps(node: Any) -> str:
    """JSON as one line."""
    return json.dumps(node, separators=(",", ":"))


def loads(text: str | bytes, *, what: str) -> Any:
    """JSON that may come from anybody.

    Raises:
        MessageError: It is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"{what} is no JSON: {error}") from None


@cache
def _field(hint: Any) -> Field:
    """The kind of field that a type hint names."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return choice(hint, hint.__name__, lambda member: member.name)
    if dataclasses.is_dataclass(hint):
        return record(cast(type, hint))
    bound = _MOST
    if get_origin(hint) is Annotated:
        hint, kind = get_args(hint)
        if isinstance(kind, Field):
            return kind
        bound = kind
    items = [_field(one) for one in get_args(hint) if one not in (..., type(None))]
    if type(None) in get_args(hint) and len(items) == 1:
        return optional(*items)
    if get_origin(hint) is tuple:
        return bound.of_tuple(*items) if ... in get_args(hint) else fixed(*items)
    if get_origin(hint) is Mapping:
        return bound.of_mapping(*items)
    raise TypeError(f"a field of type {hint} has no form in JSON")


def record(kind: type, bounds: Mapping[str, Any] | None = None) -> Field:
    """A dataclass.

    Args:
        kind: The dataclass.
        bounds: Type hints for fields whose own ones name no bounds.
    """
    hints = {**get_type_hints(kind, include_extras=True), **(bounds or {})}
    fields = {one.name: _field(hints[one.name]) for one in dataclasses.fields(cast(Any, kind))}

    def write(value: Any) -> dict[str, Any]:
        return {name: field.write(getattr(value, name)) for name, field in fields.items()}

    def read(raw: Any, what: str) -> Any:
        if not isinstance(raw, dict):
            raise MessageError(f"{what} is {repr(raw)[:80]}, no object")
        for name in [*(fields.keys() - raw.keys()), *(raw.keys() - fields.keys())]:
            problem = "is missing" if name in fields else "is not expected"
            raise MessageError(f"{what}: {name[:80]} {problem}")
        return kind(
            **{name: field.read(raw[name], f"{what}: {name}") for name, field in fields.items()}
        )

    return Field(read, write)
