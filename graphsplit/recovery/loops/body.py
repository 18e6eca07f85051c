"""The changes of a loop's body that would not be put back, by its text and in its frame.

A worker that starts its script anew comes to the loop with the variables that the lines before it
set. So what the body changes must be kept, or be made again in each round; else it is refused.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from graphsplit.checkpoint.states import Stateful
from graphsplit.errors import ConfigurationError
from graphsplit.frames import is_users
from graphsplit.recovery.loops.kept import CONTAINERS, can_be_kept
from graphsplit.recovery.loops.text import AroundText, BodyText, body_of
from graphsplit.torch_ext.attributes import writes_of

_PLAIN = (int, float, complex, str, bytes, bool, type(None), tuple)
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_MOST_ITEMS = 64
_DEEPEST = 3  # functions that functions of the body call


@dataclass(frozen=True)
class BroughtBack:
    """The objects that graphsplit brings back.

    Attributes:
        is_kept: Whether an object is in ``keep``, or belongs to what is.
        is_distributed: Whether a module is part of a distributed network.
        source: What the loop goes through.
    """

    is_kept: Callable[[Any], bool]
    is_distributed: Callable[[nn.Module], bool]
    source: Any


@functools.lru_cache(maxsize=64)
def _text(code: CodeType, line: int) -> BodyText | None:
    lines = linecache.getlines(code.co_filename)
    try:
        return body_of(ast.parse("".join(lines)), line)
    except SyntaxError:
        return None


class Body:
    """The body of one loop that runs.

    Args:
        frame: The function, or script, in which it stands.

    Raises:
        ConfigurationError: It is no ``for`` statement, or stands inside of ``enumerate``.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self.file = frame.f_code.co_filename
        found = _text(frame.f_code, frame.f_lineno)
        self.where = f"{self.file}:{frame.f_lineno}"
        if found is None:
            raise ConfigurationError(
                f"{self.where}: gs.loop is called where no `for` statement of a file goes through "
                f"it; which of its variables a lost worker needs cannot be found\n"
                f"  Fix: for batch in gs.loop(loader, keep=[...]): in a script's file."
            )
        if found.counted:
            raise ConfigurationError(
                f"{self.where}: {found.counted}(gs.loop(...)) begins to count anew on a worker "
                f"that comes back\n"
                f"  Fix: for i, batch in gs.loop(loader, numbered=True, ...): which goes on "
                f"counting."
            )
        self.text = found
        self._marks: dict[str, Any] | None = None

    @property
    def place(self) -> tuple[str, int]:
        """The file and the line."""
        return self.file, self.text.line

    def begin(self, outside: BroughtBack) -> None:
        """The loop begins.

        Raises:
            ConfigurationError: The body carries a variable; or it uses an object that has a state
                and is not kept.
        """
        for name in sorted(self.text.carried):
            raise ConfigurationError(
                f"{self.where}: the body of gs.loop carries {name!r} from one batch to the next; "
                f"a worker that comes back would begin it anew\n{_in_a_dictionary(name)}"
            )
        for label, value in self._values(self.text.read, outside):
            if _has_state(value, outside) and not isinstance(value, DataLoader):
                raise ConfigurationError(
                    f"{self.where}: the body of gs.loop uses {label}, a {type(value).__name__} "
                    f"with a state, which is not kept\n"
                    f"  Fix: gs.loop(..., keep=[..., {label}])"
                )
        self._marks = None

    def loaders(self) -> list[DataLoader[Any]]:
        """The loaders that the body uses, besides the one of the loop itself."""
        outside = BroughtBack(lambda one: False, lambda module: False, None)
        values = [value for _, value in self._values(self.text.read, outside)]
        return [one for one in values if isinstance(one, DataLoader)]

    def look(self, outside: BroughtBack) -> None:
        """A round begins: what the one before has left must be brought back.

        Raises:
            ConfigurationError: It has changed a variable, a container or an attribute.
        """
        self._marks = self._compared(self.text.read, outside, self._marks, "a batch")

    def look_around(
        self, around: AroundText, outside: BroughtBack, former: dict[str, Any] | None
    ) -> dict[str, Any]:
        """A plain loop around it comes to it, perhaps again.

        Raises:
            ConfigurationError: A worker that comes back could not go through it again.
        """
        for name in sorted(around.carried | around.left):
            raise ConfigurationError(
                f"{self.file}:{around.line}: {name!r} is carried, or read, by a loop around "
                f"gs.loop; a worker that comes back goes through that anew, with rounds of "
                f"gs.loop that are done left out\n  Fix: for epoch in gs.loop(range(epochs), "
                f"keep=[...]): around it, and {name!r} in a dictionary that is kept."
            )
        return self._compared(around.read, outside, former, "a round of the loop around it")

    def _compared(
        self,
        names: frozenset[str],
        outside: BroughtBack,
        former: dict[str, Any] | None,
        by: str,
    ) -> dict[str, Any]:
        marks = {label: _mark(value) for label, value in self._values(names, outside)}
        for label, mark in marks.items() if former is not None else ():
            if former is not None and label in former and former[label] != mark:
                raise ConfigurationError(
                    f"{self.where}: {by} changes {label}, which is not kept; a worker that comes "
                    f"back would have it as it was before the loop\n{_in_a_dictionary(label)}"
                )
        return marks

    def _values(self, names: frozenset[str], outside: BroughtBack) -> Iterator[tuple[str, Any]]:
        seen = _Seen(outside)
        local, others = self._frame.f_locals, self._frame.f_globals
        for name in sorted(names):
            if name in local or name in others:
                value = local[name] if name in local else others[name]
                yield from seen.values(name, value, depth=0)


