"""The leader's message on the Python values behind a step, and comparing one's own with it.

Every worker runs the same script, so all must find the same recording, with the same numbers. One
whose Python went another way must not take part in the step: the numbers would be of no plain loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch

from graphsplit.capture.graph import Mode
from graphsplit.errors import PlanMismatchError
from graphsplit.guards.check import Failure, named_failure
from graphsplit.guards.values import MISSING, shown
from graphsplit.optimizers.ownership import LEFT_OUT, Elsewhere, is_elsewhere
from graphsplit.planning.task import Task
from graphsplit.torch_ext.attributes import WRITES

_MAX_TOLD = 16
_MAX_NAMED = 1 << 15  # characters of names: they travel in a ticket
_num_writes = attrgetter(WRITES)
_LOSS, _OPTIMIZER, _AGAIN = "model.loss_fn", "model.optimizer", "model.loss_fn and model.optimizer"
_SWAPS = frozenset((_LOSS, _OPTIMIZER, _AGAIN))
Note = Callable[[], str]  # what workers must agree on besides plans; ``str`` gives nothing


@dataclass(frozen=True)
class PythonStep:
    """The Python values behind a step, as far as workers compare them.

    Attributes:
        recording: The number of the recording that holds, plus one; 0 where none does.
        lifted: The lifted numbers.
        changed: Names and values of what the Model was given since the last step, and, where no
            recording holds, of what has changed since the last one.
        settings: Numbers of the optimizers' settings, for a step of training.
        written: Names of the parameters and buffers that were written to since the last step.
    """

    recording: int = 0
    lifted: tuple[float, ...] = ()
    changed: tuple[tuple[str, str], ...] = ()
    settings: tuple[float, ...] = ()
    written: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        changed: Sequence[Failure],
        settings: tuple[float, ...],
        recording: int = 0,
        lifted: tuple[float, ...] = (),
        written: tuple[str, ...] = (),
    ) -> PythonStep:
        """The message, with the text of what has changed."""
        told = tuple((f.place.label[:200], shown(f.new)) for f in changed[:_MAX_TOLD])
        return cls(recording, lifted, told, settings, written)

    def agrees_with(self, other: PythonStep) -> bool:
        """Whether both run the same recording with the same numbers, or both make one."""
        if self.recording != other.recording or not _same_numbers(self.settings, other.settings):
            return False
        if self._swapped() != other._swapped():
            return False
        return self.recording == 0 or _same_numbers(self.lifted, other.lifted)

    def _swapped(self) -> list[str]:
        return [label for label, _ in self.changed if label in _SWAPS]


NOTHING_READ = PythonStep()


def written_apart(
    mine: PythonStep,
    leaders: PythonStep,
    ranks: tuple[int, int],
    owners: Callable[[], Mapping[str, int]],
) -> list[str]:
    """The tensors that one of two workers has written to, in words.

    What its owner alone writes to is written: a callback may go through the parameters that live
    there. What others write to is left out there, so its owner must have done it.

    Args:
        mine: This worker's values.
        leaders: The leader's.
        ranks: This worker, and the leader.
        owners: Gives the owners of all tensors that have one.
    """
    if mine.written == leaders.written:
        return []
    (rank, leader), whose = ranks, owners()
    pairs = (
        (rank, leader, mine.written, leaders.written),
        (leader, rank, leaders.written, mine.written),
    )
    return [
        f"{name!r} was written to on worker {one}, and not on worker {other}"
        for one, other, names, others in pairs
        for name in names
        if name not in others and whose.get(name) != one
    ]


class Writes:
    """The parameters and buffers that code has written to, or replaced, since the last step.

    Args:
        tensors: Gives all of them by name.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self._held: dict[str, torch.Tensor] = {}
        self._here: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._begun = self._settled = 0  # numbers of writes that were left out

    def look(self) -> None:
        """Take the tensors as they are now: what is written from now on counts."""
        self._held = dict(self._tensors())
        self._here = [t for t in self._held.values() if not is_elsewhere(t)]
        self._settle()

    def names(self, *, with_replaced: bool) -> tuple[str, ...]:
        """The names of those written to; those that are others now, where that is asked for."""
        self._begun = Elsewhere.num_left_out
        now = list(map(_num_writes, self._here))
        is_none_left_out = self._begun == self._settled
        if not with_replaced and is_none_left_out and now == self._versions:
            return ()
        before = dict(zip(map(id, self._here), self._versions, strict=True))
        tensors = dict(self._tensors()) if with_replaced else self._held
        found = tuple(
            name
            for name, tensor in tensors.items()
            if getattr(tensor, LEFT_OUT, 0) > self._settled
            or before.get(id(tensor), _num_writes(tensor)) != _num_writes(tensor)
            or (with_replaced and self._held and self._held.get(name) is not tensor)
        )
        if sum(map(len, found)) <= _MAX_NAMED:
            return found
        digest = hashlib.sha256("\n".join(found).encode()).hexdigest()[:12]
        return (f"{len(found)} tensors (SHA-256 {digest})",)

    def pass_over(self) -> None:
        """Let writes since ``names`` be none of the code of the step."""
        self._begun = Elsewhere.num_left_out

    def pass_over_own(self) -> None:
        """Let writes to what lives here be none of the script: its own loop compares them itself.

        Where a write was left out all stays as it is, for that is compared with the owner's.
        """
        if Elsewhere.num_left_out == self._settled:
            self._settle()

    def after_step(self) -> None:
        """Note that a step is over.

        Raises:
            OwnershipError: Code of the step itself has written to a tensor that is not here; it
                runs on one worker alone.
        """
        if Elsewhere.num_left_out != self._begun:
            for tensor in self._held.values():
                is_late = getattr(tensor, LEFT_OUT, 0) > self._begun
                if isinstance(tensor, Elsewhere) and is_late:
                    tensor.need_value("an operation in place, within a step")
        self._settle()

    def _settle(self) -> None:
        self._versions = list(map(_num_writes, self._here))
        self._settled = Elsewhere.num_left_out


