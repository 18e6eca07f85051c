"""Switch autograd and autocast on and off between the operations of a segment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphsplit.capture.operations.regions import Region
from graphsplit.torch_ext.private import set_grad_enabled


def switch_modes(grad_enabled: bool, *autocasts: tuple[str, torch.dtype | None]) -> None:
    """Set the modes of the operations that follow.

    Args:
        grad_enabled: Whether autograd is on.
        autocasts: Every kind of device that the segment casts on, with the lower dtype, or None
            where autocast is off.
    """
    set_grad_enabled(grad_enabled)
    for device, dtype in autocasts:
        torch.set_autocast_enabled(device, dtype is not None)
        if dtype is not None:
            torch.set_autocast_dtype(device, dtype)


def modes_of(region: Region, devices: Sequence[str], *, grad_enabled: bool) -> tuple[Any, ...]:
    """The arguments with which ``switch_modes`` enters a region.

    Args:
        region: The region.
        devices: Every kind of device that the segment casts on.
        grad_enabled: Whether autograd is on for the whole step.
    """
    on = grad_enabled if region.grad_enabled is None else region.grad_enabled
    casts = dict(region.autocasts)
    return (on, *((device, casts.get(device)) for device in devices))


def keeping_modes(
    run: Callable[..., tuple[Any, ...]], devices: Sequence[str]
) -> Callable[..., tuple[Any, ...]]:
    """Wrap the code of a segment that switches modes: they are put back, whatever happens.

    The cache of casts is off meanwhile: what eager mode keeps, the graph casts explicitly.
    """

    def run_and_put_back(*arguments: Any) -> tuple[Any, ...]:
        with _kept(devices):
            return run(*arguments)

    return run_and_put_back


@contextmanager
def _kept(devices: Sequence[str]) -> Iterator[None]:
    grad_enabled = torch.is_grad_enabled()
    keeps_casts = torch.is_autocast_cache_enabled()
    before = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in devices
    ]
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        set_grad_enabled(grad_enabled)
        torch.set_autocast_cache_enabled(keeps_casts)
        for device, is_enabled, dtype in before:
            torch.set_autocast_enabled(device, is_enabled)
            torch.set_autocast_dtype(device, dtype)
