"""Generators of random numbers beside PyTorch's default one, and counters that loaders keep.

Data sets draw from Python's and NumPy's generators, samplers from their own; some samplers count
epochs. All of it decides which batch comes next, so all of it belongs to the place in a loader.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from graphsplit.encoding.values import Fixed
from graphsplit.guards.values import BY_VALUE, freeze, same
from graphsplit.tensor_meta import has_same_bits
from graphsplit.torch_ext.private import end_processes, has_processes, note_processes

_PARTS = ("sampler", "batch_sampler", "batch_sampler.sampler", "dataset")
_PROCESSES = "processes"
_COUNTERS_OF_DATA = frozenset(("epoch", "_epoch"))


def process_generators() -> Fixed:
    """The states of Python's, NumPy's and GPUs' generators: tensors, numbers and strings.

    As long as nothing is drawn, the same object is returned.
    """
    global _last
    python: Any = random.getstate()
    numpy: Any = np.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    name, words, *rest = numpy
    seen = python, name, words.tobytes(), rest, [state.tolist() for state in devices]
    if _last is None or _last[0] != seen:
        found = {"python": _python_state(python), "numpy": _numpy_state(numpy)}
        _last = seen, Fixed(found | ({"devices": devices} if devices else {}))
    return _last[1]


_last: tuple[Any, Fixed] | None = None


def set_process_generators(states: Mapping[str, Any]) -> None:
    """Set what ``process_generators`` gave."""
    random.setstate(_python_tuple(states["python"]))
    np.random.set_state(_numpy_tuple(states["numpy"]))
    if "devices" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["devices"])


def all_generators() -> tuple[torch.Tensor, Fixed]:
    """The states of PyTorch's default generator, and of those of ``process_generators``."""
    return torch.default_generator.get_state(), process_generators()


def set_all_generators(states: tuple[torch.Tensor, Mapping[str, Any]]) -> None:
    """Set what ``all_generators`` gave."""
    torch.default_generator.set_state(states[0])
    set_process_generators(states[1])


def _python_state(state: tuple[Any, ...]) -> list[Any]:
    version, words, gauss = state
    # By NumPy: torch takes ten times as long for a tuple of numbers.
    return [version, torch.from_numpy(np.array(words, dtype=np.int64)), gauss]


def _python_tuple(state: Any) -> tuple[Any, ...]:
    version, words, gauss = state
    return version, tuple(words.tolist()), gauss


def _numpy_state(state: Any) -> list[Any]:
    name, words, position, has_gauss, gauss = state
    return [name, torch.from_numpy(words.astype(np.int64)), int(position), int(has_gauss), gauss]


def _numpy_tuple(state: Any) -> tuple[Any, ...]:
    name, words, position, has_gauss, gauss = state
    return name, words.numpy().astype(np.uint32), position, has_gauss, gauss


def remembered_by(loader: Any, process: Fixed | None = None) -> dict[str, Any]:
    """The state that decides a loader's next batches beside generators given by name.

    The process's generators; generators of any library in the attributes of its sampler and data
    set; whole numbers that a sampler keeps, such as the epoch; and whether its processes have
    begun, if they persist.

    Args:
        loader: The loader.
        process: What ``process_generators`` gave just now, if the caller knows.
    """
    found: dict[str, Any] = {"": process_generators() if process is None else process}
    for path, part in named_parts(loader):
        for name, value in vars(part).items():
            state = _state_of(path, name, value)
            if state is not None:
                found[f"{path}:{name}"] = state
    if _has_persistent(loader):
        found[_PROCESSES] = has_processes(loader)
    return found


def put_remembered(loader: Any, states: Mapping[str, Any]) -> None:
    """Let a loader remember what ``remembered_by`` gave; what it does not have is left out."""
    if "" in states:
        set_process_generators(states[""])
    for path, part in named_parts(loader):
        for name, value in list(vars(part).items()):
            state = states.get(f"{path}:{name}")
            if state is not None:
                _put_state(part, name, value, state)
    if _PROCESSES in states and _has_persistent(loader):
        _put_processes(loader, has_begun=bool(states[_PROCESSES]))


def _has_persistent(loader: Any) -> bool:
    is_plain = isinstance(loader, DataLoader) and not hasattr(loader, "load_state_dict")
    return is_plain and loader.persistent_workers and loader.num_workers > 0


def _put_processes(loader: DataLoader[Any], *, has_begun: bool) -> None:
    if has_processes(loader) and not has_begun:
        end_processes(loader)
    elif has_begun and not has_processes(loader):
        note_processes(loader)


def named_parts(loader: Any) -> Iterator[tuple[str, Any]]:
    """The objects that a loader is made of, each by the first way to it."""
    seen: list[Any] = []
    for path in _PARTS:
        part = loader
        for name in path.split("."):
            part = getattr(part, name, None)
        if hasattr(part, "__dict__") and all(part is not other for other in seen):
            seen.append(part)
            yield path, part


def _state_of(path: str, name: str, value: Any) -> Any:
    if type(value) is int:
        return value if path != "dataset" or name in _COUNTERS_OF_DATA else None
    if isinstance(value, torch.Generator) and name == "generator" and path != "dataset":
        return None
    return state_of_generator(value)


def _put_state(part: Any, name: str, value: Any, state: Any) -> None:
    if type(value) is int and type(state) is int:
        vars(part)[name] = state
    else:
        put_generator(value, state)


def state_of_generator(value: Any) -> Any:
    """The state of a generator of any library, in plain values; None of anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return _python_state(value.getstate())
    if isinstance(value, np.random.RandomState):
        return _numpy_state(value.get_state())
    if isinstance(value, np.random.Generator):
        return _nested(value.bit_generator.state, torch.from_numpy)
    return None


def put_generator(value: Any, state: Any) -> None:
    """Set what ``state_of_generator`` gave."""
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(value, random.Random):
        value.setstate(_python_tuple(state))
    elif isinstance(value, np.random.RandomState):
        value.set_state(_numpy_tuple(state))
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = _nested(state, None)


def _nested(value: Any, from_array: Any) -> Any:
    """A bit generator's state with tensors for arrays, or arrays for tensors."""
    if isinstance(value, Mapping):
        return {key: _nested(item, from_array) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return from_array(value.astype(np.int64))
    if isinstance(value, torch.Tensor):
        return value.numpy().astype(np.uint64)
    return value


def is_same(one: Any, other: Any) -> bool:
    """Whether two nested states are equal, bit by bit; not if they do not compare."""
    if one is other:
        return True
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, deque) and isinstance(other, deque):
        return one.maxlen == other.maxlen and is_same([*one], [*other])
    try:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return has_same_bits(one, other)
        if isinstance(one, (*BY_VALUE, np.generic, np.ndarray)):
            return same(freeze(one), other)
        return type(one) is type(other) and bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False