def compare(
    mine: PythonStep,
    leaders: PythonStep,
    *,
    ranks: tuple[int, int],
    mode: Mode,
    labels: Sequence[str],
    changed: Callable[[], Sequence[Failure]],
    here: Callable[[str], Any],
    settings: Callable[..., list[str]],
    written: Sequence[str] = (),
) -> None:
    """Refuse a step before which the Python of two workers went different ways.

    Args:
        mine: This worker's values.
        leaders: The leader's.
        ranks: This worker, and the leader.
        mode: Train, eval or predict.
        labels: Names of the lifted numbers here.
        changed: Gives what has changed here since the leader's recording, or the one used last; it
            takes longer than a step should.
        here: Gives the value of a place with a name that has not changed; ``MISSING`` if unknown.
        settings: Says which settings differ, by the numbers of both, and the ranks.
        written: What ``written_apart`` has found.

    Raises:
        PlanMismatchError: They did; names the places that differ, with both values.
    """
    if mine.agrees_with(leaders) and not written:
        return
    rank, leader = ranks
    lines = [*written]
    if mine.recording == leaders.recording:
        for label, own, there in zip(labels, mine.lifted, leaders.lifted, strict=False):
            if not _same_numbers((own,), (there,)):
                lines.append(f"{label} is {own!r} on worker {rank}, {there!r} on worker {leader}")
    if not mine.agrees_with(leaders):
        lines += _differing(leaders, ranks, changed(), here)
    lines += settings(mine.settings, leaders.settings, ranks)
    # In the first line, which all workers and the scheduler tell.
    differing = "; ".join(lines) or "they have seen other states before"
    raise PlanMismatchError(
        f"the Python values that a step depends on differ before a {mode.step} of workers "
        f"{leader} and {rank}: {differing}\n"
        f"  Fix: let the script change them on every worker alike; what differs by right must not "
        f"decide what network and loss compute."
    )


def _differing(
    leaders: PythonStep,
    ranks: tuple[int, int],
    changed: Sequence[Failure],
    here: Callable[[str], Any],
) -> Iterator[str]:
    """The places that are not the same on two workers, in words."""
    rank, leader = ranks
    told = dict(leaders.changed)
    for failure in changed:
        label, own = failure.place.label, shown(failure.new)
        theirs = told.pop(label, shown(failure.old))
        if theirs != own:
            yield f"{label} is {own} on worker {rank}, {theirs} on worker {leader}"
    for label, theirs in told.items():
        value = here(label)
        own = "as before" if value is MISSING else shown(value)
        yield f"{label} is {theirs} on worker {leader}, {own} on worker {rank}"


def _same_numbers(one: Sequence[float], other: Sequence[float]) -> bool:
    return list(map(repr, one)) == list(map(repr, other))


class _Text(str):
    """A text that is shown without quotation marks."""

    def __repr__(self) -> str:
        return str(self)


class Swaps:
    """The loss and the optimizer that a Model was given since the last step.

    With another one, no plan holds. Channels stay open until the next step, before which workers
    compare: one that alone has another must not close what others use.

    Args:
        task: Its task.

    Attributes:
        plans: The plans that nothing runs any more; empty if there is nothing to compare.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self.plans: list[int] = []
        self._then = self._now()

    def note(self, plans: Iterable[int]) -> None:
        """Note that the task has another loss or optimizer, for which no open plan holds."""
        self.plans += plans
        if not self.plans:
            self._then = self._now()

    def changed(self) -> list[Failure]:
        """The swaps that other workers must have made too; none if there were no plans."""
        if not self.plans:
            return []
        now, then = self._now(), self._then
        found = [
            _failure(label, then[label], now[label])
            for label in now
            if not _is_same(now[label], then[label])
        ]
        return found or [named_failure(_AGAIN, _Text("as before"), _Text("assigned again"))]

    def given(self, label: str) -> str | None:
        """The present loss or optimizers in words, for their label; None for others."""
        now = self._now()
        return _text(now[label]) if label in now else None

    def settle(self) -> list[int]:
        """All workers have been given the same: the plans to close."""
        plans, self.plans = self.plans, []
        self._then = self._now()
        return plans

    def _now(self) -> dict[str, Any]:
        return {_LOSS: self._task.loss_fn, _OPTIMIZER: self._task.optimizers}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(is_, one, other))
    return one is other


def _failure(label: str, old: Any, new: Any) -> Failure:
    was, is_now = _text(old), _text(new)
    return named_failure(label, was, is_now if is_now != was else _Text(f"{is_now}, a new one"))


def _text(given: Any) -> _Text:
    if not isinstance(given, tuple):
        return _Text(shown(given))
    rates = [(type(o).__name__, o.param_groups[0].get("lr")) for o in given]
    return _Text(", ".join(f"{name}(lr={shown(rate)})" for name, rate in rates) or "None")
