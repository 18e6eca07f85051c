"""Copies and names of values: equal values have one number, so that worlds are a few numbers."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

# What is to be done with the values of a type.
_PLAIN, _LIST, _DICT, _SET, _TUPLE, _FROZEN, _OBJECT = range(7)
_HOW: dict[type, int] = dict.fromkeys((str, int, float, bool, bytes, type(None)), _PLAIN)
_HOW |= {list: _LIST, dict: _DICT, set: _SET, frozenset: _SET, tuple: _TUPLE}
_numbers: dict[Any, int] = {}


class Numbered:
    """Values by small numbers: equal values have the same one. They are never changed."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        """The number of a value."""
        name = key(value)
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = len(self.values)
            self.values.append(value)
        return found

    def __getitem__(self, number: int) -> Any:
        return self.values[number]

    def __len__(self) -> int:
        return len(self.values)


def copy(value: Any) -> Any:
    """A value that can be changed without changing this one. Frozen values are shared."""
    return _copy(value, {})


def _copy(value: Any, seen: dict[int, Any]) -> Any:
    kind = type(value)
    how = _HOW.get(kind) or _how(kind)
    if how in (_PLAIN, _TUPLE, _FROZEN):
        return value
    if how == _LIST:
        return [_copy(one, seen) for one in value]
    if how == _DICT:
        return {name: _copy(one, seen) for name, one in value.items()}
    if how == _SET:
        return kind(value)
    known = seen.get(id(value))
    if known is None:
        known = seen[id(value)] = object.__new__(kind)
        made = known.__dict__
        for name, one in value.__dict__.items():
            made[name] = one if _HOW.get(type(one)) == _PLAIN else _copy(one, seen)
    return known


def key(value: Any) -> Any:
    """What two equal values have in common. Two values of different types in one place differ."""
    return _key(value, {})


def _key(value: Any, seen: dict[int, Any]) -> Any:
    kind = type(value)
    how = _HOW.get(kind) or _how(kind)
    if how == _PLAIN:
        return value
    if how == _FROZEN:
        return _number(value)
    if how in (_LIST, _TUPLE):
        return tuple([_key(one, seen) for one in value])
    if how == _DICT:
        pairs = [(str(name), _key(one, seen)) for name, one in value.items()]
        pairs.sort(key=_first)
        return tuple(pairs)
    if how == _SET:
        return tuple(sorted(value))
    found = seen.get(id(value))
    if found is None:
        found = seen[id(value)] = tuple(
            [
                one if _HOW.get(type(one)) == _PLAIN else _key(one, seen)
                for one in value.__dict__.values()
            ]
        )
    return found


def _number(value: Any) -> int:
    """The number of a frozen value. It is kept on the value, which many others share."""
    found: int | None = value.__dict__.get("_number_of_value")
    if found is None:
        found = _numbers.setdefault(_value_key(value), len(_numbers))
        object.__setattr__(value, "_number_of_value", found)
    return found


def _value_key(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, Enum):
        return (kind.__name__, value.name)
    return (kind.__name__, *[key(getattr(value, one.name)) for one in fields(value)])


def _how(kind: type) -> int:
    how = _HOW.get(kind)
    if how is None:
        is_value = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        how = _HOW[kind] = _FROZEN if is_value or issubclass(kind, Enum) else _OBJECT
    return how


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]
