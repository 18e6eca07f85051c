"""Build a network without the memory of its parameters, and give each worker only its own.

    with gs.deferred_init():
        net = BigModel()                      # no memory for parameters and buffers
    optimizer = torch.optim.AdamW(net.parameters())
    model = gs.Model(net, ...)                # plans, then materialize(net, owned)

What holds afterwards, compared with the same lines without ``deferred_init``:

- parameters and buffers that are materialised have the same bits, and are the same objects that
  the optimizer was given;
- the generator is in the same state at every moment, inside the context and after it: random
  calls are executed while they are recorded, into memory that is dropped at once;
- tensors that are neither parameter nor buffer (``self.mask = torch.tril(...)``) have their
  values when the context ends;
- memory: one tensor at a time while recording, then what is owned and the largest tensor.

**The rule for reading early.** A value that is read before `materialize` is filled then: inside
the context (``.item()``, ``.numpy()``, a branch), and after it (printing, a forward pass, a
checkpoint). Never is anything but the true value seen. From 1 MB on, a warning names the call and
the line, because that memory is what deferring was to save.

**Why not meta tensors.** A parameter's ``.data`` cannot go from meta to CPU, initialisers branch
on the device (``trunc_normal_`` returns at once for meta), and capture refuses mixed devices. A
parameter built here is a CPU tensor from the start, with true strides and true aliases, that only
lacks its memory (see ``recording.py``). Expanded scalars (`without_memory`) take its
place where a parameter belongs to another worker for good; they
will not do during construction, because their strides are not the true ones, and ``contiguous()``
or ``view`` inside an initialiser would then mean something else.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Collection, Iterator
from typing import Any, ClassVar

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from graphsplit.deferred import guard as deferred_guard
from graphsplit.deferred.guard import GuardedTensors
from graphsplit.deferred.recording import InitRecording
from graphsplit.deferred.recording_modes import OperationMode, ReadingMode
from graphsplit.errors import ConfigurationError
from graphsplit.optimizers.freed_memory import return_now
from graphsplit.text import called
from graphsplit.torch_ext.attributes import BUFFERS, named_tensors
from graphsplit.torch_ext.stand_ins import plain_torch, without_memory

_open: list[InitRecording] = []


@called("gs.deferred_init")
@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Builds modules without taking memory for their parameters and buffers.

    Inside another `deferred_init` it does nothing of its own. Only CPU tensors of the thread that
    entered the context are deferred; others are built as usual.
    """
    if _open:
        yield
        return
    recording = InitRecording()
    _open.append(recording)
    try:
        with ReadingMode(recording), OperationMode(recording):
            yield
    finally:
        _open.pop()
        with plain_torch():
            _finish(recording)
        return_now()


def is_deferred(module: torch.nn.Module) -> bool:
    """Tells whether a parameter or buffer of the module still waits for its memory."""
    with plain_torch():
        return any(deferred_guard.is_hollow(tensor) for tensor in named_tensors(module).values())


def materialize(module: torch.nn.Module, owned: Collection[str] | None = None) -> None:
    """Gives the owned parameters and buffers their memory and values; takes the others' away.

    Works on any module: of one that was built plainly, only what is not owned is dropped. A tied
    parameter is owned if any of its names is.

    Args:
        module: the network.
        owned: names as in ``named_parameters(remove_duplicate=False)`` and ``named_buffers``;
            None means all of them.

    Raises:
        ConfigurationError: a name is not one of the module's.
    """
    named = named_tensors(module)
    if owned is not None:
        _check_names(owned, set(named))
    kept = {id(t): t for name, t in named.items() if owned is None or name in owned}
    others = {id(t): t for t in named.values() if id(t) not in kept}
    with plain_torch():
        for tensor in others.values():
            deferred_guard.unguard(tensor)
            tensor.data = without_memory(tensor)
        deferred_guard.fill(kept.values())
    return_now()


def _check_names(owned: Collection[str], known: set[str]) -> None:
    unknown = sorted(set(owned) - known)
    if unknown:
        raise ConfigurationError(
            f"materialize: the network has no parameter or buffer {', '.join(map(repr, unknown))}\n"
            f"  it has {len(known)}, such as {', '.join(map(repr, sorted(known)[:3]))}\n"
            "  Fix: give names as in net.named_parameters(remove_duplicate=False) and "
            "net.named_buffers()."
        )


def _finish(recording: InitRecording) -> None:
    """Guards what stays deferred, and fills everything else that is alive."""
    gc.collect()  # Initialisers leave cycles that would keep temporaries alive.
    found, stays = _find_tensors(recording)
    plain = (torch.Tensor, torch.nn.Parameter)  # these have a guarded form
    stays -= {number for tensor, number in found if type(tensor) not in plain}
    # Alive but not to be found: held by C++ alone, where nothing could guard it.
    recording.fill(recording.alive() - stays)
    guarded = GuardedTensors(recording)
    for tensor, number in found:
        if number in stays:
            guarded.add(tensor, number)
    del found
    recording.close()
    if stays:
        _ForwardHook.watch(recording)


def _find_tensors(recording: InitRecording) -> tuple[list[tuple[torch.Tensor, int]], set[int]]:
    """Returns the tensors on hollow storages, and the storages of parameters and buffers."""
    found: list[tuple[torch.Tensor, int]] = []
    stays: set[int] = set()
    for candidate in _objects_of((torch.Tensor, torch.nn.Module)):
        if isinstance(candidate, torch.Tensor):
            number = recording.number_of(candidate)
            if number is not None:
                found.append((candidate, number))
                if isinstance(candidate, torch.nn.Parameter):
                    stays.add(number)
        else:
            for buffer in candidate.__dict__.get(BUFFERS, {}).values():
                number = None if buffer is None else recording.number_of(buffer)
                if number is not None:
                    stays.add(number)
    return found, stays


def _objects_of(kinds: tuple[type, ...]) -> Iterator[Any]:
    """Yields every live object of these classes; asks each class once, and no object."""
    wanted: dict[int, bool] = {}
    for candidate in gc.get_objects():
        kind = type(candidate)
        is_wanted = wanted.get(id(kind))
        if is_wanted is None:
            is_wanted = wanted[id(kind)] = issubclass(kind, kinds)
        if is_wanted:
            yield candidate


class _ForwardHook:
    """Fills a network before its first forward pass, if nothing else did.

    The guarded tensors alone would do for the values, but modules such as MultiheadAttention take
    a slower path, of other bits, when they see a parameter of a class of its own.
    """

    _recordings: ClassVar[weakref.WeakSet[InitRecording]] = weakref.WeakSet()
    _handle: ClassVar[RemovableHandle | None] = None

    @classmethod
    def watch(cls, recording: InitRecording) -> None:
        """Starts to watch all modules, until the recording is gone or used up."""
        cls._recordings.add(recording)
        if cls._handle is None:
            cls._handle = register_module_forward_pre_hook(cls._before_forward)

    @classmethod
    def _before_forward(cls, module: torch.nn.Module, _: object) -> None:
        tensors = [t for t in named_tensors(module).values() if deferred_guard.is_guarded(t)]
        deferred_guard.fill(tensors, because=f"{type(module).__name__} runs")
        for recording in list(cls._recordings):
            if not recording.alive():
                cls._recordings.discard(recording)
        if not cls._recordings and cls._handle is not None:
            cls._handle.remove()
            cls._handle = None
