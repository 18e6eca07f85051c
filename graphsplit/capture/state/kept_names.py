"""Tensors that are kept in Python, in saves and snapshots: by the names of their buffers.

The value of such a tensor is saved with the other buffers. What is in its place is written as the
name of its buffer, and a process that reads it puts there what stands for that buffer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from graphsplit.capture.state.handed import put_leaves
from graphsplit.capture.state.kept_tensors import KEPT, register
from graphsplit.capture.state.kept_value import KeptValue, note_read
from graphsplit.capture.state.older_values import (
    kept_places,
    lost,
    settle_older,
    stand_ins_of,
)
from graphsplit.guards.values import freeze, with_leaves
from graphsplit.torch_ext.attributes import buffer_of_form, buffers_of

_MARK = "\0kept tensor: "
# As kept_tensors.py makes it: the place, and the form unless that differs from batch to batch.
_NAME = re.compile(rf"{KEPT}(?P<label>.*?)(?: torch·(?P<dtype>\w+) (?P<form>\[.*\]) cpu( \d+)?)?")


def with_names(frozen: Any, network: nn.Module) -> Any:
    """A snapshot of a place, with the name of its buffer for each tensor that is kept in it."""
    settle_older(network)
    names = {id(stand_in): name for name, stand_in in stand_ins_of(network).items()}
    return with_leaves(
        frozen,
        lambda leaf: f"{_MARK}{names[id(leaf)]}" if id(leaf) in names else leaf,
    )


def with_stand_ins(frozen: Any, network: nn.Module) -> Any:
    """The snapshot that ``with_names`` was given; missing buffers are registered, of zeros."""
    return with_leaves(
        frozen,
        lambda leaf: _stand_in(network, leaf.removeprefix(_MARK)) if any(names_in(leaf)) else leaf,
    )


def give_back(network: nn.Module) -> None:
    """Let places hold tensors with values again, where a plan was made that nobody runs."""
    buffers = buffers_of(network)
    values = {
        id(stand_in): buffer.detach().clone()
        for name, stand_in in stand_ins_of(network).items()
        if (buffer := buffers.get(name)) is not None
    }
    for place in kept_places.get(network, {}).values():
        put_leaves(
            place, with_leaves(freeze(place.read()), lambda leaf: values.get(id(leaf), leaf))
        )


def names_in(written: Any) -> Iterator[str]:
    """The names of buffers in what was written."""
    if isinstance(written, str) and written.startswith(_MARK):
        yield written.removeprefix(_MARK)
    elif isinstance(written, dict):
        for value in written.values():
            yield from names_in(value)
    elif isinstance(written, (list, tuple)):
        for value in written:
            yield from names_in(value)


def kept_buffers(network: nn.Module) -> list[str]:
    """The buffers that hold what is kept, written as in a place; for some nothing stands now."""
    names = filter(is_kept_name, buffers_of(network))
    return [f"{_MARK}{name}" for name in names if _of_name(name)[1] is not None]


def register_again(network: nn.Module, written: Any) -> None:
    """Register the buffers, of zeros, that are named in what was written and are not there."""
    for name in names_in(written):
        _stand_in(network, name)


def told(kind: str, name: str) -> str:
    """A parameter or buffer in the user's words, whatever its own name is.

    Args:
        kind: ``"parameter"`` or ``"buffer"``.
        name: Its qualified name.
    """
    found = _NAME.fullmatch(name)
    if found is not None:
        return f"the tensor that is kept in {found['label'].replace('·', '.')}"
    return f"{kind} {buffer_of_form(name)}"


def is_kept_name(name: str) -> bool:
    """Whether this is the name of a buffer that holds what is kept in Python."""
    return name.startswith(KEPT)


def with_lost(frozen: Any) -> Any:
    """The snapshot that ``with_names`` was given, in a process that has not run the step."""
    return with_leaves(
        frozen,
        lambda leaf: _lost(leaf.removeprefix(_MARK)) if any(names_in(leaf)) else leaf,
    )


def _lost(name: str) -> KeptValue:
    label, buffer = _of_name(name)
    return lost(torch.empty(0) if buffer is None else buffer, label)


def _stand_in(network: nn.Module, name: str) -> KeptValue:
    known = stand_ins_of(network)
    if name not in known:
        label, buffer = _of_name(name)
        if buffer is None:
            known[name] = KeptValue.of(torch.empty(0), label, "was left by another process")
        else:
            if buffers_of(network).get(name) is None:
                register(network, name, buffer)
            known[name] = KeptValue.of(buffer, label)
    note_read(known[name])
    return known[name]


def _of_name(name: str) -> tuple[str, torch.Tensor | None]:
    """The place that a buffer is named by, and zeros in its form, unless that differs."""
    found = _NAME.fullmatch(name)
    label = name if found is None else found["label"].replace("·", ".")
    if found is None or not found["form"]:
        return label, None
    shape, strides = ast.literal_eval(found["form"].replace("] [", "], ["))
    return label, torch.empty_strided(shape, strides, dtype=getattr(torch, found["dtype"])).zero_()
