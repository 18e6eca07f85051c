"""``TorchFunctionMode``s: whose are active (the user's, the tracer's, ours), and what ours see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

OURS = ("graphsplit.",)
_DEVICE = "torch.utils._device"  # what `with device:` and set_default_device enter: the user's
# What records.
TRACERS = (*OURS, "torch.fx.", "torch._export.", "torch.export.", "torch._dynamo.")


def modes_of_others(whose: Sequence[str]) -> tuple[TorchFunctionMode, ...]:
    """The active modes whose classes do not live in certain modules, outermost first."""
    stack = torch.overrides._get_current_function_mode_stack()
    return tuple(mode for mode in stack if not type(mode).__module__.startswith(tuple(whose)))


def modes_of_users() -> tuple[TorchFunctionMode, ...]:
    """The active modes of the script's that may do anything: default devices are none."""
    if not torch._C._len_torch_function_stack():
        return ()
    return modes_of_others((*TRACERS, _DEVICE))


def default_devices() -> tuple[str, ...]:
    """The devices that the script has entered, for what torch makes without naming one."""
    if not torch._C._len_torch_function_stack():
        return ()
    stack: tuple[Any, ...] = modes_of_others(TRACERS)
    return tuple([str(mode.device) for mode in stack if type(mode).__module__ == _DEVICE])


@contextmanager
def without_modes(whose: Sequence[str]) -> Iterator[None]:
    """Take the modes whose classes live in certain modules away for a while."""
    kept, taken = modes_of_others(whose), []
    while torch._C._len_torch_function_stack():
        taken.append(torch.overrides._pop_mode())
    try:
        for mode in kept:
            torch.overrides._push_mode(mode)
        yield
    finally:
        for _ in kept:
            torch.overrides._pop_mode()
        for mode in reversed(taken):
            torch.overrides._push_mode(mode)


class TorchCalls(TorchFunctionMode):
    """Sees each call of a function of torch: subclasses make it, in ``called``."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch instead of the function."""
        return self.called(function, args, kwargs or {})

    def called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function of torch, and return its result."""
        raise NotImplementedError


def may_write(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function of torch is called to change a tensor, by its name: ``add_``."""
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") or name in ("__set__", "__setitem__")
    return name.endswith("_") or kwargs.get("out") is not None or bool(kwargs.get("inplace"))
