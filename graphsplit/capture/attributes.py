"""What forward leaves behind in the network's attributes, apart from parameters and buffers.

A captured graph computes values; it does not run the Python code again. So an attribute that
forward sets keeps the value it was given last::

    self.last = h                 a tensor: put back as it was, since nobody will compute it
    self.length = x.shape[1]      settles: the same after every forward, and kept
    self.calls += 1               changes every time: refused
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from graphsplit.capture.observe import storage_of
from graphsplit.errors import CaptureError

_NOT_THE_USERS = frozenset(
    (
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "training",
        "_call_impl",
    )
)
_PLAIN = (bool, int, float, str)
_CONTAINERS = (list, dict, set)


@dataclass(frozen=True)
class Change:
    """A plain attribute that forward has changed.

    Attributes:
        module: Whose it is.
        name: Its name there.
        label: Its name as the user knows it.
        old: Its value before.
        new: Its value after.
    """

    module: nn.Module
    name: str
    label: str
    old: Any
    new: Any

    def make(self) -> None:
        """Give the attribute its new value."""
        vars(self.module)[self.name] = self.new


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
        self._paths = {m: path.partition(".")[2] for path, m in root.named_modules()}

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
        """Take away what was left: tensors that have no values, and numbers."""
        for module, before in self._before.items():
            for name in {**before, **_attributes(module)}:
                new = vars(module).get(name)
                if module in self._whole or _holds_fake(new) or name in before:
                    _restore(module, name, before)

    def changed(self, constants: Collection[Any]) -> list[Change]:
        """Attributes with plain values that are not what they were.

        Args:
            constants: Tensors that the graph reads and that are neither parameters nor buffers.

        Raises:
            CaptureError: A tensor that the graph reads was replaced.
        """
        read = {storage_of(c) for c in constants if isinstance(c, torch.Tensor)}
        found: list[Change] = []
        for module, after in self._after.items():
            if module in self._whole:
                continue
            for name, new in after.items():
                old = self._before[module].get(name)
                if isinstance(new, FakeTensor) and _is_among(old, read):
                    raise self._replaced_tensor(module, name)
                if type(old) in _PLAIN and type(old) is type(new) and old != new:
                    found.append(Change(module, name, self._name(module, name), old, new))
        return found

    def _name(self, module: nn.Module, name: str) -> str:
        path = self._paths.get(module, "")
        return f"{path}.{name}" if path else name

    def _replaced_tensor(self, module: nn.Module, name: str) -> CaptureError:
        return CaptureError(
            f"{type(module).__name__} assigns a new tensor to its attribute "
            f"{self._name(module, name)!r} in forward; the captured graph would read the old one "
            f"at every step\n"
            f"  Fix: register it with register_buffer, and change it in place, as in "
            f"self.{name}.copy_(new); or keep the module whole with gs.opaque."
        )


def changing_attributes(changes: Collection[Change]) -> CaptureError:
    """What to say of attributes that every forward changes."""
    listed = ", ".join(f"{c.label} from {c.old!r} to {c.new!r}" for c in changes)
    return CaptureError(
        f"forward changes attributes of the network, and the captured graph would compute with "
        f"what they were when it was captured:\n  {listed}\n"
        f"  Fix: count in a buffer that is changed in place, in a callback, or keep the module "
        f"whole with gs.opaque."
    )


def _is_among(value: Any, storages: Collection[int]) -> bool:
    return isinstance(value, torch.Tensor) and storage_of(value) in storages


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: _copy(value) for name, value in vars(module).items() if _is_users(name)}


def _is_users(name: str) -> bool:
    return name not in _NOT_THE_USERS and not (name.endswith("_hooks") and name.startswith("_"))


def _copy(value: Any) -> Any:
    return type(value)(value) if type(value) in _CONTAINERS else value


def _restore(module: nn.Module, name: str, before: dict[str, Any]) -> None:
    if name not in before:
        vars(module).pop(name, None)
        return
    old, held = before[name], vars(module).get(name)
    if isinstance(held, list) and type(old) is list:
        held[:] = old
    elif isinstance(held, (dict, set)) and type(old) is type(held):
        held.clear()
        held.update(old)
    else:
        vars(module)[name] = old


def _holds_fake(value: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in itertools.islice(_leaves(value), 1000))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        yield from pytree.tree_leaves(value)
    elif isinstance(value, set):
        yield from value
