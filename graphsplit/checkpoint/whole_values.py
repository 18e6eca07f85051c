"""Functions of torch that need values of modules between two steps: pruning, averages, copies.

All workers run the script, so all come to ``prune.l1_unstructured(net.fc, "weight", 0.3)``. There
the values that live on one worker are given to all, the function runs on each as in one process,
and what lives elsewhere is freed again; what it has made is on every worker, as before a first
step.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn

from graphsplit.capture.state.kept_names import is_kept_name
from graphsplit.capture.state.kept_value import KeptValue
from graphsplit.capture.state.older_values import buffer_behind
from graphsplit.errors import ConfigurationError, OwnershipError
from graphsplit.frames import own_and_torchs
from graphsplit.job import joined
from graphsplit.job.job import Job
from graphsplit.job.script import ModelCall
from graphsplit.optimizers.ownership import LEFT_OUT, Elsewhere
from graphsplit.tensor_meta import TensorMeta, contiguous_strides
from graphsplit.torch_ext.attributes import MADE_BUFFERS, buffers_of
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass, leaves_of, pytree
from graphsplit.torch_ext.replaced import (
    FILLING,
    LOOKING,
    NAMING,
    SAVING,
    UPDATE_AVERAGE,
    call_instead,
    copy_modules_by,
    deep_copy,
)
from graphsplit.torch_ext.stand_ins import as_ordinary, in_form

_MODULES = nn.Module.buffers.__code__.co_filename
PICKLED = (
    "a distributed network was pickled: each worker has its own parameters only\n"
    "  Fix: torch.save(net.state_dict(), path) on one worker, after net.state_dict() on all."
)
_here = threading.local()  # .is_inside: values are on all workers
_installed: list[bool] = []


def install() -> None:
    """Have the functions ask for the values that they need, from now on, in this process."""
    if _installed:
        return
    _installed.append(True)
    calls = (
        *((_call_looking, LOOKING), (_call_filling, FILLING), (_call_saving, SAVING)),
        (_call_naming, NAMING),
    )
    for call, functions in calls:
        for function in functions:
            call_instead(function, call)
    copy_modules_by(_copied)
    Elsewhere.may_move = staticmethod(_may_move)


def _may_move() -> bool:
    """Whether all workers write, and none will have to be told later what it has missed."""
    job = joined.current()
    return job is not None and not (_is_reading(job) or job.script.gives_again)


def _is_reading(job: Job) -> bool:
    return job.member.position.calls.is_reading


def _call_looking(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    kept = _kept_in((args, kwargs))
    tensors = [*_tensors_in((args, kwargs)), *(buffer for _, _, buffer in kept)]
    modules = [m for one in args if isinstance(one, nn.Module) for m in one.modules()]
    hidden = modules if original.__name__ == UPDATE_AVERAGE.__name__ else ()
    with _whole(tensors, original.__name__), _in_place(kept), _with_eager_buffers(hidden):
        return original(*args, **kwargs)


def _call_naming(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The buffers of a module by name; scripts, and their libraries, see those of eager mode."""
    found: Any = original(*args, **kwargs)
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename == _MODULES:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(own_and_torchs()):
        return found
    prefix = kwargs.get("prefix", "") if len(args) < 2 else args[1]
    modules = args[0].named_modules(prefix=prefix, remove_duplicate=False)
    hidden = {
        f"{path}.{name}" if path else name
        for path, module in modules
        for name in _not_of_eager_mode(module)
    }
    return (one for one in found if one[0] not in hidden) if hidden else found


def _not_of_eager_mode(module: nn.Module) -> list[str]:
    """The names of a module's buffers that are plain tensors in eager mode, kept in Python."""
    made = vars(module).get(MADE_BUFFERS, ())
    return [name for name in buffers_of(module) if name in made or is_kept_name(name)]


