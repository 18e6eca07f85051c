"""Buffers that a network replaces in forward: ``self.average = self.average * 0.9 + x``.

``torch.export`` drops the assignment. So while a network is captured the new tensor is what the
rest of forward sees, as in eager mode, and at the end it is copied into the buffer. What forward
read before stays as it was for backward (`graphsplit.capture.state.old_values`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.module import register_module_buffer_registration_hook

from graphsplit.capture.state.old_values import noted_as_assignment
from graphsplit.errors import CaptureError
from graphsplit.torch_ext.attributes import buffers_of, storage_of
from graphsplit.users_line import users_line_now


@dataclass(frozen=True)
class _Assigned:
    """A buffer to which a new tensor was assigned.

    Attributes:
        module: Whose buffer it is.
        name: Its name there.
        original: The buffer.
        line: The user's line.
    """

    module: nn.Module
    name: str
    original: torch.Tensor
    line: str


class AssignedBuffers:
    """Watches assignments to buffers while a network runs.

    ``with AssignedBuffers() as buffers:`` runs the network; ``buffers.copy_in`` ends it.
    """

    def __init__(self) -> None:
        self._assigned: dict[tuple[int, str], _Assigned] = {}
        self._finals: list[tuple[_Assigned, Any]] = []

    def __enter__(self) -> AssignedBuffers:
        self._handle = register_module_buffer_registration_hook(self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        self._handle.remove()
        for found in self._assigned.values():
            self._finals.append((found, buffers_of(found.module)[found.name]))
            buffers_of(found.module)[found.name] = found.original

    def _note(self, module: nn.Module, name: str, value: Any) -> None:
        current = buffers_of(module).get(name)
        if value is current:  # self.buffer += 1 puts back what is there
            return
        # What torch builds while it records; what is kept whole, and looks after itself.
        if isinstance(module, torch.fx.GraphModule) or get_proxy_mode() is None:
            return
        line = users_line_now()
        if not isinstance(current, torch.Tensor) or not isinstance(value, torch.Tensor):
            raise _refusal(module, name, f"{_look(current)} by {_look(value)}", line)
        key = (id(module), name)
        self._assigned.setdefault(key, _Assigned(module, name, current, line))

    def assign(self, module: nn.Module, name: str, value: torch.Tensor, line: str) -> None:
        """Have a tensor copied into a buffer at the end, as if it had been assigned to it."""
        original = buffers_of(module)[name]
        assert original is not None
        self._finals.append((_Assigned(module, name, original, line), value))

    def assigned(self) -> list[tuple[nn.Module, str]]:
        """The buffers to which something was assigned, by module and name."""
        return [(found.module, found.name) for found in self._assigned.values()]

    def copy_in(self, outputs: list[Any]) -> list[Any]:
        """Copy into each buffer what was assigned to it last.

        Args:
            outputs: What the network returned.

        Returns:
            The outputs, those in copies that are what a buffer held before.

        Raises:
            CaptureError: The new tensor does not fit into the buffer.
        """
        memories = {_memory(found.original) for found, _ in self._finals}
        outputs = [value.clone() if _memory(value) in memories else value for value in outputs]
        copies: list[tuple[_Assigned, torch.Tensor, bool]] = []
        for found, value in self._finals:
            original = found.original
            if value is original:
                continue
            if not isinstance(value, torch.Tensor) or _look(value) != _look(original):
                change = f"{_look(original)} by {_look(value)}"
                raise _refusal(found.module, found.name, change, found.line)
            shares = _memory(value) in memories  # two buffers that change places
            final = value.detach().clone() if shares else value.detach()
            copies.append((found, final, value.requires_grad))
        for found, value, has_gradient in copies:
            with noted_as_assignment(found.line, has_gradient=has_gradient):
                found.original.copy_(value)
        return outputs


def _memory(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return storage_of(value)


def _look(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} {list(value.shape)} with strides {list(value.stride())}"


def _refusal(module: nn.Module, name: str, change: str, line: str) -> CaptureError:
    return CaptureError(
        f"{type(module).__name__} replaces its buffer {name!r} in forward: {change}; a buffer that "
        f"changes its form would need another graph at every step\n  {line}\n"
        f"  Fix: register the buffer with its final dtype, shape and strides, and keep to them."
    )
