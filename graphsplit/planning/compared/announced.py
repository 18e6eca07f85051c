"""The leader's message on the Python values behind a step, and comparing one's own with it.

Every worker runs the same script, so all must find the same recording, with the same numbers. One
whose Python went another way must not take part in the step: the numbers would be of no plain loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from graphsplit.capture.graph import Mode
from graphsplit.errors import PlanMismatchError
from graphsplit.guards.check import Failure
from graphsplit.guards.values import MISSING, shown
from graphsplit.planning.compared.swaps import AGAIN, LOSS, OPTIMIZER

_MAX_TOLD = 16
_SWAPS = frozenset((LOSS, OPTIMIZER, AGAIN))
Note = Callable[[], str]  # what workers must agree on besides plans; ``str`` gives nothing


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
        if self._swapped() != other._swapped():
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
    """Whether two sequences have the same bits, -0.0 and NaN told apart."""
    return len(one) == len(other) and _bits(one) == _bits(other)


def _bits(numbers: Sequence[float]) -> bytes:
    return array("d", numbers).tobytes()
