"""Nested Python values as JSON and named tensors, and back.

None, booleans, integers, finite floats, strings, lists, and dictionaries with string keys are
written as JSON has them. The rest is tagged, by a dictionary with one key that begins with ``$``::

    tensor             {"$tensor": "extra/ema/weight"}     and "strides" where they are not plain
    tuple              {"$tuple": [...]}
    inf, -inf, nan     {"$float": "inf"}
    other keys         {"$map": [[key, value], ...]}
    Counter            {"$counter": [[key, count], ...]}
    OrderedDict        {"$ordered": [[key, value], ...]}
    set, frozenset     {"$set": [...]}
    deque              {"$deque": [[...], maxlen]}
    bytes, bytearray   {"$bytes": "00ff"}
    complex            {"$complex": [real, imaginary]}
    array of Python    {"$array": [typecode, {"$bytes": ...}]}
    number of NumPy    {"$numpy": ["<f8", "00ff"]}
    array of NumPy     {"$ndarray": ["<f8", shape, {"$tensor": ...}]}, its bytes; "F" for columns
    dtype of NumPy     {"$npdtype": "<f8"}, or a list of its fields
    dtype, device      {"$dtype": "float32"}, {"$device": "cpu"}
    SimpleNamespace    {"$namespace": {...}}
    range, slice       {"$range": [start, stop, step]}
    torch.Size         {"$size": [2, 3]}
    Decimal, UUID      {"$decimal": "0.10"}
    Fraction           {"$fraction": [numerator, denominator]}
    date, timedelta    {"$date": [2026, 11, 30]}, {"$timedelta": [days, seconds, microseconds]}
    time, datetime     {"$time": [hour, minute, second, microsecond, fold, timezone]}
    timezone, ZoneInfo {"$timezone": [{"$timedelta": ...}, "CET"]}, {"$zone": "Europe/Berlin"}
    pattern, path      {"$pattern": ["a+", 32]}, {"$PurePosixPath": "a/b"}
    member of an Enum  {"$enum": ["module:Class", "NAME"]}; flags put together: their number

A tensor is named by the way to it, so that a person who opens the file knows what it is. The class
of an enumeration is found among those that the process has loaded, never imported.
"""

from __future__ import annotations

import array
import json
import marshal
import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from enum import Enum, Flag
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from graphsplit.encoding.exact import EXACT, NUMBERS, dtype_of, is_exact, is_written
from graphsplit.errors import CheckpointError, StateError
from graphsplit.tensor_meta import DTYPES, TensorMeta, contiguous_strides, is_dense

_AS_THEY_ARE = frozenset((type(None), bool, int, str))
_PAIRS: dict[str, type[dict[Any, Any]]] = {
    "$counter": Counter,
    "$ordered": OrderedDict,
    "$map": dict,
}
_WITHOUT_REFERENCES = 2  # later versions write equal values differently
# Classes that are written as one tagged value, with the function that makes it and the one that
# takes it. Who sent it is not trusted: none of them may take much memory for little text.
_TAGGED: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    set: ("$set", list, set),
    frozenset: ("$frozenset", list, frozenset),
    deque: ("$deque", lambda v: [list(v), v.maxlen], lambda pair: _of_pair(deque, pair)),
    bytes: ("$bytes", bytes.hex, bytes.fromhex),
    bytearray: ("$bytearray", bytearray.hex, bytearray.fromhex),
    complex: ("$complex", lambda v: [v.real, v.imag], lambda pair: _of_pair(complex, pair)),
    array.array: (
        "$array",
        lambda v: [v.typecode, v.tobytes()],
        lambda pair: _of_pair(array.array, pair),
    ),
    SimpleNamespace: ("$namespace", vars, lambda values: SimpleNamespace(**values)),
    torch.device: ("$device", str, torch.device),
}


def _of_pair(kind: Callable[[Any, Any], Any], pair: Any) -> Any:
    first, second = pair
    return kind(first, second)


_BY_TAG = {tag: made for tag, _, made in (*_TAGGED.values(), *EXACT.values())}
_NOT_MADE = (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, re.error)
_TOO_DEEP = "it is nested too deeply, or contains itself"


def encode(value: Any, tensors: MutableMapping[str, torch.Tensor], *, path: str) -> Any:
    """A value as JSON.

    Args:
        value: What to encode.
        tensors: The tensors in it are added here, by name; they are not copied.
        path: The way to the value, for names and errors: ``"extra/scheduler"``.

    Raises:
        StateError: Something in it can be written neither as JSON nor as a tensor; names it.
    """
    try:
        return _encode(value, tensors, path)
    except RecursionError:
        raise StateError(f"{path} cannot be saved: {_TOO_DEEP}") from None


