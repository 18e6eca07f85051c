"""Values that in one process have the memory of a parameter's gradient or data, and here do not.

After ``p.grad = value`` both are one memory there. Where the parameter lives on another worker it
has a copy: a write into the value is refused, and so is a look at it once the copy was written to.
So is a look at a value that hooks keep, and that the network has modified in a memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graphsplit.errors import ConfigurationError
from graphsplit.tensor_meta import spans_meet
from graphsplit.torch_ext.attributes import storage_of
from graphsplit.torch_ext.private import storage_use_count

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
    has: Callable[[torch.Tensor], bool]
    mark: Callable[[], Any]
    at: Any = None
    is_written: bool = False

    def __post_init__(self) -> None:
        self.value, self.at = self.value.detach(), self.mark()

    def is_held(self) -> bool:
        """Whether anything else has the value's memory."""
        return is_shared(self.value)


class Twins:
    """Those of one loop, by what was set of which parameter; empty in almost every loop."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Twin] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, parameter: torch.Tensor, twin: Twin) -> None:
        """Take note of a value that was copied, until nothing else has its memory any more."""
        self._known = {key: one for key, one in self._known.items() if one.is_held()}
        self._known[twin.name, id(parameter)] = twin

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


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor has the same memory."""
    # One more use is that of the object through which the number is asked for.
    return storage_use_count(storage_of(tensor)) > 2


def _error(twin: Twin, then: str) -> ConfigurationError:
    if twin.name == LEFT:
        return ConfigurationError(
            "a value that forward or a hook had left in Python was looked at, or written to, after "
            "a later call of the network had modified it in place\n"
            "  Fix: take a copy of it (clone) before that call, there and in one process."
        )
    return ConfigurationError(
        f"{twin.name} of a parameter was set to a value of another worker, {then}: in one process "
        f"both have one memory\n"
        f"  Fix: set it to value.clone(), there and in one process."
    )
