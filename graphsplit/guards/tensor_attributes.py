"""Attributes that users hang on parameters and buffers: ``w.lr_mult = 2``, ``w.is_frozen``.

So are those of a class that they derive from ``nn.Parameter``; torch's methods it must leave alone.
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

from graphsplit.errors import CaptureError
from graphsplit.frames import is_own
from graphsplit.guards.classes import is_watchable_of_tensors, is_watched_code
from graphsplit.guards.places import Place, PlaceKind, entry
from graphsplit.guards.values import MISSING
from graphsplit.torch_ext.attributes import buffers_of, parameters_of
from graphsplit.torch_ext.private import FakeTensor, is_traceable_wrapper_subclass
from graphsplit.torch_ext.stand_ins import StandIn, WatchedTensor

Tensors = Mapping[tuple[int, str], torch.Tensor]
# What a class of a user's may say anew: torch calls none of it for what a step computes.
_SAID_ANEW = frozenset(
    (
        *("__init__", "__new__", "__doc__", "__module__", "__dict__", "__weakref__", "__slots__"),
        *("__repr__", "__hash__", "__annotations__", "__deepcopy__"),
        *("__reduce__", "__reduce_ex__", "__setstate__"),
    )
)


def tensors_of(modules: Iterable[nn.Module]) -> dict[tuple[int, str], torch.Tensor]:
    """Parameters and buffers, by the identity of their module and their name."""
    return {
        (id(module), name): tensor
        for module in modules
        for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items())
        if tensor is not None
    }


def users_classes(tensor: torch.Tensor) -> tuple[type, ...]:
    """The classes of the user's that a parameter or buffer is of: ``class W(nn.Parameter)``."""
    if type(tensor) in (torch.Tensor, nn.Parameter) or isinstance(tensor, (StandIn, WatchedTensor)):
        return ()
    one: object = tensor
    if is_traceable_wrapper_subclass(one):
        return ()
    return tuple(filter(is_watchable_of_tensors, type(tensor).__mro__))


def check_classes(state: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse classes of tensors whose own methods a graph would not call.

    Args:
        state: The name for people of each parameter and buffer, and the tensor.

    Raises:
        CaptureError: A class has a method or an operator of torch.Tensor's anew.
    """
    for label, tensor in state:
        for kind in users_classes(tensor):
            for name in vars(kind).keys() - _SAID_ANEW:
                if hasattr(torch.Tensor, name):
                    raise CaptureError(
                        f"{label} is a tensor of class {kind.__qualname__}, which has a "
                        f"{name} of its own; the captured graph would call PyTorch's\n"
                        f"  Fix: call it by a name that torch.Tensor does not have, or make it a "
                        f"function, and the tensor a plain nn.Parameter or buffer."
                    )


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
            for kind in () if name in held else users_classes(real):
                note(Place(PlaceKind.CLASS, kind, name, f"{kind.__qualname__}.{name}"), True)
                if name in vars(kind):
                    found = vars(kind)[name]
                    of = getattr(type(found), "__get__", None)
                    return found if of is None else of(found, tensor, type(real))
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
