"""Every rule of the scheduler, as a state machine without I/O, clock or threads.

``handle`` maps an event and a clock reading to effects; the shell in ``scheduler`` carries them
out. It hands every event to one of ``decisions``, where the rules are. All states, messages and
their order are written down in docs/explanation/membership.md::

    forming ──all came──> planned ──all ready──> running ──all at the finish──> draining
       │                     │  ^                   │                              │
       │                 a worker is lost, and the job recovers                all left
       │                     v  └──all are back──┐  v                              v
       │                  recovering(generation + 1)                            finished
       └── timeout, failure, loss, disagreement, Ctrl-C ──> failed(cause) ──all left──> over

Times are seconds of any clock that does not run backwards.
"""

from __future__ import annotations

from graphsplit.cluster.scheduler.decisions import (
    durable,
    ending,
    gathering,
    generations,
    joining,
    liveness,
    recovery,
)
from graphsplit.cluster.scheduler.job.events import (
    Connected,
    Disconnected,
    Effect,
    Event,
    Interrupted,
    Malformed,
    Received,
    Tick,
    ToldByLauncher,
)
from graphsplit.cluster.scheduler.job.image import JobImage
from graphsplit.cluster.scheduler.job.rules import JobIdentity, JobRules
from graphsplit.cluster.scheduler.job.state import JobPhase, JobState
from graphsplit.cluster.wire.messages import (
    Arrive,
    Failed,
    Heartbeat,
    Leave,
    Ready,
    Register,
    Rejoin,
    Text,
    WorkerMessage,
)


class SchedulerState:
    """The scheduler's state. Not thread-safe; one caller feeds it events in order.

    Attributes:
        job: All that it knows of the job.
    """

    def __init__(self, rules: JobRules, identity: JobIdentity, now: float) -> None:
        self.job = JobState(rules, identity, now)

    @classmethod
    def restored(
        cls, rules: JobRules, image: JobImage, now: float, following: JobIdentity | None = None
    ) -> SchedulerState:
        """The state that another scheduler wrote down; see ``durable.restored``."""
        state = cls.__new__(cls)
        state.job = durable.restored(rules, image, now, following)
        return state

    @property
    def decides_at(self) -> float | None:
        """When it wants to see a tick, sooner than by itself: a cause is known then."""
        return self.job.liveness.suspicion.due_at if self.job.is_healthy else None

    def open(self) -> list[Effect]:
        """The effects that come before the first event."""
        job = self.job
        job.effects = []
        if len(job.roster):
            job.log(
                f"back from the journal: generation {job.generation.number}, {job.phase.value}",
                event="restored",
            )
            durable.persist(job)
        return job.effects

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event in, and return what is to be done, in order."""
        job = self.job
        job.effects = []
        job.now = now
        if job.is_over:
            return []
        match event:
            case Connected():
                job.candidates.strangers[event.node] = now
            case Received():
                _receive(job, event.node, event.message, event.generation)
            case Malformed():
                ending.protest(job, event.node, f"sent a malformed message: {event.reason}")
            case Disconnected():
                liveness.disconnect(job, event.node)
            case Interrupted():
                ending.interrupt(job, event)
            case ToldByLauncher():
                liveness.note_end(job, event)
            case Tick():
                _tick(job)
        # Act on what the event made true: a root cause is known, or everyone has left.
        liveness.decide(job)
        ending.end_if_all_left(job)
        return job.effects


def _receive(job: JobState, node: int, message: WorkerMessage, generation: int) -> None:
    if isinstance(message, Register):
        joining.register(job, node, message)
        return
    worker = job.roster.get(node)
    if worker is None:
        # Somebody who waits for a rank has a stream, and beats.
        if node not in job.candidates.spares:
            what = f"sent {type(message).__name__} before it was registered"
            ending.protest(job, node, what)
        return
    worker.last_seen = job.now
    is_present = generation == job.generation.number
    match message:
        case Heartbeat():
            liveness.note_progress(job, worker, message, is_present=is_present)
        case Failed():
            liveness.note_failure(job, worker, message, is_present=is_present)
        case Leave():
            worker.is_leaving = True
        case Ready():
            generations.note_ready(job, worker, message)
            recovery.take_in(job)
        case Rejoin():
            recovery.note_offer(job, worker, message)
        case Arrive():
            gathering.arrive(job, worker, message, is_present=is_present)
        case Text():
            gathering.add_text(job, worker, message, is_present=is_present)


def _tick(job: JobState) -> None:
    """Each concern looks at the clock; one that fails the job leaves the others nothing to do."""
    liveness.forgive_own_silence(job)
    joining.tick(job)
    if job.phase in (JobPhase.FORMING, JobPhase.PLANNED, JobPhase.RECOVERING):
        generations.tick(job)
    if job.phase is JobPhase.RUNNING:
        gathering.tick(job)
        liveness.watch(job)
    if job.is_healthy:
        liveness.tick(job)
    else:
        ending.tick(job)
