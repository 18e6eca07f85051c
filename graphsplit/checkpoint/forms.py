"""Buffers that have got another form in a run: saved, and given the same form again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphsplit.capture.graph import LOSS_PATH
from graphsplit.checkpoint.holder import StateHolder
from graphsplit.errors import CheckpointError, StateError
from graphsplit.guards.values import MISSING
from graphsplit.optimizers.ownership import free, is_elsewhere
from graphsplit.planning.task import Task
from graphsplit.torch_ext.attributes import (
    BufferForm,
    add_form,
    buffers_of,
    first_forms,
    forget_waiting,
    form_in,
    name_of_form,
    put_form,
)
from graphsplit.torch_ext.stand_ins import StandIn

_NO_TENSOR = {"none": None, "missing": MISSING}
Form = list[Any]  # name, what is there, is_saved; of a tensor dtype, shape and strides


def kept_forms(task: Task) -> list[Form]:
    """The buffers whose form is not the first one, in a form that can be written."""
    found: list[Form] = []
    for name, module, own, first in _changed(task):
        if not _is_there(module, own, first):
            now = form_in(vars(module), own, MISSING)
            found.append([name, *_written(now.tensor), now.is_saved])
    return found


@contextmanager
def forms_put(task: Task, saved: Any, holder: StateHolder) -> Iterator[None]:
    """Give buffers the forms of a save; if it is not loaded, they have theirs again.

    Raises:
        CheckpointError: The save does not say which forms.
    """
    found, before, rank = _read(saved), kept_forms(task), holder.group().rank
    try:
        put_forms(task, found, holder.owners(), rank)
        yield
    except (CheckpointError, StateError):
        put_forms(task, before, holder.owners(), rank)
        raise


def _read(values: Any) -> list[Form]:
    found: list[Form] = values if isinstance(values, list) else [values]
    for form in found:
        is_list: Any = isinstance(form, list)
        if not (is_list and len(form) == 5 and _is_form(*form)):
            raise CheckpointError(f"the save has no form of a buffer in {str(form)[:80]}")
    return found


def _is_form(name: Any, what: Any, shape: Any, strides: Any, is_saved: Any) -> bool:
    is_dtype = isinstance(what, str) and (
        what in _NO_TENSOR
        or isinstance(getattr(torch, what.removeprefix("torch."), None), torch.dtype)
    )
    sizes = [shape, strides]
    return (
        is_dtype
        and isinstance(name, str)
        and isinstance(is_saved, bool)
        and all(isinstance(one, list) and all(type(n) is int for n in one) for one in sizes)
        and len(shape) == len(strides)
        and all(n >= 0 for n in (*shape, *strides))
    )


def put_forms(task: Task, kept: list[Form], owners: Mapping[str, int], rank: int) -> None:
    """Give buffers the form that they had when ``kept_forms`` was called; values come later.

    Args:
        task: Whose network and loss.
        kept: What it gave.
        owners: The owners that are fixed, by the names of buffers.
        rank: This worker.

    Raises:
        CheckpointError: The network has no such module.
    """
    names = {form[0] for form in kept}
    for name, module, own, first in list(_changed(task)):
        if name not in names and not _is_there(module, own, first):
            put_form(vars(module), own, first, MISSING)
    for name, *there, is_saved in kept:
        module, own = _module_of(task, name)
        now = form_in(vars(module), own, MISSING)
        if _written(now.tensor) == there and now.is_saved is is_saved:
            continue
        tensor: Any = _NO_TENSOR.get(there[0])
        if there[0] not in _NO_TENSOR:
            tensor = now.tensor if _written(now.tensor) == there else _made(module, own, there)
            owner = owners.get(name, rank)
            if owner != rank and not is_elsewhere(tensor):
                free(tensor, name=name, owner=owner)
        put_form(vars(module), own, BufferForm(tensor, is_saved), MISSING)


def forget_waiting_forms(task: Task) -> None:
    """Forget the forms that wait for a buffer's place: all workers go on with the same ones."""
    for _, module, _, _ in list(_changed(task)):
        forget_waiting(module)


def _changed(task: Task) -> Iterator[tuple[str, nn.Module, str, BufferForm]]:
    for top, root in (("", task.network), (LOSS_PATH, task.loss_fn)):
        for path, module in root.named_modules() if isinstance(root, nn.Module) else ():
            for own, first in first_forms(module).items():
                yield ".".join(filter(None, (top, path, own))), module, own, first


def _is_there(module: nn.Module, name: str, form: BufferForm) -> bool:
    now = form_in(vars(module), name, MISSING)
    return now.tensor is form.tensor and now.is_saved is form.is_saved


def _written(there: Any) -> list[Any]:
    if not isinstance(there, torch.Tensor):
        return ["none" if there is None else "missing", [], []]
    strides = there.true_strides() if isinstance(there, StandIn) else there.stride()
    return [str(there.dtype), list(there.shape), list(strides)]


def _made(module: nn.Module, name: str, there: list[Any]) -> torch.Tensor:
    """The tensor that waits for a buffer's place, of a form."""
    dtype, shape, strides = there
    made = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype.removeprefix("torch.")))
    waiting = buffers_of(module).get(name_of_form(name, made))
    if waiting is not None:
        return waiting
    add_form(module, name, made.zero_())
    return made


def _module_of(task: Task, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    root: Any = task.network
    rest = path
    if path == LOSS_PATH or path.startswith(f"{LOSS_PATH}."):
        root, rest = task.loss_fn, path.removeprefix(LOSS_PATH).removeprefix(".")
    try:
        return root.get_submodule(rest), own
    except AttributeError:
        raise CheckpointError(f"the save has a buffer {name}, of no module here") from None
