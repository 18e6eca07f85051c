"""Buffers of one element whose value decides what Python code does: ``if self.count < 3: ...``.

Such a buffer is no operand of a graph: it is Python state, which every worker has. Its value is
read and written here as a number. While a step is recorded nothing is written to the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from graphsplit.torch_ext.attributes import BUFFERS
from graphsplit.torch_ext.private import DisableTorchFunction, disable_current_modes

_MARK = "_graphsplit_steers"
# By the identity of a module's attributes, and a buffer's name: its number while code is recorded.
_recorded: dict[tuple[int, str], Any] = {}


def steers(tensor: Any) -> bool:
    """Whether a buffer was found to steer Python code."""
    return hasattr(tensor, _MARK)


def let_steer(tensors: Iterable[torch.Tensor]) -> None:
    """Note that buffers steer Python code, in all that is captured from now on."""
    for tensor in tensors:
        setattr(tensor, _MARK, True)


def owned_state(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, by name, that one worker owns: all but those that every worker has."""
    return {name: tensor for name, tensor in tensors.items() if not steers(tensor)}


def may_steer(tensor: Any) -> bool:
    """Whether a buffer's value can be a number of Python's."""
    return isinstance(tensor, torch.Tensor) and tensor.numel() == 1 and not tensor.requires_grad


def number_of(tensor: torch.Tensor) -> Any:
    """The value of a tensor of one element."""
    with DisableTorchFunction(), disable_current_modes(), torch.no_grad():
        return tensor.item()


@contextmanager
def recorded_apart(buffers: Mapping[tuple[int, str], torch.Tensor]) -> Iterator[None]:
    """Let what is written to the numbers of buffers inside be written to no tensor."""
    before = dict(_recorded)
    _recorded.update((key, number_of(tensor)) for key, tensor in buffers.items())
    try:
        yield
    finally:
        _recorded.clear()
        _recorded.update(before)


def number_in(attributes: Mapping[str, Any], name: str, missing: Any) -> Any:
    """The number that a buffer holds, in a module with these attributes."""
    key = id(attributes), name
    if key in _recorded:
        return _recorded[key]
    tensor = attributes[BUFFERS].get(name)
    return number_of(tensor) if may_steer(tensor) else missing


def put_number(attributes: Mapping[str, Any], name: str, number: Any) -> None:
    """Let a buffer hold a number."""
    key = id(attributes), name
    if key in _recorded:
        _recorded[key] = number
    else:
        with torch.no_grad():
            attributes[BUFFERS][name].fill_(number)
