"""Buffers that get another form: a table that grows, a cache that is made at its first use.

What a step puts in a buffer's place has a tensor of its own for each form. The one that counts is
in its place; the others wait beside it, under names that no module gives::

    mask                                    the table of 8 tokens
    other form of mask [16, 16] …           that of 16: the next long sequence puts it in its place
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphsplit.torch_ext.attributes import BUFFERS, NOT_SAVED

_FORM = "other form of "
_FIRST = "_graphsplit_first_forms"  # among a module's attributes: its buffers as they were first
_OWN = "_graphsplit_form"  # of a tensor that is written to at a step's end: where it waits


class _Changes:
    """How often any buffer has got another form: who keeps lists of tensors looks here."""

    count = 0


@dataclass(frozen=True)
class BufferForm:
    """What is in a buffer's place.

    Attributes:
        tensor: The tensor; None: the buffer is None; ``MISSING``: there is no such buffer.
        is_saved: Whether it belongs to the state dictionary.
    """

    tensor: Any
    is_saved: bool

    def __str__(self) -> str:
        form = getattr(self.tensor, _OWN, "") or shown_form(self.tensor)
        return form if self.is_saved else f"{form}, not persistent"

    __repr__ = __str__


def num_changes() -> int:
    """How often buffers got another form so far, in this process."""
    return _Changes.count


def shown_form(value: Any) -> str:
    """The form of what is in a buffer's place, for people and for names."""
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {list(value.shape)} {list(value.stride())} {value.device}"


def name_of_form(name: str, tensor: torch.Tensor) -> str:
    """Where a form of a buffer waits."""
    return f"{_FORM}{name} {shown_form(tensor)}".replace(".", "·")


def is_waiting(name: str) -> bool:
    """Whether this is the name, qualified or not, of a form that waits."""
    return name.rpartition(".")[2].startswith(_FORM)


def buffer_of_form(name: str) -> str:
    """The qualified name of the buffer for which a form waits; other names as they are."""
    path, dot, own = name.rpartition(".")
    if not own.startswith(_FORM):
        return name
    return f"{path}{dot}{own.removeprefix(_FORM).partition(' torch·')[0]}"


def form_in(attributes: Mapping[str, Any], name: str, missing: Any) -> BufferForm:
    """What is in a buffer's place now, in a module with these attributes."""
    return BufferForm(attributes[BUFFERS].get(name, missing), name not in attributes[NOT_SAVED])


def add_form(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Let a tensor wait for being put in a buffer's place."""
    setattr(tensor, _OWN, name_of_form(name, tensor))
    _wait(vars(module), tensor)


def is_own(tensor: Any) -> bool:
    """Whether a tensor is one that only the module's place holds: it was made for a form."""
    return hasattr(tensor, _OWN)


def put_form(attributes: dict[str, Any], name: str, form: BufferForm, missing: Any) -> None:
    """Put a form in a buffer's place; the one that is there waits.

    A tensor that the user's code may hold does not wait: it stays as it is, as in eager mode.
    """
    buffers, not_saved = attributes[BUFFERS], attributes[NOT_SAVED]
    firsts = attributes.setdefault(_FIRST, {})
    firsts.setdefault(name, form_in(attributes, name, missing))
    now = buffers.get(name)
    if form.tensor is missing:
        buffers.pop(name, None)
    else:
        buffers[name] = form.tensor
    (not_saved.discard if form.is_saved or form.tensor is missing else not_saved.add)(name)
    if is_own(form.tensor):
        waiting = getattr(form.tensor, _OWN)
        buffers.pop(waiting, None)
        not_saved.discard(waiting)
    if is_own(now) and now is not form.tensor:
        _wait(attributes, now)
    _sort(buffers)
    _Changes.count += 1


def forget_waiting(module: nn.Module) -> None:
    """Forget the forms that wait: another worker that is new has none."""
    for name in list(filter(is_waiting, vars(module)[BUFFERS])):
        del vars(module)[BUFFERS][name]
        vars(module)[NOT_SAVED].discard(name)
        _Changes.count += 1


def first_forms(module: nn.Module) -> dict[str, BufferForm]:
    """The buffers that have got another form, each as it was first."""
    found: dict[str, BufferForm] = vars(module).get(_FIRST, {})
    return found


def _wait(attributes: dict[str, Any], tensor: torch.Tensor) -> None:
    waiting = getattr(tensor, _OWN)
    attributes[BUFFERS][waiting] = tensor
    attributes[NOT_SAVED].add(waiting)
    _sort(attributes[BUFFERS])


def _sort(buffers: dict[str, Any]) -> None:
    """What waits comes last, in an order that does not depend on when it was put there."""
    for name in sorted(filter(is_waiting, buffers)):
        buffers[name] = buffers.pop(name)
