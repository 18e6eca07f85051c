"""A Model's values, so that they can be compared bit for bit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from graphsplit.check.record import TORCHS, UNTOUCHED, NotedValue, NoteKind
from graphsplit.deferred.guard import is_guarded
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.planning.task import Task, named_state
from graphsplit.tensor_meta import octets_of
from graphsplit.torch_ext.attributes import parts_of_sparse
from graphsplit.torch_ext.private import pytree

_FEW = 16  # elements that are noted unasked
_MOST = 1 << 16  # ... and at the most


def digest_of(tensor: torch.Tensor) -> str:
    """Equal for equal bytes alone."""
    digest = hashlib.sha256()
    for part in _parts(tensor.detach()):
        digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of a tensor, in the order of its elements."""
    if tensor.layout is torch.sparse_coo:
        for part in parts_of_sparse(tensor):
            yield from _parts(part)
    elif tensor.is_quantized:
        yield from _parts(tensor.int_repr())
    elif tensor.layout is not torch.strided:
        yield from _parts(tensor.to_dense())
    else:
        yield octets_of(tensor)


def tensor_value(
    kind: NoteKind, name: str, tensor: torch.Tensor | None, *, whole: bool
) -> NotedValue:
    """A tensor as a value; ``whole``: with all its elements."""
    if tensor is None:
        return NotedValue(kind, name, "None", "")
    form = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.is_meta:
        return NotedValue(kind, name, f"{form} on meta", "")
    elements: tuple[str, ...] = ()
    if tensor.numel() <= (_MOST if whole else _FEW) and not tensor.is_quantized:
        dense = tensor.detach()
        dense = dense.to_dense() if dense.layout is not torch.strided else dense
        elements = tuple(map(repr, dense.reshape(-1).tolist()))
    return NotedValue(kind, name, form, digest_of(tensor), elements)


def plain_value(kind: NoteKind, name: str, value: Any) -> NotedValue:
    """Something that is no tensor. What has no value to compare is compared by its type."""
    form = type(value).__name__
    if not isinstance(value, (bool, int, float, complex, str, bytes, type(None), tuple, list)):
        return NotedValue(kind, name, form, "")
    text = repr(value)
    return NotedValue(kind, name, form, hashlib.sha256(text.encode()).hexdigest(), (text[:200],))


class ModelValues:
    """The values that one Model holds here.

    Args:
        task: The Model's.
        whole: Kind and name of a value of which all elements are noted.
        prefix: Begins the names of its parameters and buffers.
    """

    def __init__(self, task: Task, whole: tuple[str, str], prefix: str = "") -> None:
        self._task = task
        self._whole = whole
        self._prefix = prefix

    def state(self) -> Iterator[NotedValue]:
        """Parameters, gradients, buffers, optimizers and scaler: of what lives here."""
        here = dict(self._here())
        for name, tensor in here.items():
            if isinstance(tensor, torch.nn.Parameter):
                yield self._tensor(NoteKind.PARAMETER, name, tensor)
                yield self._tensor(NoteKind.GRADIENT, name, tensor.grad)
            else:
                yield self._tensor(NoteKind.BUFFER, name, tensor)
        names = {id(tensor): name for name, tensor in here.items()}
        for number, optimizer in enumerate(self._task.optimizers):
            yield from self._optimizer(f"optimizer {number}", optimizer, names)
        if self._task.scaler is not None:
            for name, value in self._task.scaler.state_dict().items():
                yield plain_value(NoteKind.SCALER, name, value)

    def tree(self, kind: NoteKind, name: str, found: Any) -> Iterator[NotedValue]:
        """Everything in a structure of tensors and plain values."""
        for path, leaf in pytree.tree_flatten_with_path(found)[0]:
            whole_name = f"{name}{pytree.keystr(path)}"
            if isinstance(leaf, torch.Tensor):
                yield self._tensor(kind, whole_name, leaf)
            else:
                yield plain_value(kind, whole_name, leaf)

    def _here(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for name, tensor in named_state(self._task.network, self._task.loss_fn).items():
            if id(tensor) in seen or is_elsewhere(tensor) or is_guarded(tensor):
                continue
            seen.add(id(tensor))
            yield f"{self._prefix}{name}", tensor

    def _optimizer(
        self, which: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]
    ) -> Iterator[NotedValue]:
        here = getattr(optimizer.state, "here", optimizer.state)  # in a loop of the script's own
        for number, group in enumerate(optimizer.param_groups):
            owned = [p for p in group["params"] if id(p) in names]
            if owned:
                settings = {key: value for key, value in group.items() if key != "params"}
                yield from self.tree(NoteKind.SETTING, f"{which}, group {number}", settings)
            for parameter in owned:
                # Not by [...]: that would make an empty state.
                state = here.get(parameter, {})
                yield from self.tree(NoteKind.OPTIMIZER, f"{which}, {names[id(parameter)]}", state)

    def _tensor(self, kind: NoteKind, name: str, tensor: torch.Tensor | None) -> NotedValue:
        return tensor_value(kind, name, tensor, whole=(kind.value, name) == self._whole)


class Generators:
    """The states of the generators that scripts draw from, from now on.

    Python seeds its own and NumPy's anew in every process. So it is noted, too, whether somebody
    has used one.
    """

    def __init__(self) -> None:
        self._at_first = {name: digest for name, digest in self._digests() if name != TORCHS}

    def values(self) -> Iterator[NotedValue]:
        """One value for each."""
        for name, digest in self._digests():
            form = UNTOUCHED if self._at_first.get(name) == digest else "state"
            yield NotedValue(NoteKind.GENERATOR, name, form, digest)

    @staticmethod
    def _digests() -> Iterator[tuple[str, str]]:
        yield TORCHS, digest_of(torch.default_generator.get_state())
        yield "random", hashlib.sha256(repr(random.getstate()).encode()).hexdigest()
        kind, keys, *rest = np.random.get_state(legacy=True)
        text = f"{kind} {np.asarray(keys).tobytes().hex()} {rest}"
        yield "numpy", hashlib.sha256(text.encode()).hexdigest()
