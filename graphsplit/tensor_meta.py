"""A tensor as it is known before it exists: dtype, shape, strides and device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphsplit.torch_ext.private import DisableTorchFunctionSubclass

_MOST_SAMPLED = 4096  # of larger tensors a part is looked at

CPU = "cpu"
ALIGNMENT = 64  # bytes, as of torch's own allocations


def device_of(tensor: torch.Tensor) -> str:
    """Where a tensor is, as ``TensorMeta`` has it; one on ``meta`` stands for one of a CPU."""
    return CPU if tensor.is_cpu or tensor.is_meta else str(tensor.device)


def span_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of storage a strided layout reaches, from its first to its last."""
    if any(size == 0 for size in shape):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def begin_of(tensor: torch.Tensor) -> int:
    """How many bytes lie between a multiple of 64 and a tensor's first element.

    Small products have other bits where an operand begins elsewhere.
    """
    return tensor.data_ptr() % ALIGNMENT


def empty_beginning_at(meta: TensorMeta, begin: int) -> torch.Tensor:
    """Memory for a tensor, so many bytes behind a multiple of 64."""
    first = begin // meta.dtype.itemsize
    size = span_elements(meta.shape, meta.strides) + first
    memory = torch.empty(size, dtype=meta.dtype, device=meta.device).untyped_storage()
    tensor = torch.empty(0, dtype=meta.dtype, device=meta.device)
    return tensor.set_(memory, first, meta.shape, meta.strides)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether strides lay a tensor out without gaps or overlap."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def spans_meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two strided tensors of one memory do not lie one behind the other in it."""
    (begin, end), (begin_of_other, end_of_other) = _span(one), _span(other)
    return begin < end_of_other and begin_of_other < end


def share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two strided tensors of one memory have bytes in common."""
    if not spans_meet(one, other):
        return False
    if one.dtype != other.dtype:
        return True
    (begin, end), (begin_of_other, end_of_other) = _span(one), _span(other)
    first, size = min(begin, begin_of_other), one.element_size()
    taken = torch.zeros((max(end, end_of_other) - first) // size, dtype=torch.bool)
    marks, marks_of_other = (
        taken.as_strided(t.shape, t.stride(), t.storage_offset() - first // size)
        for t in (one, other)
    )
    marks.fill_(True)
    return bool(marks_of_other.any())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends in its memory, in bytes."""
    begin, size = int(tensor.storage_offset()), tensor.element_size()
    return begin * size, (begin + int(span_elements(tensor.shape, tensor.stride()))) * size


class DynamicSize(int):
    """A size that changes from batch to batch: the largest number it may be.

    Sums over it are thus bounds; what must equal the size itself asks ``isinstance`` first.

    Attributes:
        text: How it follows from the sizes of the inputs, for example ``2*s0``.
    """

    text: str

    def __new__(cls, largest: int, text: str) -> DynamicSize:
        """A size of at most ``largest``."""
        size = super().__new__(cls, largest)
        size.text = text
        return size

    def __repr__(self) -> str:
        return f"({self.text} <= {int(self)})"

    def of(self, numbers: Mapping[str, Any]) -> int | None:
        """The size for a batch, by the numbers of its graph; None where it follows from values."""
        return numbers.get(name_of_size(self.text))


def name_of_size(expression: Any) -> str:
    """The name among the numbers of a graph of a size that an output has, or begins at."""
    return f"size {expression}"


def bound_of(size: int | torch.SymInt) -> int:
    """A size; ``DynamicSize`` of one that changes from batch to batch."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    if expression.is_number:
        return int(expression)
    largest = size.node.shape_env.bound_sympy(expression).upper
    if not largest.is_Integer:
        raise OverflowError(f"size {expression} has no bound")
    return DynamicSize(int(largest), str(expression))


@dataclass(frozen=True)
class TensorMeta:
    """dtype, shape, strides (in elements) and device of a dense tensor.

    Sizes and strides that follow from dynamic dimensions are ``DynamicSize``. The device is
    ``"cpu"``, or another with its index, as ``"cuda:0"``.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str = CPU

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """The description of an existing (real or fake) tensor.

        Raises:
            OverflowError: A dynamic size has no bound.
        """
        sizes, strides = map(bound_of, tensor.shape), map(bound_of, tensor.stride())
        return cls(tensor.dtype, tuple(sizes), tuple(strides), device_of(tensor))

    @property
    def static_shape(self) -> tuple[int | None, ...]:
        """The shape, None where a size changes from batch to batch."""
        return tuple(None if isinstance(size, DynamicSize) else size for size in self.shape)

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        result = 1
        for size in self.shape:
            result *= size
        return result

    @property
    def size_bytes(self) -> int:
        """Bytes of the values alone."""
        return self.num_elements * self.dtype.itemsize

    @property
    def span_bytes(self) -> int:
        """Bytes of storage that the layout reaches, gaps included."""
        return span_elements(self.shape, self.strides) * self.dtype.itemsize

    @property
    def is_differentiable(self) -> bool:
        """Whether autograd can give this dtype a gradient."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __str__(self) -> str:
        """For example ``float32[32, 6, 28, 28]``; what is not usual is named: strides, device."""
        text = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        if self.strides != contiguous_strides(self.shape):
            text += f" strides {list(self.strides)}"
        return text if self.device == CPU else f"{text} on {self.device}"


def fits(shape: Sequence[int], expected: Sequence[int | None]) -> bool:
    """Whether all sizes are as expected; None stands for any."""
    return len(shape) == len(expected) and all(
        want is None or size == want for size, want in zip(shape, expected, strict=True)
    )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of a shape, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


DTYPES: dict[str, torch.dtype] = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
"""Every dtype by its name, and nothing else that torch has under a name."""


SPARSE_FIX = (
    "give its indices and values, and build it in forward of the module that multiplies by it, "
    "by torch.sparse_coo_tensor(indices, values, size); or give it as a dense tensor."
)


def octets_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes in row-major order; its own memory where it lies there like that."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # A tensor of one element may have any stride, and counts as contiguous.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def sample_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a strided tensor; of a large one those of evenly spaced elements."""
    with DisableTorchFunctionSubclass():
        tensor = tensor.detach()
        if tensor.numel() > _MOST_SAMPLED:
            each = max(1, round(_MOST_SAMPLED ** (1 / tensor.dim())))
            tensor = tensor[tuple(slice(None, None, max(1, s // each)) for s in tensor.shape)]
        return octets_of(tensor).numpy().tobytes() if tensor.numel() else b""


def has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits."""
    is_alike = one.dtype == other.dtype and one.shape == other.shape
    return is_alike and torch.equal(octets_of(one), octets_of(other))


def plain_meta(tensor: torch.Tensor) -> TensorMeta:
    """A tensor as it is noted beside its bytes: dtype and shape."""
    shape = tuple(tensor.shape)
    return TensorMeta(tensor.dtype, shape, contiguous_strides(shape))
