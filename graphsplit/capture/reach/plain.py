"""Plain Python values that two pieces of code can both reach: what one may change for the other.

A data set that changes what a loss reads must lead to it: by an attribute, a closure, a global.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import numpy as np
import torch

from graphsplit.capture.reach.holders import Holder
from graphsplit.capture.reach.reach import Walk, is_iterator

_MOST = 1 << 14  # holders on one walk: a trainer, or samples in a list, may lead to any number
_MOST_ITEMS = 1000
_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)


class _PlainWalk(Walk):
    """Goes to what is near first, and not for ever; past tensors, arrays and generators."""

    def run(self, roots: Iterable[Any]) -> tuple[list[Holder], list[Any]]:
        for root in roots:
            self._push(root, type(root).__name__)
        while self._waiting and len(self._found) < _MOST:
            self._visit(*self._waiting.popleft())
        return self._found, []

    def _visit(self, value: Any, name: str) -> None:
        if isinstance(value, types.GeneratorType):  # a loader may be one
            for inner in (value.gi_frame.f_locals if value.gi_frame is not None else {}).values():
                self._push(inner, name)
        elif not isinstance(value, (torch.Tensor, np.ndarray)) and not is_iterator(value):
            super()._visit(value, name)


def plain_values(readers: Iterable[Any], writers: Iterable[Any]) -> frozenset[str]:
    """The plain values that some code can reach and other code as well, each with a name.

    Two workers give equal names to what their like objects hold. Of a walk that would be too long
    the near part counts for readers; writers are then taken to reach everything.

    Args:
        readers: What reads: networks, losses.
        writers: What may change something: loaders.
    """
    reached = _PlainWalk(()).run(writers)[0]
    keys = {holder.key for holder in reached} if len(reached) < _MOST else None
    read = _PlainWalk(()).run(readers)[0]
    shared = (h for h in read if h.is_value and (keys is None or h.key in keys))
    return frozenset(line for number, h in enumerate(shared) for line in _lines(f"{number}", h))


def _lines(name: str, holder: Holder) -> Iterator[str]:
    for key, value in holder.entries().items():
        if isinstance(key, _PLAIN):
            yield f"{name} {holder.name}.{key!r}: {_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    # A tensor's class tells whether it lives elsewhere.
    kind = "tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    if isinstance(value, (list, tuple, set, frozenset)) and len(value) <= _MOST_ITEMS:
        texts = list(map(_text, value))
        return f"{kind} {sorted(texts) if isinstance(value, (set, frozenset)) else texts}"
    return kind
