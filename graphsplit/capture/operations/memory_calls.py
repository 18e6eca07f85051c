"""In-place operations without their side effect: what runs where memory lies on several workers.

Memory that operations modify on several workers cannot be one piece of memory. There every write
makes a new *version* of it instead, and all that comes after reads that version::

    y = zeros(4, 2)                     y  = zeros(4, 2)
    v = y[:, 0]                         v  = y[:, 0]
    v.copy_(a)                   =>     y1 = WriteToCopy(copy_)(y, a)
    y[:, 1].copy_(b)                    y2 = WriteToCopy(copy_)(y1, b)
    v + y                               v2 = ViewAgain(y2);  v2 + y2

`WriteToCopy` copies the memory, takes the view of the copy that was written to, and runs the very
operation on it in place: the kernel and the backward are those of eager mode. `ViewAgain` takes a
view as autograd does when it finds that the memory under it was modified. `KeepVersion` puts the
last version of a parameter or buffer back where it lives.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphsplit.capture.operations.regions import ORDINARY, Region, in_region
from graphsplit.torch_ext.fakes import formed_like


@dataclass(frozen=True)
class Outside:
    """Stands among arguments for an operand that comes from outside."""

    index: int


@dataclass(frozen=True)
class Inside:
    """Stands among arguments for a view of the copy."""

    index: int


@dataclass(frozen=True)
class _Itself:
    """Stands among a view's arguments for the tensor it is a view of."""


ITSELF = _Itself()


@dataclass(frozen=True)
class Taken:
    """One operation that takes a view (or an element of a tuple of views).

    Attributes:
        target: The operation.
        args: Its arguments, with ``ITSELF`` and ``Outside`` for tensors and numbers.
        kwargs: Its keyword arguments.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def of(self, itself: Any, operands: Sequence[Any]) -> Any:
        """Take the view."""

        def fill(marker: Any) -> Any:
            return operands[marker.index] if isinstance(marker, Outside) else itself

        return self.target(*filled(self.args, fill), **filled(self.kwargs, fill))


@dataclass(frozen=True)
class Strided:
    """Views that differ from what they are views of in sizes, strides and offset only.

    Autograd keeps of them nothing but these, when memory under them is modified.
    """

    views: tuple[Taken, ...]

    def of(self, base: torch.Tensor, operands: Sequence[Any]) -> torch.Tensor:
        """Take the view."""
        with torch.no_grad():
            found: Any = base.detach()
            for view in self.views:
                found = view.of(found, operands)
        return base.as_strided(found.size(), found.stride(), found.storage_offset())


@dataclass(frozen=True)
class Placed:
    """A view of which only the layout is known, the offset relative to the memory's start."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, base: torch.Tensor, operands: Sequence[Any]) -> torch.Tensor:
        """Take the view."""
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


@dataclass(frozen=True)
class Changed:
    """A view that reads its memory in another way: as complex numbers, say."""

    view: Taken

    def of(self, base: torch.Tensor, operands: Sequence[Any]) -> torch.Tensor:
        """Take the view."""
        found: torch.Tensor = self.view.of(base, operands)
        return found


@dataclass(frozen=True)
class Detached:
    """The same memory, apart from autograd."""

    def of(self, base: torch.Tensor, operands: Sequence[Any]) -> torch.Tensor:
        """Take the view."""
        return base.detach()


Step = Strided | Placed | Changed | Detached


