"""Attributes that users hang on parameters and buffers: ``w.lr_mult = 2``, ``w.is_frozen``.

While a step is recorded, tensors without values stand for the state, and have none of these. What
they are asked for and do not have is looked up where it is; what they are given is put there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphsplit.frames import is_own
from graphsplit.guards.classes import is_watched_code
from graphsplit.guards.places import Place, entry
from graphsplit.guards.values import MISSING
from graphsplit.torch_ext.attributes import buffers_of, parameters_of
from graphsplit.torch_ext.private import FakeTensor

Tensors = Mapping[tuple[int, str], torch.Tensor]


def tensors_of(modules: Iterable[nn.Module]) -> dict[tuple[int, str], torch.Tensor]:
    """Parameters and buffers, by the identity of their module and their name."""
    return {
        (id(module), name): tensor
        for module in modules
        for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items())
        if tensor is not None
    }


@contextmanager
def tensor_attributes_seen(
    standing: Tensors,
    state: Tensors,
    label_of: Callable[[int], str],
    note: Callable[[Place, bool], None],
) -> Iterator[None]:
    """See the attributes of the state that code reads and writes inside.

    Args:
        standing: What stands for the state inside.
        state: The state itself.
        label_of: The name for people of the module with an identity.
        note: ``note(place, is_read)``: called before an attribute is read, or takes another value.
    """
    pairs = {
        id(stand_in): (stand_in, state[key], f"{label_of(key[0])}.{key[1]}")
        for key, stand_in in standing.items()
        if key in state and isinstance(stand_in, FakeTensor)
    }
    own = {number: set(vars(stand_in)) for number, (stand_in, _, _) in pairs.items()}

    def get(tensor: FakeTensor, name: str) -> Any:
        held: Any = None
        if id(tensor) in pairs:
            _, real, label = pairs[id(tensor)]
            held = object.__getattribute__(real, "__dict__")
            if name in held or _is_asked_by_user():
                note(entry(held, name, f"{label}.{name}"), True)
        if held is None or name not in held:
            raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {name!r}")
        return held[name]

    kind: Any = FakeTensor
    kind.__getattr__ = get
    try:
        yield
    finally:
        del kind.__getattr__
        for number, (stand_in, real, label) in pairs.items():
            held = object.__getattribute__(real, "__dict__")
            for name in vars(stand_in).keys() - own[number]:
                note(entry(held, name, f"{label}.{name}"), False)
                held[name] = vars(stand_in).pop(name, MISSING)


def _is_asked_by_user() -> bool:
    """Whether it is the user's code that asks, not what torch does on the way."""
    frame: Any = sys._getframe(2)
    while frame.f_back is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return is_watched_code(frame.f_code, frame.f_globals)
