"""Snapshots of plain Python values, and whether a value is still the one of its snapshot.

A container is kept with all that it holds, as deep as it goes; everything else by reference. Values
are the same if their types and bits are: 1, 1.0 and True are three values, and so are 0.0 and -0.0.
What has no bits of its own to compare (functions, modules, tensors, objects) is compared by
identity; a snapshot holds it, so that no other object can take its place in memory.
"""

from __future__ import annotations

import array
import copy
import ctypes
import enum
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Container, ItemsView, Iterator, KeysView, ValuesView
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from graphsplit.text import TOLD_BY_TEXT, is_told_by_text, without_identities
from graphsplit.torch_ext.stand_ins import StandIn

OF_TORCH = (torch.layout, torch.memory_format, torch.qscheme)
BY_VALUE = (
    *(bool, int, float, complex, str, bytes, range, slice),
    *(torch.Size, torch.dtype, torch.device, *OF_TORCH, re.Pattern),
)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
IN_C: Any = ctypes.Structure.__base__  # of all classes of ctypes
BUFFERS = (np.ndarray, np.void, array.array, bytearray, IN_C)
CONTAINERS = (*_SEQUENCES, *_SETS, dict, SimpleNamespace, *BUFFERS)
MUTABLE = (list, deque, set, dict, SimpleNamespace, *BUFFERS)


# Numbers of these survive the way through Python's.
_OF_NUMBERS = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)
)


class Missing:
    """Stands for a value that is not there."""

    def __repr__(self) -> str:
        return "(nothing)"


MISSING = Missing()


@dataclass(frozen=True, eq=False)
class Frozen:
    """A container at one moment.

    Attributes:
        container: The container itself.
        items: What it held, in its order: for a mapping its values. Containers among them are
            frozen too.
        keys: The keys of a mapping; empty for others.
        content: dtype, shape and bytes of an array; None for others.
    """

    container: Any
    items: tuple[Any, ...] = ()
    keys: tuple[Any, ...] = ()
    content: tuple[Any, ...] | None = None


def reference_of(frozen: Any) -> Any:
    """The value that a snapshot was taken of."""
    return frozen.container if isinstance(frozen, Frozen) else frozen


def freeze(value: Any, _inside: tuple[int, ...] = (), apart: Container[int] = frozenset()) -> Any:
    """The snapshot of a value; the value itself where it is no container.

    Args:
        value: The value.
        apart: Containers that count by themselves, by number (``id``): they are not looked into.
    """
    if not isinstance(value, CONTAINERS) or isinstance(value, torch.Size):
        return value
    if id(value) in _inside or id(value) in apart:
        return value
    if isinstance(value, BUFFERS):
        return Frozen(value, content=_content(value))
    inside = (*_inside, id(value))
    # At once: what frees a tensor, or another thread, may change a dictionary meanwhile.
    pairs = tuple(_pairs_of(value)) if is_mapping(value) else ()
    items = tuple([item for _, item in pairs]) if is_mapping(value) else tuple(items_of(value))
    frozen = tuple([freeze(item, inside, apart) for item in items])
    return Frozen(value, frozen, tuple([key for key, _ in pairs]))


def is_mapping(value: Any) -> bool:
    """Whether a container holds values under keys."""
    return isinstance(value, (dict, SimpleNamespace))


def holder_of(container: Any) -> Any:
    """The holder of a container's items: itself, but for a namespace its dictionary."""
    is_one = isinstance(container, SimpleNamespace)
    return object.__getattribute__(container, "__dict__") if is_one else container  # unwatched


def _order_of(held: dict[Any, Any]) -> type[dict[Any, Any]]:
    """The class that knows the order of a dictionary: ``move_to_end`` leaves dict's as it is."""
    return OrderedDict if isinstance(held, OrderedDict) else dict


def keys_of(value: Any) -> KeysView[Any]:
    """The keys of a mapping, whatever its class makes of asking for them."""
    held = holder_of(value)
    return _order_of(held).keys(held)


def values_of(value: Any) -> ValuesView[Any]:
    """The values of a mapping, likewise."""
    held = holder_of(value)
    return _order_of(held).values(held)


def _pairs_of(value: Any) -> ItemsView[Any, Any]:
    held = holder_of(value)
    return _order_of(held).items(held)


def items_of(value: Any) -> Iterator[Any]:
    """A container's items, whatever its class makes of iterating over it."""
    if is_mapping(value):
        return iter(values_of(value))
    kind = next(kind for kind in (*_SEQUENCES, *_SETS) if isinstance(value, kind))
    return kind.__iter__(value)


