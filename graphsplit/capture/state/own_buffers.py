"""Buffers that are nobody's but the network's: copies in the place of what the script has made."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from graphsplit.torch_ext.attributes import buffers_of
from graphsplit.torch_ext.stand_ins import StandIn

_own: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by identity


def note_own(buffer: torch.Tensor) -> None:
    """Note that nobody else holds a buffer."""
    _own[id(buffer)] = buffer


def is_own(buffer: torch.Tensor | None) -> bool:
    """Whether nobody else holds a buffer."""
    return buffer is not None and _own.get(id(buffer)) is buffer


def own_buffer(module: nn.Module, name: str) -> None:
    """Put a copy in a buffer's place: the tensor that is there stays as it is, as in eager mode."""
    buffer = buffers_of(module)[name]
    if isinstance(buffer, StandIn):  # there is none here that the script could hold
        note_own(buffer)
    elif buffer is not None:
        own = buffers_of(module)[name] = buffer.detach().clone()
        note_own(own)


def own_buffers(roots: Iterable[nn.Module]) -> list[list[str]]:
    """The names of such copies in each of several networks."""
    return [[name for name, one in root.named_buffers() if is_own(one)] for root in roots]


def own_again(roots: Iterable[nn.Module], names: Iterable[Iterable[str]]) -> None:
    """Let the same be copies in another process: its recordings are like those of others then."""
    for root, own, known in zip(roots, names, own_buffers(roots), strict=True):
        for name in set(own).difference(known):
            path, _, key = name.rpartition(".")
            if key in buffers_of(module := root.get_submodule(path)):
                own_buffer(module, key)
