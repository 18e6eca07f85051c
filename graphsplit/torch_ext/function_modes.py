"""Whose ``TorchFunctionMode``s are active: the user's, the tracer's, ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

OURS = ("graphsplit.",)
# What records; "torch.utils._device", which `with device:` enters, is the user's.
TRACERS = (*OURS, "torch.fx.", "torch._export.", "torch.export.", "torch._dynamo.")


def modes_of_others(whose: Sequence[str]) -> tuple[TorchFunctionMode, ...]:
    """The active modes whose classes do not live in certain modules, outermost first."""
    stack = torch.overrides._get_current_function_mode_stack()
    return tuple(mode for mode in stack if not type(mode).__module__.startswith(tuple(whose)))


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
