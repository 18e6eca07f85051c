"""The state of Python objects as text: to compare what two processes have left in them."""

from __future__ import annotations

import functools
import hashlib
import random
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from graphsplit.capture.reach.contents import NOTHING, content_of
from graphsplit.capture.reach.names import names_in
from graphsplit.capture.reach.reach import is_of_library
from graphsplit.guards.classes import attributes_of, own_dictionary
from graphsplit.tensor_meta import octets_of

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_MAX_PLACES = 200_000
_LONG = 64
_MAX_TEXT = 100

Path = tuple[str, ...]


def kept_state(
    roots: Mapping[str, Any], names: Mapping[int, str], *, limit: int = _MAX_PLACES
) -> dict[Path, str]:
    """Every value that can be reached from some objects, by the way to it.

    Attributes, items of containers, cells and defaults of functions, and the globals that they
    name; of graphsplit's own objects what the script sees. Nearest first, until ``limit`` places
    were seen. A long list of numbers is one place.

    Args:
        roots: Where to begin, by name.
        names: Tensors that are told by their name alone, by id.
        limit: How many places to look at.
    """
    found: dict[Path, str] = {}
    seen: dict[int, Any] = {}  # holds on to them: an id names one object as long as it lives
    waiting: deque[tuple[Path, Any]] = deque(((name,), value) for name, value in roots.items())
    while waiting and len(found) < limit:
        path, value = waiting.popleft()
        text = _text_of(value, names)
        if text is not None:
            found[path] = text
        elif id(value) in seen:
            found[path] = "(seen before)"
        else:
            seen[id(value)] = value
            found[path] = f"a {type(value).__qualname__}"
            waiting.extend(((*path, step), part) for step, part in _parts(value, names))
    return found


def _text_of(value: Any, names: Mapping[int, str]) -> str | None:
    """A value that has no parts; None for others."""
    if id(value) in names:
        return f"<{names[id(value)]}>"
    if value is None or isinstance(value, _PLAIN):
        text = f"{type(value).__name__} {value!r}"
        return text if len(text) <= _MAX_TEXT else digest(text.encode())
    if isinstance(value, torch.Tensor):
        return text_of_tensor(value)
    if isinstance(value, torch.Generator):
        return text_of_tensor(value.get_state())
    if isinstance(value, random.Random):
        return digest(repr(value.getstate()).encode())
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return f"{value.dtype} {value.shape} {digest(value.tobytes())}"
    if isinstance(value, (list, tuple)) and len(value) > _LONG:
        is_plain = all(entry is None or isinstance(entry, _PLAIN) for entry in value)
        return digest(repr(value).encode()) if is_plain else None
    if isinstance(value, (set, frozenset)):
        return digest(repr(sorted(_text_of(v, names) or type(v).__name__ for v in value)).encode())
    return None


def text_of_tensor(tensor: torch.Tensor) -> str:
    """Shape, dtype and a digest of a tensor's bytes."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    return f"{tensor.dtype} {list(tensor.shape)} {digest(octets_of(plain).numpy())}"


def digest(data: Any) -> str:
    """A short digest."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _parts(value: Any, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    """The values that a value holds, each with the step that leads to it."""
    if isinstance(value, Mapping):
        for key, entry in _items(value):
            yield _step_to(key, names), entry
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{index}]", entry) for index, entry in enumerate(value))
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, types.MethodType):
        yield from ((".__self__", value.__self__), (".__func__", value.__func__))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, weakref.ref):
        yield "()", value()
    if isinstance(value, type):
        if not is_of_library(value.__module__):
            for name, entry in vars(value).items():
                if not name.startswith("__") and not isinstance(entry, types.GetSetDescriptorType):
                    yield f".{name}", entry
    elif not isinstance(value, (types.ModuleType, types.FunctionType)):
        yield from ((f".{name}", entry) for name, entry in _attributes(value))


def _items(value: Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """The entries of a mapping; in ``items`` a library may import hundreds of modules."""
    if isinstance(value, dict):
        return dict.items(value)
    return value.items() if is_of_library(type(value).__module__) else ()


def _step_to(key: Any, names: Mapping[int, str]) -> str:
    """The step to an entry; what belongs to a tensor of the network leads over its name."""
    by_id = isinstance(key, int) and key in names
    name = names.get(key if by_id else id(key))
    if name is not None:
        return f"<{name}>"
    # The text of one that lives elsewhere would be asked for there.
    return f"[{text_of_tensor(key) if isinstance(key, torch.Tensor) else repr(key)}]"


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    if not _is_own(value):
        yield from (attributes_of(value) or {}).items()
        return
    for name, one in (own_dictionary(value) or {}).items():
        if not (name.startswith("_") or _is_own(one)):
            yield name, one


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = ((name, content_of(cell)) for name, cell in cells)
    yield from ((f" {name}", one) for name, one in found if one is not NOTHING)
    yield from ((f" default {i}", v) for i, v in enumerate(function.__defaults__ or ()))
    yield from ((f" {name}", v) for name, v in (function.__kwdefaults__ or {}).items())
    yield from ((f".{name}", v) for name, v in vars(function).items())
    if not is_of_library(function.__module__):
        for name in sorted(names_in(function.__code__).globals):
            if name in function.__globals__:
                yield f" {name}", function.__globals__[name]


def _is_own(value: Any) -> bool:
    """Whether an object is one of graphsplit's, behind which there are the job and its plans."""
    return (type(value).__module__ or "").partition(".")[0] == "graphsplit"
