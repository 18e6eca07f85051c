"""Buffers that later microbatches change, kept as backward must find them.

A plain loop runs a microbatch's backward before the next one's forward. A pipeline does not::

    plain loop   F0 B0 F1 B1          scale.mul_(0.9); y = x * scale
    pipeline     F0 F1 B0 B1          B0 needs the scale of F0, which F1 has changed in place

So what autograd saves of such memory is copied. Batch normalisation saves its running statistics
too, but does not look at them in training; they are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from graphsplit.partition.plan import PartitionPlan

_IGNORES_WHAT_IT_SAVES = ("aten.batch_norm.", "aten.native_batch_norm.", "aten.instance_norm.")


def changing_state(
    plan: PartitionPlan, state: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """State of this worker that operations modify, and that others than normalisation read.

    Args:
        plan: The plan.
        state: Parameters and buffers of this worker, by node.
    """
    nodes = plan.placed.graph.nodes
    mine = plan.placed.graph.modified & state.keys()
    readers = (n for n in nodes if not n.target.startswith(_IGNORES_WHAT_IT_SAVES))
    read = {operand for node in readers for operand in node.reads}
    return tuple(
        state[value]
        for value in sorted(mine & read)
        if state[value].is_floating_point() or state[value].is_complex()
    )


def run_with_copies(
    run: Callable[..., tuple[Any, ...]], changing: Sequence[torch.Tensor]
) -> Callable[..., tuple[Any, ...]]:
    """Let autograd save copies of memory that will change, whatever views of it are used."""

    def run_saving_copies(*arguments: Any) -> tuple[Any, ...]:
        memories = {tensor.untyped_storage().data_ptr() for tensor in changing}

        def pack(saved: torch.Tensor) -> torch.Tensor:
            if saved.untyped_storage().data_ptr() not in memories:
                return saved
            memory = saved.untyped_storage().clone()
            copy = torch.empty(0, dtype=saved.dtype, device=saved.device)
            return copy.set_(memory, saved.storage_offset(), saved.shape, saved.stride())

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            return run(*arguments)

    return run_saving_copies


def with_own_generator(
    run: Callable[[Any], None], microbatch: int, *, is_first: bool
) -> Callable[[Any], None]:
    """Run a random segment on its microbatch's generator state; the default one is put back.

    Args:
        run: The segment, given the state of the step.
        microbatch: Its microbatch.
        is_first: Whether it is the microbatch's first random segment on any worker.
    """

    def run_on_own_state(state: Any) -> None:
        before = torch.default_generator.get_state()
        own = state.microbatches.rng_state(microbatch) if is_first else state.generators[microbatch]
        torch.default_generator.set_state(own)
        try:
            run(state)
        finally:
            state.generators[microbatch] = torch.default_generator.get_state()
            torch.default_generator.set_state(before)

    return run_on_own_state