@dataclass
class _Seen:
    """Goes through what a body can reach by name, each object once."""

    outside: BroughtBack
    done: set[int] = field(default_factory=set)

    def values(self, label: str, value: Any, *, depth: int) -> Iterator[tuple[str, Any]]:
        if isinstance(value, _PLAIN):
            yield label, value
            return
        if id(value) in self.done or value is self.outside.source:
            return
        is_kept = self.outside.is_kept(value)
        if is_kept and not isinstance(value, nn.Module):
            return
        self.done.add(id(value))
        if isinstance(value, nn.Module):
            if not is_kept:
                yield label, value
            yield from self._of_module(label, value, is_kept=is_kept, depth=depth)
        elif isinstance(value, MethodType) and is_users(value.__func__.__code__.co_filename):
            yield from self.values(f"{label}.__self__", value.__self__, depth=depth)
            yield from self._of_function(value.__func__, depth)
        elif isinstance(value, FunctionType):
            if is_users(value.__code__.co_filename):
                yield from self._of_function(value, depth)
        elif _is_of_users_class(value) and not isinstance(value, Stateful):
            yield label, value
            for name, inner in list(vars(value).items()):
                yield from self.values(f"{label}.{name}", inner, depth=depth)
        else:
            yield label, value

    def _of_module(
        self, label: str, module: nn.Module, *, is_kept: bool, depth: int
    ) -> Iterator[tuple[str, Any]]:
        """Plain attributes: snapshots have those of distributed networks, and extra states."""
        if self.outside.is_distributed(module):
            return
        has_extra = type(module).get_extra_state is not nn.Module.get_extra_state
        if _is_of_users_class(module) and not (is_kept and has_extra):
            forward = type(module).forward
            if isinstance(forward, FunctionType):
                yield from self._of_function(forward, depth)
            for name, inner in list(vars(module).items()):
                if name not in _OF_MODULES and not (is_kept and name == "training"):
                    yield from self.values(f"{label}.{name}", inner, depth=depth)
        for name, child in module.named_children():
            if id(child) not in self.done:
                self.done.add(id(child))
                yield from self._of_module(f"{label}.{name}", child, is_kept=is_kept, depth=depth)

    def _of_function(self, function: Any, depth: int) -> Iterator[tuple[str, Any]]:
        if depth >= _DEEPEST:
            return
        found = inspect.getclosurevars(function)
        for name, value in {**found.globals, **found.nonlocals}.items():
            yield from self.values(name, value, depth=depth + 1)


def _is_of_users_class(value: Any) -> bool:
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    return file is not None and is_users(file) and "site-packages" not in file


def _has_state(value: Any, outside: BroughtBack) -> bool:
    """Whether an object has a state that would have to be kept."""
    if isinstance(value, type) or inspect.ismodule(value):
        return False
    if isinstance(value, nn.Module):
        if outside.is_distributed(value):
            return False
        return any(True for _ in value.parameters()) or any(True for _ in value.buffers()) or (
            hasattr(value, "_update_count"))  # fmt: skip
    return type(value) not in CONTAINERS and can_be_kept(value)


def _mark(value: Any) -> Any:
    """Something that is another one when a value was changed; None where that is not seen."""
    if isinstance(value, _PLAIN):
        return repr(value) if isinstance(value, (float, complex, tuple)) else value
    if type(value) is torch.Tensor:
        return id(value), writes_of(value)
    if isinstance(value, (list, deque)):
        return id(value), len(value), _items(list(value)[-_MOST_ITEMS:])
    if isinstance(value, dict):
        return id(value), len(value), _items(list(value.values())[:_MOST_ITEMS])
    if isinstance(value, set):
        return id(value), len(value)
    return None


def _items(values: list[Any]) -> list[Any]:
    return [repr(one) if isinstance(one, _PLAIN) else id(one) for one in values]


def _in_a_dictionary(label: str) -> str:
    name = label.rpartition(".")[2]
    return (
        f"  Fix: keep it in a dictionary: counts = {{{name!r}: ...}} before the loop, "
        f"counts[{name!r}] in its body, and gs.loop(..., keep=[..., counts]); or give its class "
        f"state_dict() and load_state_dict(), a module a buffer, and keep the object. What hooks "
        f"collect, empty at the end of the body."
    )
