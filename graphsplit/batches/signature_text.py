"""Checks of a signature's text that came in a ticket, before anything is made of it.

The text says how large tensors are and which classes hold them. Whoever can send a ticket must not
be able to make this worker take memory without bound, call something, or recurse too deeply.
"""

from __future__ import annotations

import json
import os
from typing import Any, NoReturn

import torch

from graphsplit.errors import FrameError
from graphsplit.tensor_meta import DTYPES, span_elements

_MAX_DEPTH = 64
_MAX_DIMENSIONS = 64
_MAX_NAME_CHARS = 512
_MAX_SIZE = 1 << 48


def check_signature_text(text: str, *, what: str) -> None:
    """Refuse a text that ``Signature.of`` would not have made here.

    Args:
        text: What came.
        what: Where it came from, for errors.

    Raises:
        FrameError: It is no signature, or describes more than this machine can hold.
    """
    try:
        node = json.loads(text)
    except (ValueError, RecursionError):
        raise FrameError(f"{what}: its text is no JSON") from None
    checker = _Checker(what)
    match node:
        case {"u": [{"u": list(_)}, {"d": list(_)}], **rest} if not rest:
            checker.node(node, 0)
        case _:
            checker.refuse("expected positional and named arguments", node)
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if checker.size_bytes > limit:
        raise FrameError(
            f"{what}: its tensors would take {checker.size_bytes} bytes; expected at most the "
            f"{limit} bytes of this machine"
        )


class _Checker:
    """Walks through a decoded text, and adds up what its tensors would take."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.size_bytes = 0

    def refuse(self, expected: str, found: Any) -> NoReturn:
        raise FrameError(f"{self._what}: {expected}, got {str(found)[:100]}")

    def node(self, node: Any, depth: int) -> None:
        if depth > _MAX_DEPTH:
            self.refuse(f"expected at most {_MAX_DEPTH} levels", "more")
        if not isinstance(node, dict) or len(node) != 1:
            self.refuse("expected one kind of value", node)
        ((kind, content),) = node.items()
        match kind, content:
            case ("t" | "ones" | "grad", [str(dtype), list(shape), list(strides)]):
                self._tensor(dtype, shape, strides)
            case ("t" | "ones" | "grad", [str(dtype), list(shape), list(strides), str(device)]):
                if device not in (known := _devices()):
                    here = ", ".join(known) or "no devices but CPUs"
                    self.refuse(f"expected a tensor on what this worker has ({here})", node)
                self._tensor(dtype, shape, strides)
            case "v", (None | bool() | int() | float() | str()):
                return
            case (("l" | "u"), list(items)):
                for item in items:
                    self.node(item, depth + 1)
            case (("d" | "o"), list(pairs)):
                self._pairs(pairs, depth)
            case "r", [str(module), str(name), list(pairs)] if (
                max(len(module), len(name)) <= _MAX_NAME_CHARS
            ):
                self._pairs(pairs, depth, of_record=True)
            case _:
                self.refuse("expected a tensor, a plain value or a container", node)

    def _pairs(self, pairs: list[Any], depth: int, *, of_record: bool = False) -> None:
        for pair in pairs:
            match pair:
                case [str(), value]:
                    self.node(value, depth + 1)
                case [int(), value] if not of_record:
                    self.node(value, depth + 1)
                case _:
                    self.refuse("expected a key and a value", pair)

    def _tensor(self, name: str, shape: list[Any], strides: list[Any]) -> None:
        dtype = DTYPES.get(name)
        if dtype is None:
            self.refuse("expected a dtype", name)
        if len(shape) != len(strides) or len(shape) > _MAX_DIMENSIONS:
            self.refuse("expected as many strides as sizes", [len(shape), len(strides)])
        numbers = [*shape, *strides]
        if not all(type(number) is int and 0 <= number < _MAX_SIZE for number in numbers):
            self.refuse("expected sizes and strides", numbers)
        self.size_bytes += span_elements(shape, strides) * dtype.itemsize


def _devices() -> list[str]:
    """The devices of this machine, other than CPUs."""
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count() if kind is not None else 0
    return [f"{kind}:{index}" for index in range(count)]