class Fixed(dict[str, Any]):
    """A mapping that nobody changes, nor anything in it: it is encoded once for every path."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._encoded: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {}

    def encode(self, tensors: MutableMapping[str, torch.Tensor], path: str) -> Any:
        """See ``encode``."""
        known = self._encoded.get(path)
        if known is None:
            own: dict[str, torch.Tensor] = {}
            known = self._encoded[path] = _encode_mapping(self, own, path), own
        node, own = known
        if not tensors.keys().isdisjoint(own):
            return _encode_mapping(self, tensors, path)
        tensors.update(own)
        return node


class Encoder:
    """Encodes values that seldom change, time and again: those without tensors only once.

    Nobody may change what it returns.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, Any]] = {}

    def __call__(self, value: Any, tensors: MutableMapping[str, torch.Tensor], *, path: str) -> Any:
        """See ``encode``."""
        try:
            written = marshal.dumps(value, _WITHOUT_REFERENCES)
        except ValueError:  # a tensor, or anything else that is no plain value
            return encode(value, tensors, path=path)
        known = self._known.get(path)
        if known is not None and known[0] == written:
            return known[1]
        node = encode(value, tensors, path=path)
        if _is_plain(value):  # NumPy's numbers and arrays are written as their bytes alone
            self._known[path] = written, node
        return node


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if kind is list or kind is tuple:
        return all(map(_is_plain, value))
    return kind is float or kind in _AS_THEY_ARE


def _encode(value: Any, tensors: MutableMapping[str, torch.Tensor], path: str) -> Any:
    kind = type(value)  # most values are of the usual classes: subclasses are looked at last
    if kind in _AS_THEY_ARE:
        return value
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, tensors, path)
    if kind is Fixed:
        return value.encode(tensors, path)
    if kind is dict or isinstance(value, Mapping):
        return _encode_mapping(value, tensors, path)
    if is_known_member(value):
        name = value.name if value.name in kind.__members__ else value.value
        return {"$enum": [f"{kind.__module__}:{kind.__qualname__}", name]}
    if has_bits(value):
        return _encode_bits(value, tensors, path)
    if is_exact(value):
        tag, parts_of, _ = EXACT[np.dtype if isinstance(value, np.dtype) else kind]
        return {tag: _encode(parts_of(value), tensors, path)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    base = next((base for base in kind.__mro__ if base in _TAGGED), None)
    if base is not None:
        tag, parts_of, _ = _TAGGED[base]
        return {tag: _encode(parts_of(value), tensors, path)}
    raise StateError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__} and cannot be saved; "
        f"expected tensors, numbers and arrays, strings, bytes, None, dtypes, devices, "
        f"members of enumerations, dates, paths, patterns, and lists, tuples, sets or "
        f"mappings of them\n"
        f"  Fix: leave it out of the state, or turn it into one of these."
    )


def _encode_tensor(
    value: torch.Tensor, tensors: MutableMapping[str, torch.Tensor], path: str
) -> Any:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise StateError(
            f"{path} is a {value.layout} tensor on {value.device} and cannot be saved; expected a "
            f"dense one\n  Fix: leave it out of the state, or save value.to_dense()."
        )
    name = path
    while name in tensors:
        name += "'"
    tensors[name] = value.detach()
    node: dict[str, Any] = {"$tensor": name}
    strides = tuple(value.stride())
    if strides != contiguous_strides(value.shape) and is_dense(value.shape, strides):
        node["strides"] = list(strides)
    return node


def has_bits(value: Any) -> bool:
    """Whether this is a number or an array of NumPy that is all in its bytes and its dtype."""
    if type(value) is np.ndarray:
        return value.flags.forc and is_written(value.dtype)
    is_number = isinstance(value, np.generic) and value.dtype.kind in NUMBERS
    return is_number and is_written(value.dtype)


def _encode_bits(value: Any, tensors: MutableMapping[str, torch.Tensor], path: str) -> Any:
    if not isinstance(value, np.ndarray):
        return {"$numpy": [value.dtype.str, value.tobytes().hex()]}
    order: Any = "C" if value.flags.c_contiguous else "F"
    octets = torch.from_numpy(np.frombuffer(value.tobytes(order), np.uint8).copy())
    descr = _encode(np.lib.format.dtype_to_descr(value.dtype), tensors, path)
    parts = [descr, list(value.shape), _encode(octets, tensors, path)]
    return {"$ndarray": parts if order == "C" else [*parts, order]}


def _encode_mapping(
    value: Mapping[Any, Any], tensors: MutableMapping[str, torch.Tensor], path: str
) -> Any:
    tag = next((tag for tag, kind in _PAIRS.items() if isinstance(value, kind)), "$map")
    items = {key: _encode(item, tensors, _below(path, key)) for key, item in value.items()}
    if tag == "$map" and all(isinstance(key, str) and key[:1] != "$" for key in items):
        return {str(key): item for key, item in items.items()}
    return {tag: [[_encode(key, tensors, path), item] for key, item in items.items()]}


def _below(path: str, key: Any) -> str:
    name = str(key)
    if "%" in name or "/" in name:
        name = name.replace("%", "%25").replace("/", "%2F")
    return f"{path}/{name}"


