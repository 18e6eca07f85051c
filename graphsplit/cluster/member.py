"""A worker's part in the cluster: join, agree, meet, report, finish, leave."""

from __future__ import annotations

import atexit
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from graphsplit.cluster import limits
from graphsplit.cluster.forked import drop_in_children
from graphsplit.cluster.identity import (
    NodeIdentity,
    Position,
    bounded,
    failure_of,
    own_host,
    text_chunks,
)
from graphsplit.cluster.meetings import place_name
from graphsplit.cluster.member_state import (
    BeginGeneration,
    EndGeneration,
    EndJob,
    MemberEffect,
    MemberPhase,
    MemberState,
    Reconnect,
    Say,
    ShowText,
    Tell,
)
from graphsplit.cluster.messages import (
    STOPPED,
    Accepted,
    Failed,
    Fence,
    Formed,
    Heartbeat,
    Peer,
    Place,
    Refused,
    Register,
    SchedulerMessage,
    Text,
    WorkerMessage,
)
from graphsplit.cluster.rpc import format_address
from graphsplit.cluster.session import Session, StreamEnd
from graphsplit.cluster.text import split_lines
from graphsplit.errors import (
    ClusterError,
    JobFailedError,
    PlanMismatchError,
    RegistrationRefusedError,
)
from graphsplit.failure import AbortSignal, FailureCause
from graphsplit.logs import teller
from graphsplit.security.grpc_ports import tls_hint
from graphsplit.security.names import WORKER
from graphsplit.security.protection import load_protection
from graphsplit.settings import ClusterSettings

__all__ = ["Member", "NodeIdentity", "Peer", "Position"]

_REPORT_INTERVAL_S = 10.0
_FIRST_REPORT_S = 2.0  # the scheduler's process imports torch, too
_REPORT_TIMEOUT_S = 1.0
_VERDICT_S = 3.0  # the scheduler's grace, and a busy machine
# The first attempts come quickly: processes started together miss each other by moments only.
_FIRST_RETRY_S = 0.1
# Not Python's own generator: that one is the script's, and its draws are part of the bits.
_CHANCE = secrets.SystemRandom()


