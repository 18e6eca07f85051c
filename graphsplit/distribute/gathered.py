"""States of networks and optimizers, gathered once: then one worker may ask for them by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from graphsplit.distribute.network import behind
from graphsplit.distribute.states import state_of


@contextmanager
def gathered(
    networks: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[None]:
    """Collective at its beginning: gather what ``state_dict()`` of all these gives.

    Inside, ``state_dict()`` answers on each worker by itself, with all that all workers have. So
    the code of a library that saves may run on one of them.

    Args:
        networks: Networks; those that are not distributed are left alone.
        optimizers: Their optimizers.
    """
    with ExitStack() as stack:
        for network in networks:
            distributed = behind(network)
            if distributed is not None:
                stack.enter_context(_keeping(distributed, distributed.state_dict()))
        for optimizer in optimizers:
            state = state_of(optimizer)
            if state is not None:
                stack.enter_context(_keeping(state, state.gather(optimizer)))
        yield


@contextmanager
def _keeping(holder: Any, whole: Any) -> Iterator[None]:
    holder.kept = whole
    try:
        yield
    finally:
        holder.kept = None