def _content(value: Any) -> tuple[Any, ...]:
    if isinstance(value, np.ma.MaskedArray):
        mask = None if value.mask is np.ma.nomask else value.mask.tobytes()
        return (*_content(value.data)[:2], (_content(value.data)[2], mask))
    if isinstance(value, (np.ndarray, np.void)):  # the latter: a record, a view of its array
        # An array of objects has no bits to speak of: what it holds is compared by identity.
        held = tuple(value.ravel().tolist()) if value.dtype.hasobject else value.tobytes()
        return (str(value.dtype), value.shape, held)
    size = ctypes.sizeof(value) if isinstance(value, IN_C) else len(value)
    return (getattr(value, "typecode", "b"), size, bytes(value))


def entries_of(frozen: Frozen) -> Iterator[tuple[Any, Any, Any]]:
    """Holder, key and value of every entry that can be written one by one."""
    if is_mapping(frozen.container):
        for key, item in zip(frozen.keys, frozen.items, strict=True):
            yield holder_of(frozen.container), key, item
    elif isinstance(frozen.container, list):
        for index, item in enumerate(frozen.items):
            yield frozen.container, index, item


def thaw(frozen: Any) -> Any:
    """A value as in a snapshot, in containers of its own."""
    if not isinstance(frozen, Frozen):
        return frozen
    kind, items = type(frozen.container), [thaw(item) for item in frozen.items]
    if frozen.content is not None:
        return _array_of(frozen)
    if isinstance(frozen.container, SimpleNamespace):
        made = SimpleNamespace.__new__(kind)  # its constructor may be the user's
        _fill(made, frozen.keys, items)
        return made
    made = frozen.container.copy() if hasattr(kind, "copy") else None
    if isinstance(frozen.container, (dict, list, deque, set)) and type(made) is not kind:
        made = _copied(frozen.container)  # copy() of a class of the user's gives its base
    if made is None or type(made) is not kind:  # a tuple, named or not
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    _fill(made, frozen.keys, items)
    return made


def _copied(container: Any) -> Any:
    """A container as ``copy.copy`` gives it, or empty: its items are filled in.

    ``copy.copy`` would ask one whose ``__getattr__`` is ``dict.get`` for ``__setstate__``.
    """
    kind = type(container)
    if hasattr(kind, "__copy__") or hasattr(kind, "__setstate__"):
        return copy.copy(container)
    make, arguments, state, *_ = container.__reduce_ex__(4)
    made = make(*arguments)
    of_dictionary, of_slots = state if isinstance(state, tuple) else (state, None)
    for name, value in ((of_dictionary or {}) | (of_slots or {})).items():
        object.__setattr__(made, name, value)
    return made


def put_back(frozen: Any) -> Any:
    """Let a container, and those in it, hold what they held; returns the value."""
    if not isinstance(frozen, Frozen):
        return frozen
    items = [put_back(item) for item in frozen.items]
    if isinstance(frozen.container, MUTABLE) and not _holds_exactly(frozen, items):
        if frozen.content is None:
            _fill(frozen.container, frozen.keys, items)
        else:
            _fill_array(frozen)
    return frozen.container


def put_into(frozen: Any, there: Any, *, as_written: bool = False) -> Any:
    """The value of a snapshot: in the containers that are there, where those can hold it.

    What others know by the container sees it too. Dictionaries that hold it are let be: builtins.

    Args:
        frozen: The snapshot.
        there: What is there.
        as_written: Whether containers of other classes were written as those that they derive
            from: a ``defaultdict`` as a ``dict``, a named tuple as a tuple.
    """
    if not isinstance(frozen, Frozen):
        return frozen
    if as_written and isinstance(there, type(frozen.container)):
        frozen = replace(frozen, container=there)
    if _form_of(there) != _form_of(frozen.container):
        return thaw(frozen)
    put = partial(put_into, as_written=as_written)
    if isinstance(there, tuple) and len(there) == len(frozen.items):
        items = [put(item, held) for item, held in zip(frozen.items, there, strict=True)]
        is_same = all(item is held for item, held in zip(items, there, strict=True))
        return there if is_same else thaw(replace(frozen, items=tuple(items)))
    if not isinstance(there, MUTABLE):
        return thaw(frozen)
    if frozen.content is not None:
        if frozen.content[:2] != _content(there)[:2]:
            return thaw(frozen)
        _fill_array(Frozen(there, content=frozen.content))
        return there
    if is_mapping(there):
        known = dict(zip(keys_of(there), values_of(there), strict=True))
    else:
        known = {} if isinstance(there, _SETS) else dict(enumerate(items_of(there)))
    keys = frozen.keys or range(len(frozen.items))
    items = [put(item, known.get(key)) for key, item in zip(keys, frozen.items, strict=True)]
    if not (is_mapping(there) and _holds_exactly(replace(frozen, container=there), items)):
        _fill(there, frozen.keys, items)
    return there


