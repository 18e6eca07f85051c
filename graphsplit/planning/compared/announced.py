"""The leader's message on the Python values behind a step, and comparing one's own with it.

Every worker runs the same script, so all must find the same recording, with the same numbers. One
whose Python went another way must not take part in the step: the numbers would be of no plain loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

from graphsplit.capture.graph import Mode
from graphsplit.errors import PlanMismatchError
from graphsplit.guards.check import Failure, named_failure
from graphsplit.guards.values import MISSING, shown
from graphsplit.planning.task import Task
from graphsplit.text import with_article

LOSS, OPTIMIZER, AGAIN = "model.loss_fn", "model.optimizer", "model.loss_fn and model.optimizer"


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
        return found or [named_failure(AGAIN, _Text("as before"), _Text("assigned again"))]

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
        return {LOSS: self._task.loss_fn, OPTIMIZER: self._task.optimizers}


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


_MAX_TOLD = 16
_SWAPS = frozenset((LOSS, OPTIMIZER, AGAIN))
Note = Callable[[], str]  # what workers must agree on besides plans; ``str`` gives nothing


def topic_of_graph(number: int, mode: Mode) -> str:
    """The topic on which workers agree on a graph, or on the error that came in place of it."""
    return f"graph of plan {number} ({mode.value})"


class PythonStep(NamedTuple):
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
        if (self.changed or other.changed) and self._swapped() != other._swapped():
            return False
        return self.recording == 0 or _same_numbers(self.lifted, other.lifted)

    def _swapped(self) -> list[str]:
        return [label for label, _ in self.changed if label in _SWAPS]


NOTHING_READ = PythonStep()


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
    if bool(mine.settings) is not bool(leaders.settings):
        other = "a call that does not train" if mine.settings else "one of training"
        raise PlanMismatchError(
            f"worker {rank} is in {with_article(mode.step)}, worker {leader} in {other}\n"
            f"  Fix: every worker makes the same calls in the same order; call eval() and the like "
            f"on every worker, and not below an `if` on the rank."
        )
    lines = [*written]
    if mine.recording == leaders.recording:
        for label, own, there in zip(labels, mine.lifted, leaders.lifted, strict=False):
            if not _same_numbers((own,), (there,)):
                lines.append(f"{label} is {own!r} on worker {rank}, {there!r} on worker {leader}")
    if not mine.agrees_with(leaders):
        lines += _differing(leaders, ranks, changed(), here)
    lines += settings(mine.settings, leaders.settings, ranks)
    # In the first line, which all workers and the scheduler tell.
    differing = "; ".join(dict.fromkeys(lines)) or "they have seen other states before"
    raise PlanMismatchError(
        f"the Python values that a step depends on differ before {with_article(mode.step)} of "
        f"workers {leader} and {rank}: {differing}\n"
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
        label, own, was = failure.place.label, shown(failure.new), shown(failure.old)
        theirs = told.pop(label, None)
        if theirs is None and own == was:  # another tensor, of the same form
            own = f"{own}, a new one,"
        if theirs != own:
            yield f"{label} is {own} on worker {rank}, {theirs or was} on worker {leader}"
    for label, theirs in told.items():
        value = here(label)
        own = "as before" if value is MISSING or shown(value) == theirs else shown(value)
        yield f"{label} is {theirs} on worker {leader}, {own} on worker {rank}"


def _same_numbers(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two sequences have the same bits, -0.0 and NaN told apart."""
    return len(one) == len(other) and (not one or _bits(one) == _bits(other))


def _bits(numbers: Sequence[float]) -> bytes:
    return array("d", numbers).tobytes()