class Member:
    """This worker's membership in one job. Create it with ``join``.

    Thread-safe. ``agree``, ``barrier`` and ``finish`` wait for all workers, and every worker must
    call them in the same order. When a worker is lost and the job recovers, they all raise
    ``MembershipChangedError``; then ``recover`` leads to the next generation.

    Attributes:
        rank: This worker's rank.
        num_workers: How many workers there are.
        job: The job's random id, 128 bits in hexadecimal.
        generation: Fences messages of former memberships; 1 in a new job.
        recovery: What the job does about a lost worker.
        abort: Ends the waits of this generation; ``recover`` puts a new one here.
        seed: One random seed for all workers; the script's own if it set one.
        peers: All workers in the order of their ranks, this one included.
        position: Where this worker is; write to it while computing.
    """

    def __init__(
        self, settings: ClusterSettings, abort: AbortSignal, log: Callable[[str], None] | None
    ) -> None:
        self._settings = settings
        self._protection = load_protection(
            settings.security, role=WORKER, rank=settings.wished_rank
        )
        self.abort = abort
        self._log = teller(log)
        self._address = format_address(settings.scheduler_host, settings.scheduler_port)
        self._host = own_host()
        self._pid = os.getpid()
        self._incarnation = secrets.token_hex(16)
        self._state = MemberState(self._address)
        self._registration: Register | None = None
        self._changed = threading.Condition()
        self._collective = threading.Lock()
        self._session: Session | None = None
        self._answered: Session | None = None
        self._num_attempts = 0
        self._is_reconnecting = False
        self._has_left = False
        self._to_report: Failed | None = None
        self._watched: set[int] = set()
        self._wants_stop = False
        self._texts: dict[str, bytes] = {}
        self._formed: Formed | None = None
        self.position = Position()

    @classmethod
    def join(
        cls,
        settings: ClusterSettings,
        *,
        endpoints: Mapping[str, str],
        identity: NodeIdentity,
        abort: AbortSignal,
        log: Callable[[str], None] | None = None,
    ) -> Member:
        """Register with the scheduler and wait until all workers have.

        Args:
            settings: Where the scheduler is, and which rank this worker wishes.
            endpoints: Where this worker's data plane can be reached, by transport.
            identity: What must fit the other workers.
            abort: Set when the job fails, anywhere, for any reason, or recovers.
            log: Takes lines for the person who watches; None: the logger ``graphsplit``.

        Raises:
            ConfigurationError: A certificate, key or token is not what it should be.
            ClusterError: The scheduler is not there.
            RegistrationRefusedError: The scheduler does not want this worker; says why.
            JobFailedError: The job failed while it was formed, or not all workers came in time.
        """
        member = cls(settings, abort, log)
        abort.add_waker(member._wake)
        drop_in_children(settings.scheduler_host, settings.scheduler_port)
        atexit.register(member.close)
        try:
            member._state = MemberState(member._address, endpoints)
            member._registration = member._first_registration(endpoints, identity)
            member._register()
            member._wait_running(0)
        except BaseException as error:
            member._report_early(error)
            member.close()
            raise
        return member

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._job.rank

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return len(self._job.peers)

    @property
    def job(self) -> str:
        """The job's random id."""
        return self._job.job

    @property
    def generation(self) -> int:
        """The span of constant membership."""
        return self._job.generation

    @property
    def recovery(self) -> str:
        """What the job does about a lost worker: ``fail_fast``, ``wait_rejoin``, ``restart``."""
        return self._state.recovery

    @property
    def seed(self) -> int:
        """One seed for all workers."""
        return self._job.seed

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All workers, this one included, in the order of their ranks."""
        return self._job.peers

    def progress(self, rank: int) -> int:
        """A number that grows while that worker makes progress; one or two seconds old.

        Asking for it makes the next heartbeat ask the scheduler.
        """
        if rank == self.rank:
            return self.position.progress
        self._watched.add(rank)
        return self._state.progress(rank)

    def agree(self, topic: str, text: str) -> None:
        """Wait until all workers have come with the same text.

        Only a digest is sent, unless they differ. A text longer than the scheduler would take to
        compare, such as the plan of a tall network, is agreed on part by part.

        Raises:
            PlanMismatchError: The texts differ; shows the first differing line of two workers.
            JobFailedError: The job was aborted meanwhile.
            MembershipChangedError: A worker was lost, and the job recovers.
        """
        line, encoded = 1, text.encode("utf-8", errors="replace")
        for part, is_last in split_lines(encoded, limits.MAX_TEXT_BYTES):
            # One worker's last part may be all that another one has up to here.
            digest = hashlib.sha256(part if is_last else part + b"(more)").hexdigest()
            self._agree_on(topic if line == 1 else f"{topic}, from line {line}", part, digest)
            line += part.count(b"\n")

    def _agree_on(self, topic: str, text: bytes, digest: str) -> None:
        self._texts = {topic: text}
        try:
            self._meet(Place.AGREEMENT, _checked_name(topic), digest)
        except JobFailedError:
            cause = self.abort.cause
            if cause is not None and cause.kind == "disagreement":
                raise PlanMismatchError(cause.message) from None
            raise
        finally:
            self._texts = {}

    def barrier(self, name: str) -> None:
        """Wait until all workers have come to the barrier of this name.

        Raises:
            JobFailedError: The job was aborted meanwhile.
        """
        self._meet(Place.BARRIER, _checked_name(name))

    def finish(self, *, stopped: bool = False) -> None:
        """Tell that this worker is done, and wait until all are.

        Args:
            stopped: It ends early, in order, because the job was asked to end.

        Raises:
            JobFailedError: The job was aborted meanwhile.
        """
        self._meet(Place.FINISH, STOPPED if stopped else "")

    @property
    def stops_soon(self) -> bool:
        """Whether all workers are to end at the end of a step."""
        return self._state.stops_soon

    def ask_to_stop(self) -> None:
        """Ask, by the next heartbeat, that all workers end in order. Safe in a signal handler."""
        self._wants_stop = True

    def recover(self, endpoints: Mapping[str, str]) -> None:
        """Leave the generation that is over, and wait until the next one runs.

        Args:
            endpoints: Where this worker's data plane can be reached then: other places, and with
                another secret, than before.

        Raises:
            ClusterError: No worker was lost.
            JobFailedError: The job failed for good, or could not be completed in time.
        """
        with self._changed:
            former = self.generation
            effects = self._state.offer(endpoints)
            self._carry_out_locked(effects)
        if not effects and not self.abort.recovers:
            self.abort.raise_if_set()
            raise ClusterError("this job has nothing to recover from: no worker was lost")
        self._carry_out(effects)
        self._wait_running(former)

    def failure_of(self, error: BaseException) -> FailureCause | None:
        """What an error on this worker means for the job; None if it only echoes the job's end."""
        return failure_of(
            error,
            rank=self.rank,
            host=self._host,
            pid=self._pid,
            position=self.position.text(),
            location=self.position.location(),
        )

    def report_failure(self, cause: FailureCause) -> None:
        """Tell the scheduler that this worker failed, and wait a moment for its answer.

        Does nothing if the job has ended already: what follows an abort is not a cause. While the
        scheduler is away, and will be back, this waits up to ``MS_NODE_TIMEOUT`` for it.
        """
        with self._changed:
            is_unknown = self._state.phase is MemberPhase.JOINING
            is_away = self._is_reconnecting
            if is_unknown or self._state.is_over or (self._session is None and not is_away):
                return
            if self.abort.cause not in (None, cause) and not self.abort.recovers:
                return
            self._to_report = Failed(bounded(cause))
            self._state.is_failure_noted = False
            self._tell(self._to_report)  # and again on the next stream, until it is noted
            self._changed.wait_for(
                lambda: self._state.is_failure_noted or self._state.is_over,
                self._settings.node_timeout_s if is_away else _REPORT_TIMEOUT_S,
            )

    def await_verdict(self) -> None:
        """Wait until the scheduler has said what a failure that was reported means for the job.

        While it is away, and may be back, nobody can know: this worker may be the one that is cut
        off, and the job may go on without it.
        """
        with self._changed:
            deadline = time.monotonic() + _VERDICT_S
            while self.abort.cause is None and not self._has_left:
                if self._is_reconnecting:
                    deadline = time.monotonic() + _VERDICT_S
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(left_s)

    def is_own(self, cause: FailureCause) -> bool:
        """Whether this is what this worker itself has reported."""
        told = self._to_report.cause if self._to_report is not None else None
        return told is not None and (told.rank, told.message) == (cause.rank, cause.message)

    def _report_early(self, error: BaseException) -> None:
        """It has a name already, but no rank of its own."""
        wished = self._settings.wished_rank
        rank = -1 if wished is None else wished
        cause = failure_of(error, rank=rank, host=self._host, pid=self._pid, position="")
        if cause is not None:
            self.report_failure(cause)

    def close(self) -> None:
        """Leave. Safe to call twice, after a failure, and from a forked child (a no-op there)."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            session, self._session = self._session, None
            self._has_left = True
            self._changed.notify_all()
            if not self._state.is_over:
                # What happens to the stream from here on is our own doing.
                self._state.phase = MemberPhase.FINISHED
        atexit.unregister(self.close)
        if session is not None:
            session.close()

    # Joining.

    @property
    def _job(self) -> Formed:
        assert self._formed is not None, "a member exists only once the cluster has formed"
        return self._formed

    def _first_registration(self, endpoints: Mapping[str, str], identity: NodeIdentity) -> Register:
        anonymous = f"{self._host[:64]}-{self._pid}-{self._incarnation[:8]}"
        return Register(
            node_id=self._settings.node_id or anonymous,
            incarnation=self._incarnation,
            role=self._settings.role,
            num_workers=self._settings.num_workers,
            wished_rank=self._settings.wished_rank,
            host=self._host,
            pid=self._pid,
            endpoints=dict(endpoints),
            versions=dict(identity.versions),
            script_digest=identity.script_digest,
            num_threads=identity.num_threads,
            cpu_capability=identity.cpu_capability,
            seed=identity.seed,
            recovery=self._settings.recovery,
        )

    def _register(self) -> None:
        """Attempt after attempt, until the scheduler answers or ``MS_TOPO_TIMEOUT`` is over."""
        started = time.monotonic()
        end = self._try_until_answered(started + self._settings.topo_timeout_s)
        self._raise_if_failed()
        if end is not None:
            raise self._unreachable(time.monotonic() - started, end)
        if self._state.phase is MemberPhase.REFUSED:
            raise self._refused()

    def _reconnect(self, why: str) -> None:
        """The stream was lost: open another one, for as long as the scheduler may be away."""
        settings = self._settings
        patience_s = (
            settings.topo_timeout_s if self._state.keeps_journal else settings.node_timeout_s
        )
        self._log(
            f"lost the scheduler at {self._address} ({why}); trying to come back",
            event="scheduler_lost",
            level="warning",
        )
        end = self._try_until_answered(time.monotonic() + patience_s)
        with self._changed:
            effects = [] if end is None else self._state.give_up(f"{why}; then: {end.detail}")
            self._changed.notify_all()
        self._carry_out(effects)

    def _try_until_answered(self, deadline: float) -> StreamEnd | None:
        """Open streams until one is answered. The last one's end if none was; None if one was."""
        started = time.monotonic()
        next_report = started + _FIRST_REPORT_S
        num_attempts = 0
        while True:
            end = self._attempt(deadline)
            if end is None or self._is_done:
                return None
            num_attempts += 1
            if not end.is_retryable or time.monotonic() >= deadline:
                return end
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + _REPORT_INTERVAL_S
                self._log(
                    f"no scheduler at {self._address} after {time.monotonic() - started:.0f} s; "
                    f"trying for another {deadline - time.monotonic():.0f} s",
                    event="no_scheduler",
                    level="warning",
                )
            self._pause(num_attempts, deadline)

    def _attempt(self, deadline: float) -> StreamEnd | None:
        """Open one stream and say who this is on it. None once the scheduler has answered."""
        with self._changed:
            if self._is_done:
                return StreamEnd("this worker has left", is_retryable=False)
            former = self._session
            session = self._session = Session(
                self._settings,
                protection=self._protection,
                first=self._next_registration(),
                fence=self._fence,
                beat=self._heartbeat,
                on_message=self._handle,
                on_end=self._handle_end,
            )
            session.start()  # here, so that whoever closes it finds it started
        if former is not None:
            former.close(timeout_s=0.1)

        def is_decided() -> bool:
            return self._answered is session or session.end is not None or self._is_done

        with self._changed:
            self._changed.wait_for(is_decided, max(0.0, deadline - time.monotonic()))
            if self._answered is session and (session.end is None or self._state.is_over):
                self._is_reconnecting = False
                return None
            self._session = None
        session.close(timeout_s=0.5)
        return session.end or StreamEnd("it does not answer", is_retryable=True)

    def _next_registration(self) -> Register:
        assert self._registration is not None
        self._num_attempts += 1
        first = replace(self._registration, attempt=self._num_attempts)
        return self._state.registration(first)

    def _pause(self, num_attempts: int, deadline: float) -> None:
        settings = self._settings
        usual_s = _CHANCE.uniform(settings.retry_lower_s, settings.retry_upper_s)
        pause_s = min(usual_s, _FIRST_RETRY_S * 2 ** min(num_attempts - 1, 16))
        left_s = deadline - time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._is_done, max(0.0, min(pause_s, left_s)))

    @property
    def _is_done(self) -> bool:
        """Whether no stream is needed any more: this worker has left, or the job has failed."""
        return self._has_left or (self.abort.cause is not None and not self.abort.recovers)

    def _raise_if_failed(self) -> None:
        if not self.abort.recovers:
            self.abort.raise_if_set()

    def _refused(self) -> RegistrationRefusedError:
        return RegistrationRefusedError(
            f"the scheduler at {self._address} refused this worker (host {self._host}, pid "
            f"{self._pid}): {self._state.refusal}"
        )

    def _unreachable(self, waited_s: float, end: StreamEnd) -> ClusterError:
        return ClusterError(
            f"no scheduler answers at {self._address} (MS_SCHED_HOST, MS_SCHED_PORT); tried for "
            f"{waited_s:.1f} s: {end.detail}{tls_hint(end.detail, self._protection)}\n"
            f"  Fix: start the scheduler (MS_ROLE=MS_SCHED) with this address, or mend the address"
        )

    def _wait_running(self, former: int) -> None:
        """Until a generation after the former one runs."""
        # The scheduler keeps MS_TOPO_TIMEOUT and names who is missing; this is for one that froze.
        timeout_s = self._settings.topo_timeout_s + self._settings.node_timeout_s

        def is_running() -> bool:
            return self._formed is not None and self._formed.generation > former

        def is_decided() -> bool:
            is_over = self.abort.cause is not None and not self.abort.recovers
            return is_running() or is_over or self._state.phase is MemberPhase.REFUSED

        with self._changed:
            if not self._changed.wait_for(is_decided, timeout_s):
                raise ClusterError(
                    f"the scheduler at {self._address} accepted this worker, then said nothing "
                    f"for {timeout_s:g} s\n  Fix: look in its log, and start the job again"
                )
            if is_running():
                return
        if self._state.phase is MemberPhase.REFUSED:
            raise self._refused()
        self.abort.raise_if_set()

    # Waiting, and being told.

    def _meet(self, place: Place, name: str = "", digest: str = "") -> None:
        with self._collective:
            abort = self.abort
            abort.raise_if_set()
            number = 0
            with self._changed:
                if self._has_left or self._state.phase is MemberPhase.FINISHED:
                    raise ClusterError("this worker has left the cluster already")
                if self._state.waits_at is not None:
                    raise ClusterError(
                        f"this worker still waits at {place_name(self._state.waits_at)}: that "
                        f"wait was broken off, so the workers are out of step"
                    )
                if self._state.phase is MemberPhase.RUNNING:
                    arrival = self._state.arrive(place, name, digest)
                    number = arrival.number
                    self._tell(arrival)

                # In any other phase the abort is on its way.
                def is_let_go() -> bool:
                    return 0 < number <= self._state.num_departed

                self._changed.wait_for(lambda: abort.cause is not None or is_let_go())
                is_over = abort.cause is not None and not is_let_go()
            if is_over:
                abort.raise_if_set()

    def _tell(self, message: WorkerMessage) -> None:
        """Send a message; while there is no stream, the state repeats it on the next one."""
        if self._session is not None:
            self._session.send(message)

    def _fence(self) -> Fence:
        return Fence(self._state.job, self._state.generation, self._incarnation)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _heartbeat(self) -> Heartbeat:
        watched, self._watched = self._watched, set()
        return Heartbeat(
            progress=max(0, self.position.progress),
            position=self.position.text(),
            watched=tuple(sorted(watched)[: limits.MAX_WATCHED]),
            location=self.position.sample(),
            wants_stop=self._wants_stop,
        )

    def _handle(self, session: Session, message: SchedulerMessage, generation: int) -> None:
        with self._changed:
            if session is not self._session:
                return
            effects = self._state.handle(message, generation)
            if isinstance(message, (Accepted, Refused)):
                self._answered = session
                if self._to_report is not None and not self._state.is_failure_noted:
                    session.send(self._to_report)
            self._carry_out_locked(effects)
            self._changed.notify_all()
        self._carry_out(effects)

    def _handle_end(self, session: Session, end: StreamEnd) -> None:
        with self._changed:
            if session is not self._session:
                return
            effects = [] if self._is_reconnecting else self._state.lose_stream(end.detail)
            self._is_reconnecting |= any(isinstance(effect, Reconnect) for effect in effects)
            self._changed.notify_all()
        self._carry_out(effects)

    def _carry_out_locked(self, effects: list[MemberEffect]) -> None:
        """What must be done before anybody else sees the new state."""
        for effect in effects:
            match effect:
                case Tell():
                    self._tell(effect.message)
                case BeginGeneration():
                    self._begin(effect.generation)

    def _begin(self, generation: int) -> None:
        if self._formed is not None:
            self.abort = AbortSignal(generation)
            self.abort.add_waker(self._wake)
        self.abort.generation = generation
        self._to_report = None  # what was wrong in the former generation is over with it
        self._formed = self._state.formed

    def _carry_out(self, effects: list[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case EndJob():
                    self.abort.set(effect.cause)
                case EndGeneration():
                    self.abort.set(effect.cause, recovers=True)
                case Reconnect():
                    threading.Thread(
                        target=self._reconnect,
                        args=(effect.why,),
                        name="graphsplit-reconnect",
                        daemon=True,
                    ).start()
                case ShowText():
                    self._show_text(effect.name)
                case Say():
                    self._log(effect.line, event="warning", level="warning")

    def _show_text(self, name: str) -> None:
        session = self._session
        chunks = text_chunks(self._texts.get(name, b""))
        for index, chunk in enumerate(chunks):
            if session is not None:
                session.send(Text(name, chunk, last=index == len(chunks) - 1))


def _checked_name(name: str) -> str:
    if not name or len(name) > limits.MAX_NAME_CHARS or not name.isprintable():
        raise ValueError(
            f"{name[:200]!r} is no name for a meeting of workers: it must have 1 to "
            f"{limits.MAX_NAME_CHARS} printable characters"
        )
    return name