def decode(node: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The value that was encoded.

    Args:
        node: JSON, from a file or from another worker.
        tensor: Gives the tensor of a name, contiguous.

    Raises:
        CheckpointError: The JSON is not what ``encode`` makes.
    """
    if isinstance(node, list):
        return [decode(item, tensor) for item in node]
    if not isinstance(node, dict):
        return node
    tag = next((key for key in node if key.startswith("$")), None)
    if tag is None:
        return {key: decode(item, tensor) for key, item in node.items()}
    content = node[tag]
    if tag == "$tensor" and isinstance(content, str):
        return _with_strides(tensor(content), node.get("strides"))
    if tag == "$float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if tag == "$tuple" and isinstance(content, list):
        return tuple(decode(item, tensor) for item in content)
    if tag in _PAIRS:
        return _decode_pairs(tag, content, tensor)
    try:
        return _decode_rare(tag, decode(content, tensor))
    except _NOT_MADE as error:
        raise CheckpointError(f"a saved value is marked {tag!r}, but is none: {error}") from None


def _decode_rare(tag: str, content: Any) -> Any:
    if tag in _BY_TAG:
        return _BY_TAG[tag](content)
    match tag, content:
        case "$dtype", str(name) if name in DTYPES:
            return DTYPES[name]
        case "$enum", [str(where), str() | int() as name]:
            return _member(where, name)
        case "$numpy", [str(kind), str(text)] if kind[1:2] in NUMBERS:
            return np.frombuffer(bytes.fromhex(text), kind)[0]
        case "$ndarray", [descr, list(shape), torch.Tensor() as octets, *order]:
            made, form = np.frombuffer(octets.numpy().tobytes(), dtype_of(descr)), [*order, "C"]
            return made.reshape(shape, order=form[0]).copy(order=form[0])
    raise CheckpointError(f"a saved value is marked {tag!r}, which nobody writes")


def is_known_member(value: Any) -> bool:
    """Whether this is a member of an enumeration that can be found again."""
    return isinstance(value, Enum) and (
        value.name in type(value).__members__ or isinstance(value, Flag)
    )


def _member(where: str, name: str | int) -> Enum:
    waiting: list[type[Enum]] = [Enum]
    while waiting:
        known = waiting.pop()
        if f"{known.__module__}:{known.__qualname__}" == where:
            if isinstance(name, int) and issubclass(known, Flag):
                with suppress(ValueError):
                    return known(name)
            elif name in known.__members__:
                return known[str(name)]
        waiting += known.__subclasses__()
    raise CheckpointError(
        f"{where.replace(':', '.')}.{name} was saved, and this process knows no such enumeration\n"
        f"  Fix: define it where the script is loaded."
    )


def _decode_pairs(tag: str, content: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    if not isinstance(content, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in content
    ):
        raise CheckpointError(f"a saved value is marked {tag!r}, but is no list of pairs")
    try:
        found = {decode(key, tensor): decode(item, tensor) for key, item in content}
    except TypeError as error:
        raise CheckpointError(f"a saved mapping has a key that cannot be one: {error}") from None
    return found if tag == "$map" else _PAIRS[tag](found)


def _with_strides(value: torch.Tensor, strides: Any) -> torch.Tensor:
    if strides is None:
        return value
    is_known = isinstance(strides, list) and len(strides) == value.dim()
    is_known = is_known and all(type(s) is int and 0 <= s < 1 << 62 for s in strides)
    if not is_known or not is_dense(value.shape, strides):
        raise CheckpointError(f"a saved tensor of shape {list(value.shape)} has strides {strides}")
    laid_out = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return laid_out.copy_(value)


def tensor_names(node: Any) -> list[str]:
    """The names of all tensors that an encoded value refers to, in order."""
    if isinstance(node, list):
        return [name for item in node for name in tensor_names(item)]
    if not isinstance(node, dict):
        return []
    if isinstance(node.get("$tensor"), str):
        return [node["$tensor"]]
    return [name for item in node.values() for name in tensor_names(item)]


def to_text(node: Any) -> str:
    """Encoded values as one line of JSON."""
    return json.dumps(node, separators=(",", ":"), allow_nan=False)


def from_text(text: str, *, what: str) -> dict[str, Any]:
    """Read a JSON object that a file or another worker gave.

    Raises:
        CheckpointError: It is none.
    """
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not readable: {str(error) or _TOO_DEEP}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{what} is a {type(found).__name__}; expected an object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def meta_to_json(meta: TensorMeta) -> list[Any]:
    """For example ``["float32", [3, 4]]``."""
    return [str(meta.dtype).removeprefix("torch."), list(meta.shape)]


def meta_from_json(node: Any, *, what: str) -> TensorMeta:
    """Read what ``meta_to_json`` wrote, from a file or from another worker.

    Raises:
        CheckpointError: It is something else.
    """
    match node:
        case [str(name), list(shape)] if all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
            if name in DTYPES:
                return TensorMeta(DTYPES[name], tuple(shape), contiguous_strides(shape))
    raise CheckpointError(f"{what} is described as {str(node)[:100]}; expected [dtype, shape]")