@contextmanager
def _with_eager_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules have the buffers of eager mode, inside; averages pair them by their order.

    The others are plain tensors there, in attributes, dictionaries and lists.
    """
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in modules:
        table = buffers_of(module)
        if hidden := _not_of_eager_mode(module):
            before.append((table, dict(table)))
            for name in hidden:
                del table[name]
    try:
        yield
    finally:
        for table, whole in before:
            table.clear()
            table.update(whole)


def _kept_in(given: Any) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
    """Attributes of modules whose tensors are kept with the network: of a pruned layer the weight.

    Each with the buffer that holds it.
    """
    modules = [m for leaf in leaves_of(nn.Module, given) for m in leaf.modules()]
    found = [
        (vars(module), name, buffer_behind(value))
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, KeptValue)
    ]
    return [(held, name, buffer) for held, name, buffer in found if buffer is not None]


@contextmanager
def _in_place(kept: Sequence[tuple[dict[str, Any], str, torch.Tensor]]) -> Iterator[None]:
    """Let attributes hold, inside, the values that are kept with the network."""
    before = [(held, name, held[name], buffer.detach().clone()) for held, name, buffer in kept]
    for held, name, _, value in before:
        held[name] = value
    yield
    for held, name, stand_in, value in before:
        if held.get(name) is value:
            held[name] = stand_in


def _call_filling(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    given = args[0] if args else kwargs.get("tensor")
    if not isinstance(given, Elsewhere) or _is_of_own_loop(given):
        return original(*args, **kwargs)
    with torch.no_grad():  # what it draws is drawn here, too
        form = in_form(given)
        original(form, *args[1:], **{k: v for k, v in kwargs.items() if k != "tensor"})
    given.note_write()
    return given


def _call_saving(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    leaves = pytree.tree_leaves((args, kwargs))
    modules = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    if any(map(_is_of_own_loop, _tensors_in(modules))):
        raise OwnershipError(PICKLED)
    for tensor in _tensors_in(leaves):
        if isinstance(tensor, Elsewhere) and not _is_of_own_loop(tensor):
            tensor.need_value(original.__name__)
    return original(*args, **kwargs)


def _copied(module: nn.Module, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy`` of a module."""
    tensors = _tensors_in(module)
    with _whole(tensors, "copy.deepcopy"):
        made = deep_copy(module, memo)
    for tensor in _tensors_in(made):
        vars(tensor).pop(LEFT_OUT, None)
    return made


def _is_of_own_loop(tensor: torch.Tensor) -> bool:
    """Whether a tensor answers for itself, as a value of the script's own loop."""
    return hasattr(type(tensor), "as_loop_value")


def _tensors_in(given: Any) -> list[torch.Tensor]:
    """The parameters and buffers of modules in what a function was given, and tensors there.

    What is kept for Python code comes last: a process that has just started has none of it.
    """
    found: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(given):
        if isinstance(leaf, nn.Module):
            found += leaf.parameters()
            for name, buffer in leaf.named_buffers():
                (kept if is_kept_name(name.rpartition(".")[2]) else found).append(buffer)
        elif isinstance(leaf, torch.Tensor):
            found.append(leaf)
    return list({id(tensor): tensor for tensor in (*found, *kept)}.values())


@contextmanager
def _whole(tensors: Sequence[torch.Tensor], name: str) -> Iterator[None]:
    """Let values that live on one worker be on all, inside. All workers come here."""
    job = joined.current()
    if job is None or getattr(_here, "is_inside", False) or any(map(_is_of_own_loop, tensors)):
        yield
        return
    if not (_owners_of(job, tensors) or job.script.holds(tensors)):
        yield
        return
    if _is_reading(job):
        raise ConfigurationError(
            f"{name}() of a module whose values live on several workers, by a data set that only "
            f"some of them read, in processes of its own, or where lost workers are waited for\n"
            f"  Fix: call it in the script or a callback."
        )
    values: list[list[Any]] = job.script.collective(ModelCall(name, _values, (job, tensors)))
    _here.is_inside = True
    try:
        with as_ordinary(tensors, Elsewhere):
            _put(tensors, values)
            yield
    finally:
        _here.is_inside = False


def _owners_of(job: Job, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """The owners of those that have one, by index."""
    found = job.owners.known({str(index): tensor for index, tensor in enumerate(tensors)})
    return {int(index): owner for index, owner in found.items()}


def _values(job: Job, tensors: Sequence[torch.Tensor]) -> list[list[Any]]:
    """The values of tensors that live on one worker, each with its index: the call's result."""
    found = []
    with job.reporting(), torch.no_grad(), DisableTorchFunctionSubclass():
        for index, owner in _owners_of(job, tensors).items():
            tensor = tensors[index].detach()
            shape = tuple(tensor.shape)
            meta = TensorMeta(tensor.dtype, shape, contiguous_strides(shape))
            found.append([index, job.control.broadcast(tensor, meta, source=owner)])
    return found


def _put(tensors: Sequence[torch.Tensor], values: list[list[Any]]) -> None:
    """Let tensors have their values: elsewhere, and in a process that is given them again."""
    with torch.no_grad(), DisableTorchFunctionSubclass():
        while values:
            index, value = values.pop()
            if index < len(tensors) and tensors[index].data_ptr() != value.data_ptr():
                tensors[index].data.copy_(value)
