"""Values that code kept whole leaves in Python, as they are sent to other workers.

Plain values as they are. Tensors, containers of these, and new objects in the place of others of
their class (``self.seen = replace(self.seen, n=...)``) are lists that begin with a mark.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from graphsplit.capture.reach.reach import is_of_library
from graphsplit.capture.state.kept_value import KeptValue
from graphsplit.planning.python_values import can_be_written
from graphsplit.tensor_meta import DTYPES
from graphsplit.torch_ext.stand_ins import StandIn

UNTOLD: Any = object()
_MARK = "\0left"
_TENSOR = "tensor"
_MAPPING = "mapping"
_SEQUENCES = {kind.__name__: kind for kind in (list, tuple, deque)}
_DEEPEST = 4


def told(value: Any, depth: int = 0) -> Any:
    """A value as it is sent; ``UNTOLD`` where it cannot be."""
    if can_be_written(value):
        return value
    kind, keys = type(value), []
    if kind in (torch.Tensor, nn.Parameter) and value.is_cpu and value.dtype in DTYPES.values():
        if value.layout is not torch.strided:
            return UNTOLD
        shape = [*value.shape] if value.requires_grad else None
        return [_MARK, _TENSOR, value.detach() if shape is None else value.new_empty(()), shape]
    if kind.__name__ in _SEQUENCES or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        name, keys, parts = kind.__name__, [value.maxlen] if kind is deque else [], [*value]
    elif kind is dict and all(map(can_be_written, value)):
        name, keys, parts = _MAPPING, [*value], [*value.values()]
    elif _is_plain_object(value):
        name, keys, parts = kind.__qualname__, [*vars(value)], [*vars(value).values()]
    else:
        return UNTOLD
    sent = [told(part, depth + 1) for part in parts] if depth < _DEEPEST else [UNTOLD]
    return UNTOLD if any(part is UNTOLD for part in sent) else [_MARK, name, keys, sent]


def _is_plain_object(value: Any) -> bool:
    is_thing = not isinstance(value, (type, torch.Tensor, nn.Module)) and not callable(value)
    return is_thing and hasattr(value, "__dict__") and not is_of_library(type(value).__module__)


def learned(sent: Any, there: Any, where: str) -> Any:
    """The value that was sent.

    Args:
        sent: What ``told`` gave.
        there: What stands in its place here.
        where: Where it is, for errors.
    """
    match sent:
        case ["\0left", "tensor", torch.Tensor() as tensor, shape]:
            if isinstance(there, StandIn) and type(there) is not KeptValue:
                return there  # it has an owner
            if shape is None:
                return tensor
            return KeptValue.of(tensor.expand(shape), where, "has a history, which stays there")
        case ["\0left", str(name), list(keys), list(parts)]:
            return _made(name, keys, parts, there, where)
    return sent


def _made(name: str, keys: Sequence[Any], parts: Sequence[Any], there: Any, where: str) -> Any:
    if name == _MAPPING:
        held = there if isinstance(there, dict) else {}
        pairs = zip(keys, parts, strict=True)
        return {key: learned(part, held.get(key), where) for key, part in pairs}
    kind = type(there)
    if name in _SEQUENCES:
        known = [*there] if kind.__name__ == name else []
        known += [None] * (len(parts) - len(known))
        made = [learned(part, one, where) for part, one in zip(parts, known, strict=False)]
        return _SEQUENCES[name](made, *keys)
    if kind.__qualname__ != name:  # the first object there, of a class that is not known here
        return there
    if isinstance(there, tuple):
        return type(there)(*(learned(p, one, where) for p, one in zip(parts, there, strict=True)))
    made = copy.copy(there)
    for key, part in zip(keys, parts, strict=True):
        vars(made)[key] = learned(part, vars(made).get(key), where)
    return made
