"""Identities and classes of tensors, as code that is recorded asks for them.

Other objects stand for parameters and buffers then, of a class of their own. What a script has put
under ``id(weight)``, or under the weight itself, would not be found, and ``type(h)`` is not
``torch.Tensor``. So code of the user's is answered as in eager mode::

    id(self.fc.weight) in self.frozen
    self.rates.get(self.fc.weight, 1.0)
    type(x) is torch.Tensor
    x.__class__ is torch.Tensor
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from graphsplit.capture.numbers.texts import (
    STAND_FOR_ISINSTANCE,
    is_instance,
    kind_of,
    numbers_asked,
)
from graphsplit.frames import is_own
from graphsplit.guards.classes import is_watched_code
from graphsplit.guards.tensor_attributes import Tensors
from graphsplit.text import note_identity
from graphsplit.torch_ext.private import FakeTensor
from graphsplit.torch_ext.replaced import EQUAL, HASH, replaced

_IS_PARAMETER = type(nn.Parameter).__instancecheck__.__code__
_STANDS_FOR = "_graphsplit_stands_for"  # of a tensor without values: the parameter or buffer


def stand_for(standing: Tensors, state: Tensors) -> None:
    """Note for which parameters and buffers tensors without values stand, by place."""
    for key, stand_in in standing.items():
        if key in state and isinstance(stand_in, FakeTensor):
            setattr(stand_in, _STANDS_FOR, state[key])


@contextmanager
def as_keys() -> Iterator[None]:
    """Let what stands for a tensor or a number be found under it in dictionaries and sets."""
    with replaced(*EQUAL, _is_equal), replaced(*HASH, _hash_of), numbers_asked():
        yield


def _real_of(one: Any) -> Any:
    """The tensor for which one stands; anything else as it is."""
    return vars(one).get(_STANDS_FOR, one) if isinstance(one, FakeTensor) else one


def _identity(one: Any, /) -> int:
    return note_identity(id(_real_of(one)))


def _class_of(one: Any) -> type:
    real = _real_of(one)
    if isinstance(real, FakeTensor):
        return nn.Parameter if isinstance(real, nn.Parameter) else torch.Tensor
    return kind_of(real) or type(real)


_PLAIN_HASH: Any = torch.Tensor.__hash__
_PLAIN_EQUAL: Any = torch.Tensor.__eq__


@functools.wraps(_PLAIN_HASH)
def _hash_of(one: torch.Tensor) -> int:
    """The hash of the tensor itself, but for torch's own code."""
    real, frame = _real_of(one), sys._getframe(1)
    if real is one:
        return int(_PLAIN_HASH(one))
    is_torchs = not is_own(frame.f_code.co_filename) and not is_watched_code(
        frame.f_code, frame.f_globals
    )
    return id(one if is_torchs else real)


@functools.wraps(_PLAIN_EQUAL)  # modes of torch functions know calls by this name
def _is_equal(one: torch.Tensor, other: Any) -> Any:
    is_same = one is not other and _real_of(one) is _real_of(other)
    return True if is_same else _PLAIN_EQUAL(one, other)


class _OfTypes(type):
    def __call__(cls, *args: Any, **options: Any) -> Any:
        is_asked = len(args) == 1 and not options
        return _class_of(args[0]) if is_asked else type(*args, **options)

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, type)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type)


class _Types(type, metaclass=_OfTypes):
    """Stands for ``type`` among the globals of code that is recorded."""

    def __class_getitem__(cls, kind: Any) -> Any:
        return type[kind]


def _asks_for_another(frame: FrameType) -> bool:
    """Whether code asks on: for a class derived from parameters, or in ``functools``."""
    is_one = frame.f_code is _IS_PARAMETER or frame.f_code in STAND_FOR_ISINSTANCE
    return is_one or frame.f_globals is vars(functools)


class _AnswersForClass(torch.Tensor):
    """Stands between the class of tensors without values and its base: ``isinstance`` asks too."""

    __slots__ = ()

    def _answer(self) -> type:
        frame: Any = sys._getframe(1)
        while _asks_for_another(frame):
            frame = frame.f_back
        is_users = is_watched_code(frame.f_code, frame.f_globals)
        return _class_of(self) if is_users else type(self)

    def _change(self, kind: type) -> None:
        object.__dict__["__class__"].__set__(self, kind)

    __class__: Any = property(_answer, _change)


@contextmanager
def classes_asked() -> Iterator[Callable[[], None]]:
    """Gives a function, after which ``x.__class__`` is answered until the block ends."""
    bases = FakeTensor.__bases__

    def answer() -> None:
        FakeTensor.__bases__ = (_AnswersForClass,)

    try:
        yield answer
    finally:
        if FakeTensor.__bases__ != bases:
            FakeTensor.__bases__ = bases


FUNCTIONS: dict[str, Any] = {"id": _identity, "type": _Types, "isinstance": is_instance}
"""Stand for Python's own functions among the globals of code that is recorded."""
