"""Where the random numbers of microbatches come from, and the edges that carry generators."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from graphsplit.job.process_generators import (
    STATE_BYTES,
    ProcessStates,
    numpy_state,
    python_state,
)
from graphsplit.partition.plan import Edge, EdgeKind, PartitionPlan
from graphsplit.runtime.step_state import Action, StepState
from graphsplit.text import called, need

GENERATORS = (EdgeKind.GENERATOR, EdgeKind.PROCESS_GENERATORS)


@called("gs.microbatch_rng_state")
def microbatch_rng_state(seed: int, step: int, microbatch: int) -> torch.Tensor:
    """The state in which the generator starts for one microbatch of a training step.

    It depends on nothing but the three numbers: not on a placement, nor on what was drawn before.
    It is the state of a generator whose seed is the first eight bytes, lowest first, of the SHA-256
    of ``"seed step microbatch"`` in decimal digits.

    Args:
        seed: ``torch.initial_seed()`` where training starts.
        step: How many training steps the Model has done before.
        microbatch: Number of the microbatch in its step.

    Returns:
        A state for ``torch.default_generator.set_state``.
    """
    for name, number in (("seed", seed), ("step", step), ("microbatch", microbatch)):
        is_number = hasattr(type(number), "__index__") and not isinstance(number, bool)
        need("gs.microbatch_rng_state", name, number, is_number, "a whole number")
    digest = hashlib.sha256(f"{seed} {step} {microbatch}".encode()).digest()
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(digest[:8], "little"))
    return generator.get_state()


def all_generators() -> torch.Tensor:
    """The states of PyTorch's, Python's and NumPy's generators, as bytes."""
    return torch.cat([torch.default_generator.get_state(), process_generators()])


def set_all_generators(state: torch.Tensor) -> None:
    """Set what ``all_generators`` gave."""
    size = 2 * STATE_BYTES
    torch.default_generator.set_state(state[:-size].clone())
    set_process_generators(state[-size:])


def process_generators() -> torch.Tensor:
    """The states of Python's and NumPy's generators, as bytes."""
    return torch.frombuffer(bytearray(python_state() + numpy_state()), dtype=torch.uint8)


def set_process_generators(state: torch.Tensor) -> None:
    """Set what ``process_generators`` gave."""
    octets = state.numpy().tobytes()
    ProcessStates(octets[:STATE_BYTES], octets[STATE_BYTES:]).put()


def bind_send_generators(
    plan: PartitionPlan, edge: Edge, microbatch: int, send: Callable[..., Any]
) -> Action:
    """Make the function that sends the states of generators, given the step's state."""
    if edge.kind is EdgeKind.GENERATOR and plan.is_microbatched:
        return lambda state: send(
            state.generators[microbatch], step=state.step, microbatch=microbatch
        )
    read: Callable[[], torch.Tensor] = torch.default_generator.get_state
    if edge.kind is EdgeKind.PROCESS_GENERATORS:
        read = process_generators
    elif plan.draws_from_process:
        read = all_generators
    return lambda state: send(read(), step=state.step, microbatch=microbatch)


def bind_receive_generators(
    plan: PartitionPlan, edge: Edge, microbatch: int, receive: Callable[..., Any]
) -> Action:
    """Make the function that takes over the states of generators, given the step's state."""
    if edge.kind is EdgeKind.GENERATOR and plan.is_microbatched:

        def keep(state: StepState) -> None:
            state.generators[microbatch] = receive(step=state.step, microbatch=microbatch)

        return keep
    write: Callable[[torch.Tensor], Any] = torch.default_generator.set_state
    if edge.kind is EdgeKind.PROCESS_GENERATORS:
        write = set_process_generators
    elif plan.draws_from_process:
        write = set_all_generators

    def take_over(state: StepState) -> None:
        write(receive(step=state.step, microbatch=microbatch))

    return take_over
