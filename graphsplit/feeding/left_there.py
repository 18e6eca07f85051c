"""Objects that stand for values which another worker has left, and which nobody can send.

A lock, an iterator, a lambda: what stood in its place before is another value than a process alone
would find there, so nothing is to read that. Whether code only caches something, nobody can know:
so it is no error to leave such a value, but to use it elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from graphsplit.errors import OwnershipError
from graphsplit.frames import is_trainers, is_users

_ARITHMETIC = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("lshift", "rshift", "and", "xor", "or"),
)
_USES = (
    *("call", "bool", "len", "length_hint", "iter", "next", "reversed", "contains", "getitem"),
    *("setitem", "delitem", "enter", "exit", "aenter", "aexit", "await", "aiter", "anext"),
    *("fspath", "bytes", "array", "reduce", "reduce_ex", "int", "float", "complex", "index"),
    *("round", "trunc", "floor", "ceil", "neg", "pos", "abs", "invert", "lt", "le", "gt", "ge"),
    *(f"{kind}{name}" for name in _ARITHMETIC for kind in ("", "r", "i")),
)
# What graphsplit, Python's library and torch ask of any object that they come by.
_ASKED_OF_ALL = ("getattribute", "setattr", "delattr", "eq", "ne", "hash", "repr", "str", "format")


class LeftThere:
    """A value that another worker has left: whatever the user's code does with it is an error.

    Only ``is``, ``type()`` and ``id()`` find this object, and what copies it gets it again.

    Args:
        what: Where it is in its holder, and its class.
        where: The holder, and the worker that has left it.
    """

    __slots__ = ("_what", "_where")

    def __init__(self, what: str, where: str) -> None:
        object.__setattr__(self, "_what", what)
        object.__setattr__(self, "_where", where)

    def __copy__(self) -> LeftThere:
        return self

    def __deepcopy__(self, memo: Any) -> LeftThere:
        return self


def _refuse(value: LeftThere, asked: str) -> NoReturn:
    what, where = (object.__getattribute__(value, name) for name in LeftThere.__slots__)
    raise OwnershipError(
        f"code kept whole has left {what}, in {where}, which cannot be sent: its value is not on "
        f"this worker (asked for by {asked})\n"
        f"  Fix: keep numbers, texts, tensors, containers of them or objects of your own classes "
        f"there; or read it on that worker alone."
    )


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(value: LeftThere, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(value, name)

    return refuse


def _refusing_users(name: str) -> Callable[..., Any]:
    usual = getattr(object, name)

    def refuse(value: LeftThere, *args: Any) -> Any:
        file = sys._getframe(1).f_code.co_filename
        is_passed_by = args == ("__class__",) and is_trainers(file)  # they look at all there is
        if is_users(file) and not is_passed_by:
            _refuse(value, args[0] if name == "__getattribute__" else name)
        return usual(value, *args)

    return refuse


for _name in (f"__{use}__" for use in _USES):
    setattr(LeftThere, _name, _refusing(_name))
for _name in (f"__{use}__" for use in _ASKED_OF_ALL):
    setattr(LeftThere, _name, _refusing_users(_name))
