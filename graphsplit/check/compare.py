"""Compare what the plain loop noted with what each worker did. Pure.

Workers hold parts: a parameter lives on one of them. So each worker's values are compared with
those of the plain loop that have the same names, and each of the plain loop's must be on a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from graphsplit.check.record import (
    LIVES_SOMEWHERE,
    STEPS,
    TORCHS,
    UNTOUCHED,
    NotedValue,
    NoteKind,
    Notes,
    What,
)

# What comes first in a step is most likely where a difference came from.
_ORDER = (
    NoteKind.THREADS,
    NoteKind.METRIC,
    NoteKind.OUTPUT,
    NoteKind.LOSS,
    NoteKind.BUFFER,
    NoteKind.GRADIENT,
    NoteKind.SCALER,
    NoteKind.SETTING,
    NoteKind.OPTIMIZER,
    NoteKind.PARAMETER,
    NoteKind.GENERATOR,
)


@dataclass(frozen=True)
class Unequal:
    """One value that is not the same.

    Attributes:
        plain: The plain loop's; None where it has none of that name.
        found: The worker's; None where no worker has any.
        worker: The worker; None where no worker has any.
    """

    plain: NotedValue | None
    found: NotedValue | None
    worker: int | None = None

    @property
    def value(self) -> NotedValue:
        """Either of them."""
        value = self.plain or self.found
        if value is None:
            raise ValueError("one of the two is needed")
        return value


@dataclass(frozen=True)
class RunDifference:
    """The first moment at which not all is the same.

    Attributes:
        record: The plain loop's record of it.
        unequal: What differs; first what comes first in a step.
    """

    record: Notes
    unequal: tuple[Unequal, ...]

    @property
    def first(self) -> Unequal:
        """The difference that is told."""
        return self.unequal[0]


@dataclass(frozen=True)
class Diverged:
    """A worker's script did something else than the plain loop's.

    Attributes:
        plain: What the plain loop did; None if it had ended.
        found: What the worker did; None if it had ended.
        worker: The worker.
    """

    plain: Notes | None
    found: Notes | None
    worker: int


@dataclass(frozen=True)
class RunComparison:
    """The outcome of a comparison.

    Attributes:
        num_workers: How many workers there were.
        num_steps: How many training steps were the same.
        num_calls: How many calls of eval and predict were.
        num_values: How many values were.
        num_models: How many Models were trained or asked.
        unseeded: Generators that were not compared: the script does not seed them.
        difference: The first thing that was not the same; None if all was.
    """

    num_workers: int
    num_steps: int = 0
    num_calls: int = 0
    num_values: int = 0
    num_models: int = 0
    unseeded: tuple[str, ...] = ()
    difference: RunDifference | Diverged | None = None


@dataclass
class _Count:
    """The part that was the same so far."""

    steps: int = 0
    calls: int = 0
    values: int = 0
    models: set[int] = field(default_factory=set)


@dataclass
class _Seeds:
    """Which generators were seeded, as far as their states tell.

    Python and NumPy seed theirs with something else in every process, and libraries draw from them
    while they are imported. So states that are equal in all processes were seeded. Where they
    never were when somebody drew, the script has not seeded the generator.
    """

    seeded: set[str] = field(default_factory=lambda: {TORCHS})
    unseeded: set[str] = field(default_factory=set)

    def compare(self, expected: Notes, found: Sequence[Notes]) -> None:
        """Look at the states of one moment."""
        for name, states in _states((expected, *found)).items():
            if name in self.seeded | self.unseeded:
                continue
            if len({state.digest for state in states}) == 1:
                self.seeded.add(name)
            elif any(state.form != UNTOUCHED for state in states):
                self.unseeded.add(name)

    def counts(self, value: NotedValue) -> bool:
        """Whether a value is to be compared."""
        return value.kind is not NoteKind.GENERATOR or value.name in self.seeded


def _states(records: Iterable[Notes]) -> dict[str, list[NotedValue]]:
    states: dict[str, list[NotedValue]] = {}
    for record in records:
        for value in record.values:
            if value.kind is NoteKind.GENERATOR:
                states.setdefault(value.name, []).append(value)
    return states


def compare(plain: Sequence[Notes], workers: Sequence[Sequence[Notes]]) -> RunComparison:
    """Compare two runs of one script, up to the first difference.

    Args:
        plain: What the plain loop noted.
        workers: What each worker noted.
    """
    count, seeds = _Count(), _Seeds()
    difference: RunDifference | Diverged | None = None
    for index in range(max(map(len, (plain, *workers)))):
        expected = plain[index] if index < len(plain) else None
        found = [records[index] if index < len(records) else None for records in workers]
        difference = _diverged(expected, found)
        if difference is None and expected is not None:
            held = [record for record in found if record is not None]
            owned = [_owned_later(records, index) for records in workers]
            seeds.compare(expected, held)
            difference = _difference(expected, held, owned, seeds)
        if difference is not None or expected is None:
            break
        _add(count, expected, found)
    return RunComparison(
        len(workers),
        count.steps,
        count.calls,
        count.values,
        len(count.models),
        tuple(sorted(seeds.unseeded)),
        difference,
    )


def _add(count: _Count, expected: Notes, found: Sequence[Notes | None]) -> None:
    is_loop = expected.what is What.LOOP_STEP
    count.models.add(0 if is_loop else expected.model)  # networks are counted as one
    count.steps += expected.what in STEPS
    count.calls += expected.what in (What.EVAL, What.PREDICT)
    count.values += sum(len(record.values) for record in found if record is not None)


def _diverged(expected: Notes | None, found: Sequence[Notes | None]) -> Diverged | None:
    for worker, record in enumerate(found):
        places = [one.place if one is not None else None for one in (expected, record)]
        if places[0] != places[1]:
            return Diverged(expected, record, worker)
    return None


def _owned_later(records: Sequence[Notes], index: int) -> frozenset[tuple[NoteKind, str]] | None:
    """The part of a Model that a worker owns, before it is trained: only that counts of its start.

    Before there is a plan, each worker has everything.
    """
    record = records[index]
    if record.what is not What.START:
        return None
    later = records[index + 1 :]
    trained = (r for r in later if r.what in (What.STEP, What.BATCH) and r.model == record.model)
    step = next(trained, None)
    return frozenset(() if step is None else (value.key for value in step.values))


def _difference(
    expected: Notes,
    found: Sequence[Notes],
    owned: Sequence[frozenset[tuple[NoteKind, str]] | None],
    seeds: _Seeds,
) -> RunDifference | None:
    known = {value.key: value for value in expected.values if seeds.counts(value)}
    unequal: list[Unequal] = []
    held: set[tuple[NoteKind, str]] = set()
    for worker, record in enumerate(found):
        counting = filter(seeds.counts, _counting(record, owned[worker]))
        mine = {value.key: value for value in counting}
        held.update(mine)
        for key, value in mine.items():
            other = known.get(key)
            if other is None or not other.is_same(value):
                unequal.append(Unequal(other, value, worker))
        unequal += [
            Unequal(value, None, worker)
            for key, value in known.items()
            if key not in mine and value.kind not in LIVES_SOMEWHERE
        ]
    if expected.what in STEPS | {What.BATCH}:
        unequal += [
            Unequal(value, None)
            for key, value in known.items()
            if key not in held and value.kind in LIVES_SOMEWHERE
        ]
    if not unequal:
        return None
    return RunDifference(expected, tuple(sorted(unequal, key=_rank(expected))))


def _counting(record: Notes, owned: frozenset[tuple[NoteKind, str]] | None) -> Sequence[NotedValue]:
    if owned is None:
        return record.values
    return [v for v in record.values if v.key in owned or v.kind not in LIVES_SOMEWHERE]


def _rank(expected: Notes) -> Callable[[Unequal], tuple[int, int, int]]:
    """The order in which what differs is told."""
    positions = {value.key: position for position, value in enumerate(expected.values)}

    def rank(unequal: Unequal) -> tuple[int, int, int]:
        value = unequal.value
        position = positions.get(value.key, len(positions))
        # Backward computes the gradients of the last layers first.
        is_backward = value.kind is NoteKind.GRADIENT
        worker = -1 if unequal.worker is None else unequal.worker
        return _ORDER.index(value.kind), -position if is_backward else position, worker

    return rank
