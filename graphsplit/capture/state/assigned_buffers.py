"""Buffers that a network replaces in forward: ``self.average = self.average * 0.9 + x``.

``torch.export`` drops the assignment. So while a network is captured the new tensor is what the
rest of forward sees, as in eager mode, and at the end it is copied into the buffer. What forward
read before stays as it was for backward (`graphsplit.capture.state.old_values`).

Where the new tensor has another form, where there was none, or where forward registers the buffer
itself, the copy goes into a tensor of that form, which is put in the buffer's place at each step
(`graphsplit.torch_ext.attributes`)::

    if self.mask.size(0) < n:                     a step that reads the old table, and
        self.mask = make_mask(n)                  leaves the new one
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.module import register_module_buffer_registration_hook

from graphsplit.capture.state.old_values import noted_as_assignment
from graphsplit.errors import CaptureError
from graphsplit.frames import users_line_now
from graphsplit.guards.values import MISSING
from graphsplit.tensor_meta import spans_meet
from graphsplit.torch_ext.attributes import (
    BUFFERS,
    NOT_SAVED,
    BufferForm,
    buffers_of,
    form_in,
    name_of_form,
    parameters_of,
    refill,
    storage_of,
)


@dataclass(frozen=True)
class Assigned:
    """A buffer to which forward has assigned something else.

    Attributes:
        module: Whose buffer it is.
        name: Its name there.
        old: What was there before.
        new: What forward leaves there.
        line: The user's line.
    """

    module: nn.Module
    name: str
    old: BufferForm
    new: BufferForm
    line: str

    @property
    def is_reform(self) -> bool:
        """Whether it has another form now."""
        is_saved_alike = self.new.is_saved == self.old.is_saved
        return not is_saved_alike or _look(self.new.tensor) != _look(self.old.tensor)

    @property
    def change(self) -> str:
        """The change of its form, for people."""
        return f"{_look(self.old.tensor)} by {_look(self.new.tensor)}"

    @property
    def is_tensor(self) -> bool:
        """Whether a tensor is left; else None, or no buffer at all."""
        return isinstance(self.new.tensor, torch.Tensor)

    @property
    def waiting(self) -> str:
        """The name of the buffer that a tensor is copied into."""
        return name_of_form(self.name, self.new.tensor)


class AssignedBuffers:
    """Watches assignments to buffers while a network runs.

    ``with AssignedBuffers(root) as buffers:`` runs it; ``buffers.copy_in`` ends it.

    Args:
        root: Holds the network and the loss.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._lines: dict[tuple[int, str], str] = {}
        self._finals: list[tuple[Assigned, Any]] = []  # each with what it is copied into

    def __enter__(self) -> AssignedBuffers:
        self._before = {
            module: (dict(buffers_of(module)), set(vars(module)[NOT_SAVED]))
            for module in self._root.modules()
            if isinstance(vars(module).get(BUFFERS), dict)  # a scripted one has others
        }
        self._handle = register_module_buffer_registration_hook(self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.remove()
        try:
            if exception[0] is None:
                self._note_finals()
        finally:
            for module, (buffers, not_saved) in self._before.items():
                if any(self._changes_of(module)):
                    refill(buffers_of(module), buffers)
                    vars(module)[NOT_SAVED] = not_saved

    def _changes_of(self, module: nn.Module) -> Iterator[Assigned]:
        """The entries of a module's table that are not as they were."""
        buffers, not_saved = self._before[module]
        for name in {**buffers, **buffers_of(module)}:
            was = BufferForm(buffers.get(name, MISSING), name not in not_saved)
            now = form_in(vars(module), name, MISSING)
            if now.tensor is not was.tensor or now.is_saved != was.is_saved:
                line = self._lines.get((id(module), name), "")
                yield Assigned(module, name, was, now, line)

    def _assigned(self) -> list[Assigned]:
        return [one for module in self._before for one in self._changes_of(module)]

    def _note_finals(self) -> None:
        finals: list[tuple[Assigned, Any]] = []
        self.reforms()  # refuses some
        for one in self._assigned():
            if not one.is_reform:
                finals.append((one, one.old.tensor))
            elif one.is_tensor:
                finals.append((one, buffers_of(one.module)[one.waiting]))
        self._check_apart(finals)
        self._finals = [*finals, *self._finals]

    def _check_apart(self, finals: Sequence[tuple[Assigned, Any]]) -> None:
        """Refuse to copy what would be one memory in eager mode: a change of one changes both."""
        others = [
            (f"{path}.{name}" if path else name, module, name, tensor)
            for path, module in self._root.named_modules()
            if module in self._before
            for table in (parameters_of(module), buffers_of(module))
            for name, tensor in table.items()
            if tensor is not None and tensor.layout is torch.strided
        ]
        for found, _ in finals:
            for label, module, name, other in others:
                is_itself = (module, name) == (found.module, found.name)
                if not is_itself and _overlap(found.new.tensor, other):
                    raise CaptureError(
                        f"{type(found.module).__name__} puts into its buffer {found.name!r} the "
                        f"memory of {label.removeprefix('network.')}: each would change with the "
                        f"other\n  {found.line}\n  Fix: assign a copy (clone)."
                    )

    def _note(self, module: nn.Module, name: str, value: Any) -> None:
        # What torch builds while it records; what is kept whole, and looks after itself.
        if isinstance(module, torch.fx.GraphModule) or get_proxy_mode() is None:
            return
        current = buffers_of(module).get(name, MISSING)
        # A module that forward makes may have a buffer that is None, as a loss without weights has.
        if module not in self._before and isinstance(value, torch.Tensor) and value is not current:
            change = f"{_look(current)} by {_look(value)}"
            raise _refusal(module, name, change, users_line_now())
        if value is not current:
            self._lines.setdefault((id(module), name), users_line_now())

    def assign(self, module: nn.Module, name: str, value: torch.Tensor, line: str) -> None:
        """Have a tensor copied into a buffer at the end, as if it had been assigned to it."""
        target = buffers_of(module)[name]
        assert target is not None
        old, new = BufferForm(target, True), BufferForm(value, True)
        self._finals.append((Assigned(module, name, old, new, line), target))

    def assigned(self) -> list[tuple[nn.Module, str]]:
        """The buffers to which another tensor of their form was assigned, by module and name."""
        return [(one.module, one.name) for one in self._assigned() if not one.is_reform]

    def reforms(self) -> list[Assigned]:
        """The buffers that have another form by now.

        Raises:
            CaptureError: One has a form that no later step could go on from.
        """
        found = [one for one in self._assigned() if one.is_reform]
        for one in found:
            _check_form(one)
        return found

    def copy_in(self, outputs: list[Any]) -> list[Any]:
        """Copy into each buffer what was assigned to it last.

        Args:
            outputs: What the network returned.

        Returns:
            The outputs, those in copies that are what a buffer held before.

        Raises:
            CaptureError: The new tensor does not fit into the buffer.
        """
        memories = {_memory(target) for _, target in self._finals}
        outputs = [value.clone() if _memory(value) in memories else value for value in outputs]
        copies: list[tuple[torch.Tensor, torch.Tensor, bool, str]] = []
        for found, target in self._finals:
            value = found.new.tensor
            if value is target:
                continue
            if not isinstance(value, torch.Tensor) or _look(value) != _look(target):
                change = f"{_look(target)} by {_look(value)}"
                raise _refusal(found.module, found.name, change, found.line)
            shares = _memory(value) in memories  # two buffers that change places
            final = value.detach().clone() if shares else value.detach()
            copies.append((target, final, value.requires_grad, found.line))
        for target, value, has_gradient, line in copies:
            with noted_as_assignment(line, has_gradient=has_gradient):
                target.copy_(value)
        return outputs


def _memory(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return storage_of(value)


def _look(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} {list(value.shape)} with strides {list(value.stride())}"


def _overlap(one: Any, other: torch.Tensor) -> bool:
    """Whether two tensors may have memory in common."""
    return _memory(one) is not None and _memory(one) == _memory(other) and spans_meet(one, other)


def _check_form(found: Assigned) -> None:
    """Refuse what a later step could not go on from."""
    new = found.new.tensor
    if not isinstance(new, torch.Tensor):
        return
    sizes: list[tuple[Any, Any]] = []
    if new.layout is torch.strided:
        sizes = list(zip(new.shape, new.stride(), strict=True))
    if new.layout is not torch.strided or any(
        isinstance(size, torch.SymInt) or (size > 1 and stride == 0) for size, stride in sizes
    ):
        raise _refusal(found.module, found.name, found.change, found.line)
    if new.requires_grad:
        raise CaptureError(
            f"forward assigns a tensor with a gradient to the buffer {found.name!r}, in another "
            f"form: a later step that reads it would go through backward of this one\n"
            f"  {found.line}\n  Fix: assign it without its history, with .detach()."
        )


def _refusal(module: nn.Module, name: str, change: str, line: str) -> CaptureError:
    return CaptureError(
        f"{type(module).__name__} replaces its buffer {name!r} in forward: {change}; this form "
        f"cannot be followed from step to step\n  {line}\n"
        f"  Fix: assign a dense tensor of a known size (contiguous), in a module of the network."
    )