def _array_of(frozen: Frozen) -> Any:
    """An array with the content of a snapshot."""
    made = frozen.container.copy() if isinstance(frozen.container, np.ndarray) else None
    if made is None:
        made = copy.copy(frozen.container)
    again = Frozen(made, content=frozen.content)
    _fill_array(again)
    return again.container


def _fill_array(frozen: Frozen) -> None:
    """Let an array have the content of its snapshot."""
    container, (kind, size, held) = frozen.container, frozen.content or ("", 0, b"")
    if isinstance(container, np.ma.MaskedArray):
        _fill_array(Frozen(container.data, content=(kind, size, held[0])))
        if held[1] is None:
            container.mask = np.ma.nomask
            container.shrink_mask()
        else:
            container.mask = np.frombuffer(held[1], container.mask.dtype).reshape(size)
    elif isinstance(container, bytearray):
        container[:] = held
    elif isinstance(container, IN_C):
        ctypes.memmove(ctypes.addressof(container), held, size)
    elif isinstance(container, array.array):
        del container[:]
        container.frombytes(held)
    elif isinstance(container, np.void):
        for name in container.dtype.names or ():
            container[name] = np.frombuffer(held, dtype=container.dtype)[0][name]
    elif container.dtype.hasobject:
        for index, item in enumerate(held):
            container.flat[index] = item
    else:
        container[...] = np.frombuffer(held, dtype=container.dtype).reshape(size)


def _holds_exactly(frozen: Frozen, items: list[Any]) -> bool:
    if frozen.content is not None:
        return _same_content(frozen.content, _content(frozen.container))
    container, now = frozen.container, list(items_of(frozen.container))
    if is_mapping(container):  # an item under another key is no longer the same
        now, items = [*keys_of(container), *now], [*frozen.keys, *items]
    return len(now) == len(items) and all(a is b for a, b in zip(now, items, strict=True))


def _fill(container: Any, keys: tuple[Any, ...], items: list[Any]) -> None:
    """Give a container new contents, past what its class makes of that."""
    if is_mapping(container):
        held = holder_of(container)
        kind = _order_of(held)
        kind.clear(held)
        for key, item in zip(keys, items, strict=True):
            kind.__setitem__(held, key, item)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), items)
    elif isinstance(container, deque):
        deque.clear(container)
        deque.extend(container, items)
    elif isinstance(container, set):
        fill_set(container, items)
        if not all(map(same, items, set.__iter__(container))):
            set.clear(container)
            set.update(container, items)


def fill_set(container: set[Any], items: Any) -> None:
    """Let a set have these items; plain ones in its table, whose size decides on their order."""
    if all(isinstance(one, BY_VALUE) for one in (*set.__iter__(container), *items)):
        for gone in set.difference(container, items):
            set.discard(container, gone)
    else:
        set.clear(container)
    set.update(container, items)


def is_scalar(value: Any) -> bool:
    """Whether this is a tensor of one element whose number says all about it."""
    return (
        type(value) is torch.Tensor
        and value.numel() == 1
        and value.device.type == "cpu"
        and value.dtype in _OF_NUMBERS
        and not value.requires_grad
    )


def number_of(value: Any) -> Any:
    """The number in a tensor of one element; anything else as it is."""
    return value.item() if is_scalar(value) else value


def kind_of(value: Any) -> Any:
    """The part of a lifted value that must stay: its class, and of a tensor the form."""
    return (torch.Tensor, value.dtype, value.shape) if is_scalar(value) else type(value)


def same(frozen: Any, value: Any) -> bool:
    """Whether a value is the one of a snapshot, by type and bits."""
    return next(differences(frozen, value), None) is None


@dataclass(frozen=True)
class Written:
    """A tensor of one element before it was written to.

    Attributes:
        number: The number in it.
    """

    number: Any

    def __repr__(self) -> str:
        return f"a tensor of {self.number!r}"


