"""The scheduler of a small cluster: its state machine, its journal, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from membership_forgetting import forget, rewind, without_attempts
from membership_invariants import check_all_are_told, check_told
from membership_values import copy
from membership_view import View, is_away, view_of

from graphsplit.cluster.scheduler.job.events import (
    Drop,
    Effect,
    Event,
    Exit,
    Persist,
    Refuse,
    Send,
    Tick,
)
from graphsplit.cluster.scheduler.job.image import JobImage
from graphsplit.cluster.scheduler.job.rules import JobIdentity, JobRules
from graphsplit.cluster.scheduler.job.state import JobPhase
from graphsplit.cluster.scheduler.state_machine import SchedulerState
from graphsplit.cluster.wire.limits import LEAVE_TIMEOUT_S
from graphsplit.cluster.wire.messages import Refused

TOPO_S, NODE_S = 100.0, 1e6
RULES = {
    "wait_rejoin": JobRules(3, TOPO_S, NODE_S, NODE_S, "wait_rejoin"),
    "wait_rejoin, journal": JobRules(3, TOPO_S, NODE_S, NODE_S, "wait_rejoin", True),
    "go_on": JobRules(3, TOPO_S, NODE_S, NODE_S, "go_on"),
    "fail_fast": JobRules(3, TOPO_S, NODE_S, NODE_S),
    "fail_fast, journal": JobRules(3, TOPO_S, NODE_S, NODE_S, keeps_journal=True),
}


@dataclass(frozen=True)
class Passed:
    """Time passes; nothing else happens."""

    seconds: float


@dataclass(frozen=True)
class Silent:
    """Nothing was heard from a worker for too long. Later it goes on as if nothing was."""

    incarnation: str


@dataclass(frozen=True)
class Killed:
    """The scheduler's process is gone, with what was under way to workers or without."""

    loses: bool


@dataclass(frozen=True)
class Returned:
    """Another scheduler reads the journal."""


@dataclass(frozen=True)
class Sent:
    """The scheduler sent a message on a stream."""

    node: int
    generation: int
    message: Any


@dataclass(frozen=True)
class HungUp:
    """The scheduler ended a stream."""

    node: int


@dataclass(frozen=True)
class Gone:
    """There is no scheduler any more: it has ended all streams."""

    loses: bool = False


ToSlot = Sent | HungUp | Gone
AnyEvent = Event | Passed | Silent | Killed | Returned


@dataclass(eq=False)
class Head:
    """The scheduler, if there is one. Never changed: ``after`` gives another one."""

    rules: JobRules
    state: SchedulerState | None
    image: JobImage | None = None
    exit: Exit | None = None

    @property
    def may_return(self) -> bool:
        """Whether another scheduler would take over."""
        return self.rules.keeps_journal and self.exit is None

    @property
    def is_gone(self) -> bool:
        """Whether there is no scheduler, and never will be one."""
        return self.exit is not None or (self.state is None and not self.may_return)

    @property
    def may_finish(self) -> bool:
        """Whether the job goes on, and goes on whoever is lost."""
        is_healthy = self.state is not None and self.state.job.is_healthy
        return is_healthy and self.rules.lets_rejoin

    def after(self, event: AnyEvent, *, forgets: bool) -> tuple[Head, list[ToSlot]]:
        """The scheduler after an event, and what the slots notice of it, in order."""
        if isinstance(event, Killed):
            return replace(self, state=None), [Gone(event.loses)]
        if isinstance(event, Returned):
            return self._returned(forgets=forgets)
        if self.state is None:
            return self, []
        state, now = copy(self.state), 0.0
        if isinstance(event, Passed):
            event, now = Tick(), event.seconds
        elif isinstance(event, Silent):
            state.job.roster.of(event.incarnation).last_seen = -2 * NODE_S
            event = Tick()
        effects = state.handle(event, now)
        check_all_are_told(effects, state.job, has_failed=self.state.job.phase is JobPhase.FAILED)
        return self._apply(state, effects, forgets=forgets)

    def _returned(self, *, forgets: bool) -> tuple[Head, list[ToSlot]]:
        if self.image is None:
            return first_head(self.rules), []
        state = SchedulerState.restored(self.rules, self.image, 0.0)
        return self._apply(state, state.open(), forgets=forgets)

    def _apply(
        self, state: SchedulerState, effects: list[Effect], *, forgets: bool
    ) -> tuple[Head, list[ToSlot]]:
        image = self.image
        noticed: list[ToSlot] = []
        for effect in effects:
            match effect:
                case Send():
                    noticed.append(Sent(effect.node, state.job.generation.number, effect.message))
                case Refuse():
                    refused = Refused(effect.reason)
                    noticed += [
                        Sent(effect.node, state.job.generation.number, refused),
                        HungUp(effect.node),
                    ]
                case Drop():
                    noticed.append(HungUp(effect.node))
                case Persist():
                    image = JobImage.read(effect.image.to_text())
                    image = without_attempts(image) if forgets else image
                case Exit():
                    if effect.cause is not None:
                        check_told(effect.cause)
                    return Head(self.rules, None, None, effect), [*noticed, Gone()]
        rewind(state.job)
        if forgets:
            forget(state.job)
        return Head(self.rules, state, image), noticed

    def times(self, *, is_quiet: bool) -> Iterator[tuple[str, AnyEvent]]:
        """What happens because time passes. ``is_quiet``: nothing else can happen."""
        if self.state is None:
            if self.may_return:
                yield "scheduler returns", Returned()
            return
        job = self.state.job
        if job.is_healthy and job.liveness.suspicion._known:
            yield "grace is over", Passed(job.liveness.suspicion._deadline)
        elif is_quiet:
            if job.is_healthy:
                yield "deadline is over", Passed(TOPO_S)
                for away in (one for one in job.roster if is_away(one)):
                    incarnation = away.registration.incarnation
                    yield f"{incarnation} does not come back", Silent(incarnation)
            else:
                yield "leaving takes too long", Passed(LEAVE_TIMEOUT_S)

    def view(self, slot: int) -> View:
        """What matters to one slot."""
        job = self.state.job if self.state is not None else None
        return view_of(slot, job, may_return=self.may_return)


def first_head(rules: JobRules) -> Head:
    """A scheduler that has just started."""
    return Head(rules, SchedulerState(rules, JobIdentity("job", 7), 0.0))
