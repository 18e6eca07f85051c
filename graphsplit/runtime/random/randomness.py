"""Where the random numbers of a microbatch come from."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from graphsplit.capture.reach.holders import NUMPYS

_WORDS = 640  # of 64 bits for each of Python's and NumPy's generators: 624, and where it stands


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
    digest = hashlib.sha256(f"{seed} {step} {microbatch}".encode()).digest()
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(digest[:8], "little"))
    return generator.get_state()


def all_generators() -> torch.Tensor:
    """The states of PyTorch's, Python's and NumPy's generators, as bytes."""
    return torch.cat([torch.default_generator.get_state(), process_generators()])


def set_all_generators(state: torch.Tensor) -> None:
    """Set what ``all_generators`` gave."""
    size = 2 * _WORDS * 8
    torch.default_generator.set_state(state[:-size].clone())
    set_process_generators(state[-size:])


def can_be_packed() -> bool:
    """Whether NumPy's generator is the usual one."""
    return isinstance(NUMPYS._bit_generator, np.random.MT19937)


def process_generators() -> torch.Tensor:
    """The states of Python's and NumPy's generators, as bytes."""
    _, words, gauss = random.getstate()
    if not can_be_packed():
        raise RuntimeError(
            f"numpy.random draws from {type(NUMPYS._bit_generator).__name__}, whose state "
            f"cannot be sent to other workers\n"
            f"  Fix: leave numpy.random.set_bit_generator out."
        )
    numpy: Any = np.random.get_state()
    python = _packed(words, gauss is not None, gauss or 0.0)
    return torch.cat([python, _packed((*numpy[1].tolist(), numpy[2]), bool(numpy[3]), numpy[4])])


def set_process_generators(state: torch.Tensor) -> None:
    """Set what ``process_generators`` gave."""
    size = _WORDS * 8
    words, has_gauss, gauss = _unpacked(state[:size])
    random.setstate((3, tuple(words), gauss if has_gauss else None))
    words, has_gauss, gauss = _unpacked(state[size:])
    key = np.array(words[:-1], dtype=np.uint32)
    np.random.set_state(("MT19937", key, words[-1], int(has_gauss), gauss))


def _packed(words: tuple[int, ...], has_gauss: bool, gauss: float) -> torch.Tensor:
    packed = np.zeros(_WORDS, dtype=np.int64)
    packed[: len(words)] = words
    packed[-2] = has_gauss
    packed[-1:] = np.array([gauss]).view(np.int64)
    return torch.from_numpy(packed.view(np.uint8))


def _unpacked(state: torch.Tensor) -> tuple[list[int], bool, float]:
    packed = state.clone().numpy().view(np.int64)
    return packed[:625].tolist(), bool(packed[-2]), float(packed[-1:].view(np.float64)[0])