class MemoryCall:
    """The function of a node that was added, or put in place of an in-place operation.

    Args:
        label: What it is, for people.
        is_random: Whether it draws from the default generator.
    """

    def __init__(self, label: str, *, is_random: bool = False) -> None:
        self.label = label
        self.is_random = is_random
        # The generated code of a graph names what it calls.
        self.__name__ = self.__qualname__ = "".join(c if c.isalnum() else "_" for c in label)
        self.__module__ = "graphsplit_memory"

    def __str__(self) -> str:
        return self.label

    def __call__(self, *operands: Any) -> Any:
        """Run it."""
        raise NotImplementedError

    def as_taken(self, *operands: Any) -> Any:
        """Run it, but in a branch as if that were taken: for asking, on tensors without values."""
        return self(*operands)

    def aliased(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments whose memory its results may share."""
        return ()


class ViewAgain(MemoryCall):
    """Takes a view of a new version: ``(memory, *operands of the view) -> view``."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        super().__init__("view_again")
        self._steps = steps

    def __call__(self, *operands: Any) -> torch.Tensor:
        """Take the view."""
        base, *others = operands
        return _view(base, self._steps, others)

    def aliased(self, args: Sequence[Any]) -> Sequence[Any]:
        """The memory."""
        return args[:1]


class WriteToCopy(MemoryCall):
    """Runs an in-place operation on copies: ``(memories, operands) -> (*results, *versions)``.

    What it returns is no tuple if it is one tensor.

    Args:
        target: The in-place operation.
        args: Its arguments, with ``Inside`` and ``Outside`` for tensors and numbers.
        kwargs: Its keyword arguments.
        views: For each ``Inside``: which memory it is a view of, and how to take it.
        kept: Which of the operation's results to return: positions in the tuple that it returns,
            0 if it returns one tensor.
        region: The blocks that the operation stands in.
        is_random: Whether it draws from the default generator.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        views: tuple[tuple[int, tuple[Step, ...]], ...],
        kept: tuple[int, ...],
        region: Region,
        is_random: bool,
    ) -> None:
        super().__init__(f"write_to_copy[{target}]", is_random=is_random)
        self.target = target
        self._args = args
        self._kwargs = kwargs
        self._views = views
        self._kept = kept
        self._region = region

    def running(self, target: Callable[..., Any]) -> WriteToCopy:
        """The same with another function in the operation's place."""
        made = copy.copy(self)
        made.target = target
        return made

    def __call__(self, *operands: Any) -> Any:
        """Copy, and run the operation."""
        memories, others = operands
        copies = [copy_of(memory) for memory in memories]
        inside = [_view(copies[index], steps, others) for index, steps in self._views]

        def fill(marker: Any) -> Any:
            return (others if isinstance(marker, Outside) else inside)[marker.index]

        args, kwargs = filled(self._args, fill), filled(self._kwargs, fill)
        if self._region == ORDINARY:
            results = self.target(*args, **kwargs)
        else:
            with in_region(self._region, grad_enabled=torch.is_grad_enabled()):
                results = self.target(*args, **kwargs)
        results = results if isinstance(results, (tuple, list)) else (results,)
        found = (*(results[index] for index in self._kept), *copies)
        return found[0] if len(found) == 1 else found


class KeepVersion(MemoryCall):
    """Copies the last version to where it is kept: ``(kept, version) -> None``."""

    def __init__(self) -> None:
        super().__init__("keep_version")

    def __call__(self, *operands: Any) -> None:
        """Copy; where an operation gave its buffer another size, it has that from now on."""
        kept, version = operands
        with torch.no_grad():
            if kept.shape != version.shape:
                kept.resize_(version.shape)
            kept.copy_(version)


class GiveBackVersion(MemoryCall):
    """Copies the last version of an input to the caller's tensor: ``(input, version) -> None``."""

    def __init__(self) -> None:
        super().__init__("give_back_version")

    def __call__(self, *operands: Any) -> None:
        """Copy."""
        given, version = operands
        with torch.no_grad():
            given.copy_(version)


def copy_of(memory: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, through which gradients flow unchanged.

    Where autograd is off, what asks for a gradient (a parameter) goes on asking: some operations
    choose their kernel by it.
    """
    copy = memory.clone()
    if copy.stride() != memory.stride():
        copy = formed_like(memory).copy_(memory)
    if memory.requires_grad and not copy.requires_grad:
        copy.requires_grad_(True)
    return copy


def _view(base: torch.Tensor, steps: Sequence[Step], operands: Sequence[Any]) -> torch.Tensor:
    for step in steps:
        base = step.of(base, operands)
    return base


_MARKERS = (Inside, Outside, _Itself)


def filled(
    value: Any, fill: Callable[[Any], Any], kinds: type | tuple[type, ...] = _MARKERS
) -> Any:
    """Replace the markers, or what else is of some kinds, in nested arguments."""
    if isinstance(value, kinds):
        return fill(value)
    if isinstance(value, (tuple, list)):
        kind = tuple if isinstance(value, tuple) else list  # torch.fx has kinds of its own
        return kind([filled(item, fill, kinds) for item in value])
    if isinstance(value, dict):
        return {key: filled(item, fill, kinds) for key, item in value.items()}
    return value
