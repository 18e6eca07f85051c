"""Whether a run of the network matrix went as it must. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from matrix.network.cluster import Told
from matrix.network.faults import (
    SCHEDULER,
    Case,
)
from matrix.table import Row

_LOST_SCHEDULER = r"the connection to the scheduler at \S+ ended|no scheduler answers at"
_RECOVERING = r"recovering to generation|worker \d \(.*was lost"


@dataclass(frozen=True)
class Run:
    """What was seen of one run.

    Attributes:
        case: What was to happen.
        processes: What each process printed.
        in_time: Whether all of them ended by themselves.
        fault_at: When the network broke; None if it never did.
        bound_s: How long it may take until everybody knows.
        left_behind: What was still there afterwards.
    """

    case: Case
    processes: Sequence[Told]
    in_time: bool
    fault_at: float | None
    bound_s: float
    left_behind: Sequence[str] = ()


def judge(run: Run, plain: Sequence[str]) -> Row:
    """The row of a run; ``plain`` is what one process prints."""
    problems = list(_problems(run, plain))
    case = run.case
    status = next((one.status for one in run.processes if one.name == SCHEDULER), None)
    return Row(
        process=case.victim,
        phase=case.phase,
        fault=case.fault,
        policy=case.policy,
        seed=case.seed,
        status=-1 if status is None else status,
        detected_s=detected_s(run),
        ok=not problems,
        why="; ".join(problems),
    )


def detected_s(run: Run) -> float | None:
    """From the fault until the last process knew the cause; or until the job began to recover."""
    if run.case.is_harmless or run.case.may_finish or run.fault_at is None:
        return None
    if run.case.heals:
        names = {SCHEDULER: _RECOVERING}
    else:
        names = {one.name: _named(run.case, one.name) for one in _survivors(run)}
    since = run.fault_at
    found = [_first(one, names[one.name], since) for one in run.processes if one.name in names]
    moments = [moment for moment in found if moment is not None]
    return round(max(moments) - since, 3) if len(moments) == len(found) > 0 else None


def _problems(run: Run, plain: Sequence[str]) -> Iterator[str]:
    if run.fault_at is None:
        yield "the fault never happened"
    if not run.in_time:
        yield "it hung: processes had to be killed"
    yield from (f"left behind: {what}" for what in run.left_behind)
    if run.case.may_finish:
        yield from _unequal(replace(run, processes=_others(run)), plain)
    elif not run.case.ends_the_job:
        yield from _unequal(run, plain)
    else:
        yield from _unnamed(run, plain)
    is_calm = run.case.is_harmless
    if is_calm and any(re.search(_RECOVERING, one.text) for one in run.processes):
        yield "it recovered from what is no failure"
    if not (run.case.is_harmless or run.case.may_finish):
        seconds = detected_s(run)
        if seconds is None:
            yield "not detected by all"
        elif seconds > run.bound_s:
            yield f"detected after {seconds:.1f} s, later than {run.bound_s:g} s"


def _survivors(run: Run) -> list[Told]:
    """Who is there to name a cause."""
    gone = {run.case.victim} if run.case.fault.endswith("vanished") else set()
    return [one for one in run.processes if one.name not in gone]


def _others(run: Run) -> list[Told]:
    return [one for one in run.processes if one.name != run.case.victim]


def _unequal(run: Run, plain: Sequence[str]) -> Iterator[str]:
    for one in _survivors(run):
        if one.status != 0:
            yield f"{one.name} ended with status {one.status}"
        elif one.name != SCHEDULER and not _has_results(one, plain):
            yield f"{one.name} has other results"


def _has_results(one: Told, plain: Sequence[str]) -> bool:
    said = [line for _, line in one.lines if line.split()[:1] in _RESULTS]
    return said[-len(plain) :] == list(plain)


_RESULTS = (["eval"], ["loss"], ["state"])


def _unnamed(run: Run, plain: Sequence[str]) -> Iterator[str]:
    for one in _survivors(run):
        # A worker whose script has ended has its results; how the job ended, the scheduler says.
        is_done = one.name != SCHEDULER and _has_results(one, plain)
        if one.status == 0 and not is_done:
            yield f"{one.name} ended with status 0"
        if _first(one, _named(run.case, one.name), run.fault_at or 0.0) is None:
            yield f"{one.name} names no root cause"


def _named(case: Case, process: str) -> str:
    """What a process must say, as a pattern."""
    kind, _, name = case.victim.partition(" ")
    if kind == SCHEDULER:
        return _LOST_SCHEDULER if process != SCHEDULER else r"the job failed: .*worker \d"
    if kind == "link":
        one, other = name.split("-")
        return rf"worker {one}\b.*worker {other}\b|worker {other}\b.*worker {one}\b"
    lost = rf"{case.victim} \(.*(lost|silent|killed|cut off)"
    return rf"{lost}|{_LOST_SCHEDULER}" if process == case.victim else lost


def _first(one: Told, pattern: str, since: float) -> float | None:
    told = (moment for moment, line in one.lines if moment >= since and re.search(pattern, line))
    return next(told, None)
