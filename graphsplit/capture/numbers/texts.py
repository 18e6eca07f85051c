"""Numbers that symbols stand for, where code wants their text, or looks something up under them.

While a step is recorded ``h.mean().item()`` is a symbol, and so are a number that is lifted and a
size that may change. It counts and compares as a number does, or asks for one. But it has a text of
its own, ``u0``, and no hash. So code of the user's that writes such a number out, or takes it for a
key, asks for it::

    self.log.append(f"{h.mean().item()}")
    self.seen[str(self.step // 10)] += 1
    self.memo[h.argmax().item()]

Which kind of number it is it need not ask: ``isinstance(h.mean().item(), float)``. The text of a
tensor itself is that of all its values: only code that is kept whole has it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from graphsplit.capture.failures import TEXT_OF_TENSOR
from graphsplit.capture.observe import is_tracked
from graphsplit.frames import past_pythons
from graphsplit.guards.classes import is_watched_code
from graphsplit.guards.values import SYMBOLIC
from graphsplit.torch_ext.private import DataDependentOutputException, FakeTensor
from graphsplit.torch_ext.replaced import FORMAT, TEXT, replaced

_KINDS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_TEXTS_AND_KEYS = ("__repr__", "__str__", "__format__", "__hash__")


@contextmanager
def numbers_asked() -> Iterator[None]:
    """Let texts and keys ask for the numbers that they are made of, as an index does."""
    with ExitStack() as stack:
        for kind in SYMBOLIC:
            for name in _TEXTS_AND_KEYS:
                stack.enter_context(replaced(kind, name, _asking(kind, name)))
        stack.enter_context(replaced(*FORMAT, _format_tensor))
        stack.enter_context(replaced(*TEXT, _text_of_tensor))
        yield


def kind_of(one: Any) -> Any:
    """The class of a number that a symbol stands for; None if it is no symbol."""
    return _KINDS.get(type(one))


def is_instance(one: Any, kinds: Any, /) -> bool:
    """Stands for ``isinstance`` among the globals of code that is recorded."""
    kind = kind_of(one)
    return isinstance(one, kinds) or (kind is not None and issubclass(kind, kinds))


STAND_FOR_ISINSTANCE = {is_instance.__code__}
"""The code that the user's calls so; who asks a tensor for its class asks for the user."""


def _asking(kind: Any, name: str) -> Callable[..., Any]:
    plain = getattr(kind, name)

    @functools.wraps(plain)
    def called(number: Any, *rest: Any) -> Any:
        if _is_asked_by_user():
            return getattr(_KINDS[kind](number), name)(*rest)
        return plain(number, *rest)

    return called


_PLAIN_FORMAT: Any = torch.Tensor.__format__
_PLAIN_TEXT: Any = torch.Tensor.__repr__


@functools.wraps(_PLAIN_FORMAT)
def _format_tensor(tensor: Any, spec: str) -> str:
    """As torch formats a tensor of one number that has values."""
    if not isinstance(tensor, FakeTensor) or not _is_asked_by_user():
        return str(_PLAIN_FORMAT(tensor, spec))
    if tensor.dim():
        _need_no_text(tensor)
        return str(_PLAIN_FORMAT(tensor, spec))
    number = tensor.item()
    return format(_KINDS.get(type(number), type(number))(number), spec)


@functools.wraps(_PLAIN_TEXT)
def _text_of_tensor(tensor: Any, **how: Any) -> str:
    if isinstance(tensor, FakeTensor) and _is_asked_by_user():
        _need_no_text(tensor)
    return str(_PLAIN_TEXT(tensor, **how))


def _need_no_text(tensor: Any) -> None:
    if is_tracked(tensor):  # else its code is kept whole, and runs for a trial
        raise DataDependentOutputException(TEXT_OF_TENSOR)  # type: ignore[arg-type]


def _is_asked_by_user() -> bool:
    """Whether code of the user's wants it, or Python's own library for it; torch asks, too."""
    frame = past_pythons(sys._getframe(2))
    return frame is not None and is_watched_code(frame.f_code, frame.f_globals)
