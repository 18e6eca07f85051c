"""Values that forward leaves in the network's attributes, apart from parameters and buffers.

A captured graph computes values; it does not run the Python code again. So what forward leaves is
found out when it is captured, and put back as it was::

    self.last = h                 a tensor where none was: it is kept (kept_tensors.py)
    self.h = h.detach()           a tensor where one of its form was: that becomes a buffer
    self.length = x.shape[1]      a plain value: left again at every step, on every worker
    self.is_scaled = True         the same; and if forward reads it, the next step has another graph
    self.calls += 1               never settles: refused
"""

from __future__ import annotations

import copy
import enum
import itertools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphsplit.guards.values import MISSING, SYMBOLIC, freeze, put_into
from graphsplit.torch_ext.attributes import NOT_THE_USERS
from graphsplit.torch_ext.private import FakeTensor, pytree

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)
_CONTAINERS = (list, dict, set)
_MAX_LEAVES = 1000

Key = tuple[str, str]  # (path of a module, name of its attribute)


class Attributes:
    """The attributes of a network's modules at one moment.

    Args:
        root: The module that holds all others.
        whole: Modules that are kept whole: their code runs at every step, and may change what it
            likes; what a run on fake tensors changed is put back.
    """

    def __init__(self, root: nn.Module, whole: Collection[nn.Module]) -> None:
        self._root = root
        inside = {inner for module in whole for inner in module.modules()}
        self._whole = frozenset(inside)
        self._after: dict[nn.Module, dict[str, Any]] = {}
        self._before = {m: _attributes(m) for m in root.modules()}
        self._paths = {m: path for path, m in root.named_modules()}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what forward leaves, before torch puts most of it back."""

        def note(module: nn.Module, args: Any, outputs: Any) -> None:
            self._after = {module: _attributes(module) for module in self._before}

        handle = self._root.register_forward_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def put_back(self) -> None:
        """Take away what was left: tensors that have no values, and plain values."""
        for module, before in self._before.items():
            for name in {**before, **_attributes(module)}:
                new = vars(module).get(name)
                was_made = name not in before and not _is_plain(new)
                if module in self._whole or _holds_fake(new) or not was_made:
                    _restore(module, name, before)

    def replaced_tensors(self) -> list[Key]:
        """Attributes with a tensor for which forward puts one of the same form there.

        Where tensors of another form are left, or others than there were, see kept_tensors.py.
        """
        return [
            (self._paths[module], name)
            for module, after in self._after.items()
            if module not in self._whole
            for name, new in after.items()
            if isinstance(new, FakeTensor)
            and isinstance(self._before[module].get(name), torch.Tensor)
        ]


def _is_plain(value: Any) -> bool:
    if value is MISSING or isinstance(value, _PLAIN):
        return True
    if not isinstance(value, (list, tuple, dict, set, frozenset)):
        return False
    inside: Any = (*value.keys(), *value.values()) if isinstance(value, dict) else value
    return len(inside) <= _MAX_LEAVES and all(map(_is_plain, inside))


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: _copy(value) for name, value in list(vars(module).items()) if is_of_user(name)}


def is_of_user(name: str) -> bool:
    """Whether an attribute of a module is the user's own, not PyTorch's."""
    return name not in NOT_THE_USERS


def _copy(value: Any) -> Any:
    if type(value) not in _CONTAINERS:
        return value
    return copy.deepcopy(value) if _is_plain(value) else type(value)(value)


def _restore(module: nn.Module, name: str, before: dict[str, Any]) -> None:
    if name not in before:
        vars(module).pop(name, None)
        return
    old, held = before[name], vars(module).get(name)
    if held is not old:  # else not copied: what was read of it is put back by who saw that
        vars(module)[name] = put_into(freeze(old), held)


def _holds_fake(value: Any) -> bool:
    found = itertools.islice(_leaves(value), _MAX_LEAVES)
    return any(isinstance(leaf, (FakeTensor, *SYMBOLIC)) for leaf in found)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (torch.Tensor, *SYMBOLIC)):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        yield from pytree.tree_leaves(value)
    elif isinstance(value, set):
        yield from value
