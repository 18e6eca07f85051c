"""When a job on this machine ends, which signals its processes get, and its exit status.

A pure state machine: events and the time go in, signals come out. The process that failed
first decides the status; the others get a moment to name the cause and leave by themselves.

```
running --first failure--> grace 5 s --> SIGTERM --2 s--> SIGKILL; none before ``gs.init()``
running --Ctrl-C---------> SIGINT at once --5 s--> SIGTERM --2 s--> SIGKILL; SIGTERM before it
running --SIGTERM--------> SIGTERM at once --20 s--> SIGTERM --2 s--> SIGKILL
running --last worker----> the scheduler has 30 s --> SIGTERM --2 s--> SIGKILL
running --out of time----> SIGTERM at once --2 s--> SIGKILL
running --killed, and it may be started again--> running
running --frozen, and given up by the job--> SIGKILL for that one
```
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

EX_TEMPFAIL = 75
"""The status of a process that asks to be started again."""

EX_TIMEOUT = 124
"""The status of what took longer than it may, as ``timeout`` has it."""

GRACE_S = 5.0
STOP_S = 20.0
TERMINATE_S = 2.0
SCHEDULER_LINGER_S = 30.0

SCHEDULER = "scheduler"


@dataclass
class JobEnding:
    """Follows the processes of one job from start to the last exit.

    Attributes:
        running: Names of the processes that have not ended.
        status: The exit status of the job: that of the first failure or interruption, else 0.
        reason: One line that says who failed first; empty while all is well.
        restarts: How many processes may still be started again, one by one.
        restarts_scheduler: Whether the scheduler may be, too: it keeps a journal.
        goes_on: Whether the job goes on without workers that were lost.
        asks_for_another_try: Whether some process ended so that all should be started again.
        first_failed: Who failed first; empty while all is well.
        told: The names of the processes that were told to end.
        returncodes: How the others ended.
        hows: The same in words.
        is_over: Whether the job has finished: then nothing is started again.
        given_up: Why a process that still runs is being ended at once.
    """

    running: set[str]
    restarts: int = 0
    restarts_scheduler: bool = False
    goes_on: bool = False
    asks_for_another_try: bool = False
    status: int = 0
    reason: str = ""
    first_failed: str = ""
    told: set[str] = field(default_factory=set)
    returncodes: dict[str, int] = field(default_factory=dict)
    hows: dict[str, str] = field(default_factory=dict)
    is_over: bool = False
    given_up: dict[str, str] = field(default_factory=dict)
    _steps: list[tuple[float, signal.Signals]] = field(default_factory=list)
    _is_interrupted: bool = False
    _vacant: frozenset[str] = frozenset()

    @property
    def is_interrupted(self) -> bool:
        """Whether the user asked for the end, before anything failed."""
        return self._is_interrupted and not self.first_failed

    def exited(
        self, name: str, *, returncode: int, now_s: float, how: str = "", has_place: bool = True
    ) -> bool:
        """A process ended.

        Args:
            name: Which one.
            returncode: ``-N`` if signal N ended it.
            now_s: The time.
            how: How it ended, in words.
            has_place: Whether there is a place where it could be started again.

        Returns:
            Whether to start it again. Then it counts as running.
        """
        given_up = self.given_up.pop(name, "")
        if has_place and self._may_start_again(name, returncode):
            self.restarts -= 1
            return True
        self.running.discard(name)
        if name not in self.told and not given_up:
            self.returncodes[name] = returncode
            self.hows[name] = how or describe(returncode)
        asks = returncode == EX_TEMPFAIL or self._has_lost_scheduler(name, returncode)
        self.asks_for_another_try |= asks
        is_needed = not self._goes_on_without(name, returncode)
        if returncode != 0 and self.status == 0 and is_needed:
            self.first_failed = name
            if given_up or not how:
                how = f"was given up: {given_up}" if given_up else describe(returncode)
            self._blame(1 if given_up else exit_status(returncode), f"{name} {how}")
            self._end_from(now_s + GRACE_S)
        elif self.running == {SCHEDULER}:
            self._end_from(now_s + SCHEDULER_LINGER_S)
        return False

    def _may_start_again(self, name: str, returncode: int) -> bool:
        """Killed, or asking for it: an error of the script would only be made again."""
        was_lost = returncode < 0 or returncode == EX_TEMPFAIL
        may_be = self.restarts_scheduler if name == SCHEDULER else SCHEDULER in self.running
        is_healthy = self.status == 0 and not self.is_over
        return was_lost and may_be and self.restarts > 0 and is_healthy

    def _has_lost_scheduler(self, name: str, returncode: int) -> bool:
        """Killed, as all that failed before: who would ask for another try is itself lost."""
        if name != SCHEDULER or returncode >= 0 or name in self.told or self.is_over:
            return False
        return all(code <= 0 or code == EX_TEMPFAIL for code in self.returncodes.values())

    def _goes_on_without(self, name: str, returncode: int) -> bool:
        """Killed, and neither the scheduler nor the last worker; or the others have finished."""
        if name in self._vacant:
            return True
        others = self.running - {name}
        is_healthy = self.status == 0 and not self._is_interrupted
        is_left = SCHEDULER in others and len(others) > 1
        return self.goes_on and returncode < 0 and is_healthy and is_left

    def give_up(self, name: str, why: str, *, is_final: bool) -> bool:
        """The job does not count on a process any more, though it may still be there.

        Returns:
            Whether to end it at once: because another one can take its place, or because it would
            come back too late in any case.
        """
        if name not in self.running or name in self.given_up:
            return False
        is_needless = self._goes_on_without(name, -signal.SIGKILL)
        if not (is_final or is_needless or self._may_start_again(name, -signal.SIGKILL)):
            return False
        self.given_up[name] = why
        return True

    def over(self, vacant: Iterable[str]) -> set[str]:
        """The job has finished, and these took no part to its end.

        Returns:
            Those of them that are out of reach, or come too late: they are to be ended.
        """
        self.is_over, self._vacant = True, frozenset(vacant)
        late = self.running & self._vacant
        self.given_up = dict.fromkeys(late, "the job had finished without it") | self.given_up
        return late

    def interrupted(self, signum: signal.Signals, *, now_s: float) -> None:
        """The user asked for the end; every further request skips one wait."""
        if self._is_interrupted:
            if self._steps:
                skipped_s = self._steps[0][0] - now_s
                self._steps = [(at_s - skipped_s, step) for at_s, step in self._steps]
            return
        self._is_interrupted = True
        self._blame(128 + signum, f"interrupted by {signum.name}")
        # SIGTERM asks for an end in order, for which a step has to be done; the others do not.
        is_patient = signum == signal.SIGTERM
        first, grace_s = (signum, STOP_S) if is_patient else (signal.SIGINT, GRACE_S)
        self._steps = [
            (now_s, first),
            (now_s + grace_s, signal.SIGTERM),
            (now_s + grace_s + TERMINATE_S, signal.SIGKILL),
        ]

    def expired(self, limit_s: float, *, now_s: float) -> None:
        """The processes have run for longer than they may."""
        if not self._is_interrupted:
            self._is_interrupted = True
            self._blame(EX_TIMEOUT, f"not over after {limit_s:g} s")
            self._end_from(now_s)

    def due(self, now_s: float) -> signal.Signals | None:
        """Return the signal that all running processes must get now, if any."""
        if not self._steps or self._steps[0][0] > now_s:
            return None
        _, signum = self._steps.pop(0)
        self.told |= self.running
        self._blame(
            1, f"the scheduler was still there {SCHEDULER_LINGER_S:.0f} s after the last worker"
        )
        return signum

    @property
    def next_s(self) -> float | None:
        """The time of the next signal, or None."""
        return self._steps[0][0] if self._steps else None

    def _blame(self, status: int, reason: str) -> None:
        """Keep what happened first; all that follows is its echo."""
        if self.status == 0:
            self.status, self.reason = status, reason

    def _end_from(self, first_s: float) -> None:
        """Plan the end, unless one with its own times is under way."""
        if not self._steps or self._steps[0][0] > first_s:
            self._steps = [(first_s, signal.SIGTERM), (first_s + TERMINATE_S, signal.SIGKILL)]


def exit_status(returncode: int) -> int:
    """Turn ``-N``, the end by signal N, into the shell's ``128 + N``."""
    return 128 - returncode if returncode < 0 else returncode


def describe(returncode: int) -> str:
    """Say how a process ended."""
    if returncode >= 0:
        return f"ended with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"