@dataclass(frozen=True)
class ValueDifference:
    """Where a value is not the one of its snapshot.

    Attributes:
        container: The innermost container in which it differs; None for the value itself.
        key: Its key or position there; None where the container as a whole differs.
        old: What was there.
        new: What is there.
    """

    container: Any
    key: Any
    old: Any
    new: Any


def differences(
    frozen: Any, value: Any, *, within: Any = None, key: Any = None
) -> Iterator[ValueDifference]:
    """All places in which a value is not the one of its snapshot, the innermost ones."""
    whole = ValueDifference(within, key, frozen, value)
    if not isinstance(frozen, Frozen):
        if frozen is not value and not _same_bits(frozen, value):
            yield whole
        return
    if _form_of(value) != _form_of(frozen.container):
        yield whole
    elif frozen.content is not None:
        if not _same_content(frozen.content, _content(value)):
            yield whole
    elif isinstance(value, _SETS):
        now = list(items_of(value))  # in their order: code may go through them
        if len(now) != len(frozen.items) or not all(map(same, frozen.items, now)):
            yield whole
    else:
        now, keys = list(items_of(value)), tuple(keys_of(value)) if is_mapping(value) else ()
        if len(now) != len(frozen.items) or not _same_keys(frozen.keys, keys):
            yield whole
            return
        keys = frozen.keys or tuple(range(len(now)))
        for its_key, old, new in zip(keys, frozen.items, now, strict=True):
            yield from differences(old, new, within=value, key=its_key)


def _form_of(container: Any) -> tuple[type, Any]:
    """The part of a container that stays: its class, and how much a ``deque`` holds at most."""
    return type(container), container.maxlen if isinstance(container, deque) else None


def paired(frozen: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container of a snapshot, with what stands in its place in a value of the same form."""
    if not isinstance(frozen, Frozen) or type(value) is not type(frozen.container):
        return
    yield frozen.container, value
    if frozen.content is None and not isinstance(value, _SETS):
        for item, its_now in zip(frozen.items, items_of(value), strict=False):
            yield from paired(item, its_now)


def _same_bits(one: Any, other: Any) -> bool:
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in (float, complex) or kind in TOLD_BY_TEXT:
        return repr(one) == repr(other)  # -0.0 is not 0.0, and a NaN is itself
    if isinstance(one, np.generic):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, np.dtype):
        return repr((one, one.metadata)) == repr((other, other.metadata))
    if isinstance(one, StandIn):
        return one.latest() is other.latest()
    return kind in BY_VALUE and bool(one == other)  # a class of the user's may make == its own


def _same_keys(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(
        a is b or _same_bits(a, b) or (isinstance(a, tuple) and repr(a) == repr(b) and a == b)
        for a, b in zip(one, other, strict=True)
    )


def _same_content(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    if isinstance(one[-1], tuple) and one[:2] == other[:2]:
        return all(a is b or _same_bits(a, b) for a, b in zip(one[-1], other[-1], strict=True))
    return one == other


def is_plain(frozen: Any) -> bool:
    """Whether a snapshot can be made again from nothing but numbers, texts and containers."""
    if isinstance(frozen, Frozen):
        return frozen.content is not None or (
            all(map(is_plain, frozen.items)) and all(map(is_plain, frozen.keys))
        )
    return (
        frozen is None
        or frozen is MISSING
        or isinstance(frozen, (*BY_VALUE, np.generic, np.dtype, enum.Enum))
        or is_told_by_text(frozen)
    )


def with_leaves(frozen: Any, change: Callable[[Any], Any]) -> Any:
    """A snapshot of the same containers, with other things in them."""
    if isinstance(frozen, Frozen):
        items = tuple([with_leaves(item, change) for item in frozen.items])
        return Frozen(frozen.container, items, frozen.keys, frozen.content)
    return change(frozen)


def any_leaf(frozen: Any, test: Callable[[Any], bool]) -> bool:
    """Whether a snapshot holds something of which a test is true."""
    if isinstance(frozen, Frozen):
        return any(any_leaf(item, test) for item in frozen.items)
    return test(frozen)


def shown(value: Any) -> str:
    """A value for people: short, and the same text on all workers."""
    if isinstance(value, Frozen):
        value = thaw(value) if is_plain(value) else value.container
    if is_scalar(value):
        return f"a tensor of {value.item()!r}"
    if isinstance(value, torch.Tensor):
        return f"a {list(value.shape)} tensor"
    try:
        text = without_identities(repr(value))
    except Exception:  # a repr of the user's decides nothing
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
