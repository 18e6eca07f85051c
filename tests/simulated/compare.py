"""Compare values byte by byte, and say in words where the first difference is."""

from __future__ import annotations

from typing import Any

import torch

from graphsplit.capture.structure import open_object
from graphsplit.tensor_meta import octets_of
from graphsplit.torch_ext.attributes import parts_of_sparse
from graphsplit.torch_ext.private import pytree

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def difference(expected: Any, actual: Any, *, strides: bool = False) -> str | None:
    """The first difference between two nested values; None if every byte is the same.

    Tensors must agree in dtype, shape and every byte: -0.0 is not 0.0, and a NaN equals itself.
    None equals nothing but None.

    Args:
        expected: The reference.
        actual: What is compared with it.
        strides: Whether tensors must agree in their strides as well.
    """
    expected_leaves, expected_spec = pytree.tree_flatten(expected)
    actual_leaves, actual_spec = pytree.tree_flatten(actual)
    if expected_spec != actual_spec:
        return f"structure: expected {expected_spec}, got {actual_spec}"
    for index, (want, found) in enumerate(zip(expected_leaves, actual_leaves, strict=True)):
        text = _leaf_difference(want, found, strides)
        if text is not None:
            path, _ = pytree.tree_flatten_with_path(expected)[0][index]
            return f"{pytree.keystr(path)}: {text}" if path else text
    return None


def _leaf_difference(expected: Any, actual: Any, strides: bool) -> str | None:
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        return _tensor_difference(expected.detach(), actual.detach(), strides)
    if type(expected) is type(actual) and type(expected) not in _PLAIN:
        opened = open_object(expected), open_object(actual)
        if opened[0] is not None and opened[1] is not None:
            return difference(opened[0][1], opened[1][1], strides=strides)
    if type(expected) is not type(actual) or expected != actual:
        return f"expected {_short(expected)}, got {_short(actual)}"
    return None


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)}"
    return repr(value)[:200]


def _tensor_difference(expected: torch.Tensor, actual: torch.Tensor, strides: bool) -> str | None:
    for what in ("layout", "dtype", "shape"):
        want, found = getattr(expected, what), getattr(actual, what)
        if want != found:
            return f"{what}: expected {want}, got {found}"
    if expected.layout is not torch.strided:
        return difference(_parts(expected), _parts(actual))
    if strides and _told_strides(expected) != _told_strides(actual):
        return f"strides: expected {expected.stride()}, got {actual.stride()}"
    return _bytes_difference(expected, actual)


def _told_strides(tensor: torch.Tensor) -> list[int]:
    """The strides that mean something: those of dimensions with more than one index."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1] if tensor.numel() else []


def _parts(sparse: torch.Tensor) -> Any:
    """The content of a sparse tensor, as strided tensors."""
    if sparse.layout is torch.sparse_coo:
        return sparse.is_coalesced(), *parts_of_sparse(sparse)
    return sparse.to_dense()


def _bytes_difference(expected: torch.Tensor, actual: torch.Tensor) -> str | None:
    one, other = _octets(expected), _octets(actual)
    if torch.equal(one, other):
        return None
    differs = (one != other).any(dim=-1)
    first = int(differs.nonzero()[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), expected.shape)]
    want, found = expected[tuple(index)].item(), actual[tuple(index)].item()
    return (
        f"{int(differs.sum())} of {expected.numel()} elements differ, the first at {index}: "
        f"expected {want!r}, got {found!r}"
    )


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of every element, shape (elements, bytes of one)."""
    return octets_of(tensor).reshape(tensor.numel(), tensor.dtype.itemsize)
