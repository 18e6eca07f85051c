"""Values that in one process have the memory of a parameter's gradient or data, and here do not.

After ``p.grad = value`` both are one memory there. Where the parameter lives on another worker it
has a copy: a write into the value is refused, and so is a look at it once the copy was written to.
So is a look at a value that hooks keep, and that the network has modified in a memory of its own.
So is a write to a value with a history that a call has returned with another in its memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from graphsplit.errors import ConfigurationError
from graphsplit.tensor_meta import share_elements, span_elements, spans_meet
from graphsplit.torch_ext.attributes import storage_of, writes_of
from graphsplit.torch_ext.private import storage_use_count

OUTPUT = "output"  # that of a value that a call has returned, beside another in its memory
_WIDEST = 16  # bytes of an element
LEFT = "left"  # the name of a value that a call has left in Python, and a later one has modified


@dataclass
class Twin:
    """A value of which a parameter of another worker has a copy.

    Attributes:
        name: What was set, as errors show it: ``"grad"``.
        value: The value, or its shape.
        has: Whether a tensor is in the memory of the copy.
        mark: Gives what changes whenever the copy is written to by more than operations.
        at: What it gave when the copy was made.
        is_written: Whether an operation has written to the copy, or a backward added to it.
    """

    name: str
    value: torch.Tensor
    has: Callable[[torch.Tensor], bool] = lambda _: False
    mark: Callable[[], Any] = lambda: None
    at: Any = None
    is_written: bool = False

    def __post_init__(self) -> None:
        self.value, self.at = self.value.detach(), self.mark()

    @classmethod
    def of_input(cls, value: torch.Tensor, given: Any) -> Twin:
        """That of a value which a call returned, a view of an input in one process."""
        inner = getattr(given, "held", None)
        if inner is None:
            return cls(OUTPUT, value, mark=partial(writes_of, given))
        return cls(OUTPUT, value, partial(_overlap, inner.detach()))

    def is_held(self) -> bool:
        """Whether anything else has the value's memory."""
        return is_shared(self.value)


class Twins:
    """Those of one loop, by what was set of which parameter; empty in almost every loop."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Twin] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, parameter: torch.Tensor | None, twin: Twin) -> None:
        """Take note of a value that was copied, until nothing else has its memory any more."""
        self._known = {key: one for key, one in self._known.items() if one.is_held()}
        self._known[twin.name, id(twin.value if parameter is None else parameter)] = twin

    def forget(self, name: str, parameter: torch.Tensor) -> None:
        """Something else was set."""
        self._known.pop((name, id(parameter)), None)

    def check_read(self, tensor: torch.Tensor) -> None:
        """Refuse a look at what is out of date.

        Raises:
            ConfigurationError: It is.
        """
        for twin in self._of(tensor):
            if twin.is_written or twin.mark() != twin.at:
                raise _error(twin, "and written to since; now the value was looked at")

    def check_write(self, tensor: torch.Tensor) -> None:
        """Refuse a write that its copy would not see; take note of one into a copy.

        Raises:
            ConfigurationError: It is one.
        """
        for twin in self._of(tensor):
            raise _error(twin, "and now the value was written to")
        for twin in self._known.values():
            twin.is_written |= twin.has(tensor)

    def note_backward(self) -> None:
        """Gradients were added to in place."""
        for twin in self._known.values():
            twin.is_written |= twin.name == "grad"

    def _of(self, tensor: torch.Tensor) -> list[Twin]:
        return [twin for twin in self._known.values() if _overlap(twin.value, tensor)]


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in one memory, and not one behind the other."""
    return storage_of(one) == storage_of(other) and spans_meet(one, other)


def sharing(values: Sequence[torch.Tensor], begins: Sequence[int]) -> list[torch.Tensor]:
    """Those values that have elements in common with another one.

    Args:
        values: Values of one memory, as they came apart.
        begins: At which byte of it each of them begins.
    """
    forms = ((v.dtype, (*v.shape,), v.stride(), b) for v, b in zip(values, begins, strict=True))
    return [value for value, meets in zip(values, _meeting(*forms), strict=True) if meets]


@lru_cache(maxsize=64)
def _meeting(*forms: tuple[torch.dtype, Any, Any, int]) -> tuple[bool, ...]:
    end = max(b + span_elements(shape, strides) * d.itemsize for d, shape, strides, b in forms)
    memory = torch.empty(-(-end // _WIDEST) * _WIDEST, dtype=torch.uint8, device="meta")
    views = [
        memory.view(dtype).as_strided(shape, strides, begin // dtype.itemsize)
        for dtype, shape, strides, begin in forms
    ]
    return tuple(any(share_elements(v, w) for w in views if w is not v) for v in views)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor has the same memory."""
    # One more use is that of the object through which the number is asked for.
    return storage_use_count(storage_of(tensor)) > 2


def is_shared_unseen(tensor: torch.Tensor, kind: type[Any]) -> bool:
    """Whether another tensor has the same memory that no value of a loop holds: see ``Twins``."""
    if not is_shared(tensor):
        return False
    memory = storage_of(tensor)
    values = (one for one in gc.get_objects() if type(one) is kind)
    return storage_use_count(memory) - 1 > sum(storage_of(one.held) == memory for one in values)


def _error(twin: Twin, then: str) -> ConfigurationError:
    if twin.name == LEFT:
        return ConfigurationError(
            "a value that forward or a hook had left in Python was looked at, or written to, after "
            "a later call of the network had modified it in place\n"
            "  Fix: take a copy of it (clone) before that call, there and in one process."
        )
    if twin.name == OUTPUT:
        return ConfigurationError(
            "a value that a call of the network has returned has a gradient, and in one process "
            "the memory of another such value, or of an input with a gradient; one of them was "
            "written to, which the other does not show here\n"
            "  Fix: write into a copy (clone), or return copies from forward."
        )
    return ConfigurationError(
        f"{twin.name} of a parameter was set to a value of another worker, {then}: in one process "
        f"both have one memory\n"
        f"  Fix: set it to value.clone(), there and in one process."
    )
