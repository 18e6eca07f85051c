"""The leader's message on the Python values behind a step, and comparing one's own with it.

Every worker runs the same script, so all must find the same recording, with the same numbers. One
whose Python went another way must not take part in the step: the numbers would be of no plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphsplit.capture.graph import Mode
from graphsplit.errors import PlanMismatchError
from graphsplit.guards.check import Failure
from graphsplit.guards.values import shown

_MAX_TOLD = 16
Note = Callable[[], str]  # what workers must agree on besides plans; ``str`` gives nothing


@dataclass(frozen=True)
class PythonStep:
    """The Python values behind a step, as far as workers compare them.

    Attributes:
        recording: The number of the recording that holds, plus one; 0 where none does.
        lifted: The lifted numbers.
        changed: Names and values of what has changed since the last recording, where none holds.
        settings: Numbers of the optimizers' settings, for a step of training.
    """

    recording: int = 0
    lifted: tuple[float, ...] = ()
    changed: tuple[tuple[str, str], ...] = ()
    settings: tuple[float, ...] = ()

    @classmethod
    def without(cls, changed: Sequence[Failure], settings: tuple[float, ...]) -> PythonStep:
        """The message where no recording holds."""
        told = tuple((f.place.label[:200], shown(f.new)) for f in changed[:_MAX_TOLD])
        return cls(changed=told, settings=settings)

    def agrees_with(self, other: PythonStep) -> bool:
        """Whether both run the same recording with the same numbers, or both make one."""
        if self.recording != other.recording or not _same_numbers(self.settings, other.settings):
            return False
        return self.recording == 0 or _same_numbers(self.lifted, other.lifted)


NOTHING_READ = PythonStep()


def compare(
    mine: PythonStep,
    leaders: PythonStep,
    *,
    ranks: tuple[int, int],
    mode: Mode,
    labels: Sequence[str],
    changed: Callable[[], Sequence[Failure]],
    settings: Callable[..., list[str]],
) -> None:
    """Refuse a step before which the Python of two workers went different ways.

    Args:
        mine: This worker's values.
        leaders: The leader's.
        ranks: This worker, and the leader.
        mode: Train, eval or predict.
        labels: Names of the lifted numbers here.
        changed: Gives what has changed here since the recording that was used last, which takes
            longer than a step should.
        settings: Says which settings differ, by the numbers of both, and the ranks.

    Raises:
        PlanMismatchError: They did; names the places that differ, with both values.
    """
    if mine.agrees_with(leaders):
        return
    rank, leader = ranks
    lines = []
    if mine.recording == leaders.recording:
        for label, here, there in zip(labels, mine.lifted, leaders.lifted, strict=False):
            if not _same_numbers((here,), (there,)):
                lines.append(f"{label} is {here!r} on worker {rank}, {there!r} on worker {leader}")
    else:
        told = dict(leaders.changed)
        for failure in changed():
            theirs = told.pop(failure.place.label, shown(failure.old))
            if theirs != shown(failure.new):
                lines.append(
                    f"{failure.place.label} is {shown(failure.new)} on worker {rank}, {theirs} on "
                    f"worker {leader}"
                )
        lines += [
            f"{label} is {theirs} on worker {leader}, and has not changed on worker {rank}"
            for label, theirs in told.items()
        ]
    lines += settings(mine.settings, leaders.settings, ranks)
    # In the first line, which all workers and the scheduler tell.
    differing = "; ".join(lines) or "they have seen other states before"
    raise PlanMismatchError(
        f"the Python values that a step depends on differ before a {mode.value} step of workers "
        f"{leader} and {rank}: {differing}\n"
        f"  Fix: let the script change them on every worker alike; what differs by right must not "
        f"decide what network and loss compute."
    )


def _same_numbers(one: Sequence[float], other: Sequence[float]) -> bool:
    return list(map(repr, one)) == list(map(repr, other))
