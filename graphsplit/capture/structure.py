"""Take the outputs of a network apart into tensors, and put them together again.

``torch.export`` returns tuples, lists, dictionaries and what is registered as a pytree. Networks
return other objects too, such as the caches of transformers. Those are taken apart and put together
by Python's own protocol for copying objects, ``object.__reduce_ex__``, which is also what
``copy.copy`` follows. All of it happens in one process: nothing is written or read.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphsplit.errors import CaptureError
from graphsplit.guards.values import SYMBOLIC
from graphsplit.torch_ext.private import pytree
from graphsplit.torch_ext.replaced import reconstruct

_PLAIN = (type(None), bool, int, float, str)
_KEPT = (
    complex,
    bytes,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_PROTOCOL = 4


@dataclass(frozen=True)
class _Leaf:
    """The next of the flat values goes here."""


@dataclass(frozen=True)
class _Kept:
    """Something without tensors, handed out as it is."""

    value: Any


@dataclass(frozen=True)
class _Opened:
    """An object that was taken apart.

    Attributes:
        make: Makes the object, before its state is set.
        parts: Its arguments, its state, and the items of a list and of a dictionary.
    """

    make: Callable[..., Any]
    parts: Structure


@dataclass(frozen=True)
class Structure:
    """Where each of the flat values belongs.

    Attributes:
        spec: The outermost containers.
        slots: What is in them.
    """

    spec: pytree.TreeSpec
    slots: tuple[_Leaf | _Kept | _Opened, ...]

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Put values together again.

        Args:
            leaves: As many as ``take_apart`` returned, in that order.
        """
        return self._rebuild(iter(leaves))

    def _rebuild(self, leaves: Iterator[Any]) -> Any:
        return pytree.tree_unflatten([_fill(slot, leaves) for slot in self.slots], self.spec)


def take_apart(value: Any) -> tuple[list[Any], Structure]:
    """All tensors and numbers in a value, and how to put them together again.

    Raises:
        CaptureError: Something in it cannot be taken apart; names where it stands.
    """
    leaves: list[Any] = []
    return leaves, _take_apart(value, leaves, "", ())


def _take_apart(value: Any, leaves: list[Any], where: str, above: tuple[int, ...]) -> Structure:
    found, spec = pytree.tree_flatten_with_path(value)
    slots = [_slot(leaf, leaves, where + pytree.keystr(path), above) for path, leaf in found]
    return Structure(spec, tuple(slots))


def _slot(
    value: Any, leaves: list[Any], where: str, above: tuple[int, ...]
) -> _Leaf | _Kept | _Opened:
    if isinstance(value, (torch.Tensor, *SYMBOLIC)) or type(value) in _PLAIN:
        leaves.append(value)
        return _Leaf()
    if isinstance(value, _KEPT):
        return _Kept(value)
    if id(value) in above:
        raise _refusal(value, where, "it holds itself")
    first = len(leaves)
    opened = _open(value, leaves, where, (*above, id(value)))
    if opened is None or all(isinstance(leaf, _PLAIN) for leaf in leaves[first:]):
        del leaves[first:]
        return _Kept(value)
    return opened


def _open(value: Any, leaves: list[Any], where: str, above: tuple[int, ...]) -> _Opened | None:
    if isinstance(value, nn.Module):
        raise _refusal(value, where, "a module is no value")
    try:
        opened = open_object(value)
    except TypeError as error:
        raise _refusal(value, where, str(error)) from None
    if opened is None:
        return None
    make, parts = opened
    return _Opened(make, _take_apart(parts, leaves, where, above))


def open_object(value: Any) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """A constructor of an object, and its parts; None for one that is known by a global name.

    Raises:
        TypeError: It cannot be copied.
    """
    if isinstance(value, _KEPT):
        return None
    reduced: Any = value.__reduce_ex__(_PROTOCOL)
    if isinstance(reduced, str):
        return None
    make, args, state, in_list, in_dict = (*reduced, None, None, None)[:5]
    parts = {
        "args": args,
        "state": state,
        "listiter": list(in_list or ()),
        "dictiter": [list(item) for item in in_dict or ()],
    }
    return make, parts


def _fill(slot: _Leaf | _Kept | _Opened, leaves: Iterator[Any]) -> Any:
    if isinstance(slot, _Leaf):
        return next(leaves)
    if isinstance(slot, _Kept):
        return slot.value
    return reconstruct(None, None, slot.make, **slot.parts._rebuild(leaves))


def _refusal(value: Any, where: str, why: str) -> CaptureError:
    return CaptureError(
        f"the network returns a {type(value).__qualname__} at outputs{where}, which cannot be "
        f"taken apart into tensors: {why}\n"
        f"  Fix: return tensors, numbers, and containers or plain objects of them."
    )
