"""Python values and writes that a loader leaves at its end, for workers that have not read it.

A data set may change what steps read, and the change be read only later: in evaluation, or in the
next epoch. Who has not read the loader learns at the end of the epoch that something is otherwise,
and reads it then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphsplit.batches.signature import Signature
from graphsplit.capture.graph import Mode
from graphsplit.checkpoint.position import EpochStart
from graphsplit.guards.changes import put_all_back
from graphsplit.guards.values import freeze
from graphsplit.guards.visitor import Noted
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.planning.compared.announced import NOTHING_READ, PythonStep
from graphsplit.planning.compared.writes import written_apart
from graphsplit.planning.planner import Planner
from graphsplit.planning.trainable import put_requires_grad
from graphsplit.torch_ext.attributes import writes_of

_PLAIN = "plain values"


class LeftByLoader:
    """The changes of one epoch that the reading of its loader may have made.

    Args:
        planner: Knows what steps read.
        mode: Train or eval.
        loader: The loader.

    Attributes:
        is_for_all: Whether the loader may change what is compared nowhere, so that all read it.
    """

    def __init__(self, planner: Planner, mode: Mode, loader: Any) -> None:
        self._planner = planner
        self._mode = mode
        self._shared = planner.values_shared_with(loader)
        self.is_for_all = self._shared.is_beyond

    def told(self, signature: Signature | None) -> PythonStep:
        """The leader's message.

        Args:
            signature: Of the last batch; None where there was none, or the epoch was stopped.
        """
        if signature is None:
            return NOTHING_READ
        left, changed = self._planner.python_left(self._mode, signature), self._changed()
        return left._replace(changed=(*left.changed, (_PLAIN, changed))) if changed else left

    def was_missed(
        self, told: PythonStep, signature: Signature | None, ranks: tuple[int, int]
    ) -> bool:
        """Whether something is otherwise on the leader.

        Args:
            told: Its message.
            signature: As for ``told``.
            ranks: This worker, and the leader.
        """
        if signature is None or told == NOTHING_READ:
            return False
        mine = self._planner.python_left(self._mode, signature)
        changed = tuple(one for one in told.changed if one[0] != _PLAIN)
        return (
            not mine.agrees_with(told)
            or mine.changed != changed
            or bool(written_apart(mine, told, ranks, self._planner.known_owners))
            or (self._planner.plain_values_agree and self._has_other(told))
        )

    def note_read(self, told: PythonStep) -> None:
        """Note that the loader was read here: values that differ still do so by right."""
        self._planner.plain_values_agree = not self._has_other(told)

    def _has_other(self, told: PythonStep) -> bool:
        theirs = dict(told.changed).get(_PLAIN)
        return theirs is not None and theirs != self._changed()

    def _changed(self) -> str:
        """A digest of the values that are others than before the epoch; empty if none is."""
        new = self._shared.changed()
        return hashlib.sha256("\n".join(new).encode(errors="replace")).hexdigest() if new else ""


@contextmanager
def read_before(planner: Planner, start: EpochStart) -> Iterator[None]:
    """Inside, batches are read again that were trained on before a state was put back.

    What a data set changed then is in that state: it is not changed a second time.
    """
    if not start.step:
        yield
        return
    held = [t for t in planner.tensors().values() if not is_elsewhere(t)]
    before = [(tensor, writes_of(tensor), tensor.detach().clone()) for tensor in held]
    values, trained = planner.python_values.now(), planner.requires_grad()
    groups = [group for optimizer in planner.task.optimizers for group in optimizer.param_groups]
    settings = [dict(group) for group in groups]
    with planner.writes.read_again():
        yield
    with torch.no_grad():
        for tensor, version, value in before:
            if writes_of(tensor) != version:
                tensor.copy_(value)
    planner.python_values.put(*values)
    put_requires_grad(planner.trainable, trained)
    for group, setting in zip(groups, settings, strict=True):
        group.update(setting)


@contextmanager
def left_stays(planner: Planner, mode: Mode) -> Iterator[None]:
    """Inside, batches are read whose steps have left their values in Python: these stay.

    A data set that puts a counter back to zero does so before the step that counts.
    """
    changes = (c for r in planner.recordings if r.mode is mode for c in r.graph.state.changes)
    left = [Noted(change.place, freeze(change.place.read())) for change in changes]
    yield
    put_all_back(left)
