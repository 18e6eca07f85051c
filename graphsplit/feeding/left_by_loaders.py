"""Python values and writes that a loader leaves at its end, for workers that have not read it.

A data set may change what steps read, and the change be read only later: in evaluation, or in the
next epoch. Who has not read the loader learns at the end of the epoch that something is otherwise,
and reads it then.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from graphsplit.batches.batch import Signature
from graphsplit.capture.graph import Mode
from graphsplit.planning.compared.announced import NOTHING_READ, PythonStep
from graphsplit.planning.compared.writes import written_apart
from graphsplit.planning.planner import Planner

_ATTRIBUTES = "attributes of the network"


class LeftByLoader:
    """The changes of one epoch that the reading of its loader may have made.

    Args:
        planner: Knows what steps read.
        mode: Train or eval.
    """

    def __init__(self, planner: Planner, mode: Mode) -> None:
        self._planner = planner
        self._mode = mode
        self._before = _attributes_of(planner)

    def told(self, signature: Signature | None) -> PythonStep:
        """The leader's message.

        Args:
            signature: Of the last batch; None where there was none, or the epoch was stopped.
        """
        if signature is None:
            return NOTHING_READ
        left, now = self._planner.python_left(self._mode, signature), _attributes_of(self._planner)
        if now == self._before:
            return left
        return replace(left, changed=(*left.changed, (_ATTRIBUTES, now)))

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
        changed = tuple(one for one in told.changed if one[0] != _ATTRIBUTES)
        return (
            not mine.agrees_with(told)
            or mine.changed != changed
            or bool(written_apart(mine, told, ranks, self._planner.known_owners))
            or (self._planner.attributes_agree and self._has_other(told))
        )

    def note_read(self, told: PythonStep) -> None:
        """Note that the loader was read here: attributes that differ still do so by right."""
        self._planner.attributes_agree = not self._has_other(told)

    def _has_other(self, told: PythonStep) -> bool:
        attributes = dict(told.changed).get(_ATTRIBUTES)
        return attributes not in (None, _attributes_of(self._planner))


def _attributes_of(planner: Planner) -> str:
    return hashlib.sha256(planner.attributes().encode(errors="replace")).hexdigest()
