"""One recorded tensor operation, and the description of the tensors that it touches.

A recorded call holds no deferred tensor: each is replaced by a `TensorSpec`, that is, the number
of its memory and its place inside it. Views therefore need no recording: two views of one
parameter are two specs with the same storage number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from graphsplit.errors import DeferredInitError
from graphsplit.frames import is_users
from graphsplit.torch_ext.private import leaves_of, pytree, storage_at, throw_on_mutable_data_ptr

SHAPE_ONLY = -1
"""Storage number of an operand of which only shape, strides and dtype are looked at."""

_CPU = torch.device("cpu")


def hollow_storage(size_bytes: int) -> torch.UntypedStorage:
    """Returns a CPU storage of the given size behind which there is no memory."""
    storage = storage_at(0, _CPU, size_bytes)
    untyped = cast("torch.UntypedStorage", storage)  # torch's own annotation names the typed kind
    # Without this mark a write from a place that no mode sees would be a segmentation fault.
    throw_on_mutable_data_ptr(torch.empty(0, dtype=torch.uint8).set_(untyped))
    return untyped


def user_line() -> str:
    """Returns ``file:line`` of the user's innermost frame."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if is_users(frame.f_code.co_filename):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A strided CPU tensor, described by its storage's number and its place in that storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int) -> TensorSpec:
        """Describes ``tensor`` as lying in the storage with this number."""
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        return cls(storage, tensor.dtype, size, stride, int(tensor.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Returns the tensor that this spec describes, on the given memory."""
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def scratch(self) -> torch.Tensor:
        """Returns a new tensor of this layout on memory of its own."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)

    def like_nothing(self) -> torch.Tensor:
        """Returns a tensor of this layout without memory, for operations that read no value."""
        extent = sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True)) + 1
        items = self.offset + (extent if all(self.size) else 0)
        return self.on(hollow_storage(items * self.dtype.itemsize))


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """One recorded operation.

    Attributes:
        func: the operation, an `OpOverload`.
        args: its arguments, a `TensorSpec` in the place of each tensor that is not a constant.
        kwargs: likewise.
        reads: storages whose former content the result depends on.
        writes: storages whose content it changes, new ones included.
        overwrites: those of ``writes`` whose former content does not matter.
        created: the new tensors, in the order of the operation's outputs.
        default_dtype: torch's default dtype at that time; it decides promotions.
        where: the user's ``file:line``.
        is_draw: whether it takes random numbers from a generator.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: frozenset[int]
    created: tuple[TensorSpec, ...]
    default_dtype: torch.dtype
    where: str
    is_draw: bool = False

    def run(self, resolve: Callable[[TensorSpec], torch.Tensor]) -> list[torch.Tensor]:
        """Executes the operation on real memory and returns the tensors that it created."""
        args, kwargs = pytree.tree_map_only(TensorSpec, resolve, (self.args, self.kwargs))
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            result = self.func(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)
        if not self.created:
            return []
        outputs = leaves_of(torch.Tensor, result)
        self._check(outputs)
        return outputs

    def _check(self, outputs: list[torch.Tensor]) -> None:
        """Raises if the outputs are laid out otherwise than the construction was told."""
        for spec, output in zip(self.created, outputs, strict=True):
            if TensorSpec.of(output, spec.storage) != spec:
                raise DeferredInitError(
                    f"replaying {self.func} gave another layout than was recorded\n"
                    f"  {self.where}\n"
                    f"  recorded: {spec.dtype} {spec.size} strides {spec.stride}\n"
                    f"  replayed: {output.dtype} {tuple(output.size())} "
                    f"strides {tuple(output.stride())}\n"
                    "  Fix: build this network without gs.deferred_init()."
                )
