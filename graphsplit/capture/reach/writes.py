"""Code that may write to what it can reach: as far as can be told without running it.

Most of what is kept whole only computes. What it can reach need not be looked at after each step.
"""

from __future__ import annotations

import dis
import functools
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from graphsplit.capture.reach.names import names_in
from graphsplit.capture.reach.reach import is_of_library
from graphsplit.torch_ext.private import ScriptMethod, ScriptModule

_STORES = ("STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF")
_ENDS = ("DELETE_ATTR", "DELETE_SUBSCR", "DELETE_GLOBAL", "DELETE_NAME", "DELETE_DEREF")
_WRITING = frozenset((*_STORES, *_ENDS, "IMPORT_NAME"))
_READ_ONLY = (tuple, frozenset, bytes, types.MappingProxyType, torch.Tensor)
_CHANGING = (list, dict, OrderedDict, set, deque, bytearray, array, np.ndarray)
# Methods that change what they belong to.
_METHODS = frozenset(
    name
    for name in {name for kind in _CHANGING for name in dir(kind)}
    if not (name.startswith("__") or any(hasattr(kind, name) for kind in _READ_ONLY))
) | {"add", "clear", "fill", "put", "resize", "set", "sort", "train", "eval", "__setitem__"}
_NORMS = frozenset(("batch_norm", "native_batch_norm", "instance_norm"))  # running statistics
_OF_MODULES = frozenset(name for name in dir(nn.Module) if name.startswith(("register_", "set_")))
_BUILTIN = frozenset(("setattr", "delattr", "vars", "globals", "exec", "eval", "next"))
_NAMES = _METHODS | _NORMS | _OF_MODULES | _BUILTIN | {"__dict__", "__setattr__", "add_module"}
_PURE = ("torch", "math", "cmath", "builtins", "typing", "_operator", "__future__")
_OF_FUNCTIONS = ("forward", "setup_context", "backward", "vjp", "jvp")


def may_write(seen: Iterable[Any]) -> bool:
    """Whether some of the code that was met may write to more than what it makes."""
    met = list(seen)
    if any(isinstance(one, (ScriptModule, ScriptMethod)) for one in met):
        return True
    functions = [one for one in met if isinstance(one, types.FunctionType)]
    making = set(map(id, _with_contexts(met)))
    return any(
        _writes(one.__code__, id(one) in making or one.__name__ == "__init__")
        or any(map(_is_foreign, _globals_of(one)))
        for one in functions
        if not is_of_library(one.__module__)
    )


def _with_contexts(seen: Iterable[Any]) -> Iterator[Any]:
    """Functions whose first argument is a context that autograd has made for the call."""
    for kind in seen:
        if isinstance(kind, type) and issubclass(kind, torch.autograd.Function):
            for name in _OF_FUNCTIONS:
                held = vars(kind).get(name)
                yield getattr(held, "__func__", held)


def _globals_of(function: types.FunctionType) -> Iterator[Any]:
    held = function.__globals__
    return (held[name] for name in names_in(function.__code__).every if name in held)


def _is_foreign(value: Any) -> bool:
    """Whether this is a library, or a function of one, that may change what it is given."""
    if isinstance(value, types.ModuleType):
        name = value.__name__
    elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        name = value.__module__ or "torch"
    else:
        return False
    return is_of_library(name) and name.partition(".")[0] not in _PURE


@functools.lru_cache(maxsize=1 << 12)
def _writes(code: types.CodeType, is_making: bool) -> bool:
    """Whether code has an operation that writes.

    Args:
        code: The code.
        is_making: Whether its first argument is new: what is written to that is nobody else's.
    """
    before: Any = None
    for one in dis.get_instructions(code):
        if one.opname in _WRITING or _is_in_place(one):
            return True
        is_write = one.opname == "STORE_ATTR" or one.argval in _NAMES
        is_own = one.opname == "STORE_ATTR" or one.argval in _OF_MODULES
        if is_write and not (is_own and is_making and _is_first(before, code)):
            return True
        if isinstance(one.argval, types.CodeType) and _writes(one.argval, is_making=False):
            return True
        before = one
    return False


def _is_in_place(one: dis.Instruction) -> bool:
    """Whether this is ``+=``, takes a method such as ``add_``, or hands ``out=`` on."""
    if isinstance(one.argval, str):
        is_variable = "FAST" in one.opname  # ``for _ in ...``
        return one.argval.endswith("_") and not (one.argval.endswith("__") or is_variable)
    is_operator = one.opname.startswith("INPLACE") or one.opname == "BINARY_OP"
    hands_out = isinstance(one.argval, tuple) and "out" in one.argval
    return hands_out or (is_operator and one.argrepr.endswith("="))


def _is_first(loaded: Any, code: types.CodeType) -> bool:
    """Whether an instruction loads the first argument of its code, last of what it loads."""
    names = loaded.argval if isinstance(loaded.argval, tuple) else (loaded.argval,)
    return loaded.opname.startswith("LOAD_FAST") and names[-1:] == code.co_varnames[:1]
