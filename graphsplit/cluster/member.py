"""A worker's part in the cluster: join, agree, meet, report, finish, leave."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import random
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

from graphsplit.cluster import limits
from graphsplit.cluster.forked import drop_in_children
from graphsplit.cluster.identity import (
    NodeIdentity,
    Position,
    bounded,
    failure_of,
    text_chunks,
)
from graphsplit.cluster.meetings import place_name
from graphsplit.cluster.member_state import (
    EndJob,
    MemberEffect,
    MemberPhase,
    MemberState,
    Say,
    ShowText,
)
from graphsplit.cluster.messages import (
    Arrive,
    Failed,
    Formed,
    Heartbeat,
    Peer,
    Place,
    Register,
    SchedulerMessage,
    Text,
)
from graphsplit.cluster.rpc import format_address
from graphsplit.cluster.session import Session, StreamEnd
from graphsplit.cluster.text import cut_end, encodable, split_lines
from graphsplit.errors import (
    ClusterError,
    JobFailedError,
    PlanMismatchError,
    RegistrationRefusedError,
)
from graphsplit.failure import AbortSignal, FailureCause
from graphsplit.settings import ClusterSettings

__all__ = ["Member", "NodeIdentity", "Peer", "Position"]

_REPORT_INTERVAL_S = 10.0
_FIRST_REPORT_S = 2.0  # the scheduler's process imports torch, too
_REPORT_TIMEOUT_S = 1.0
# The first attempts come quickly: processes started together miss each other by moments only.
_FIRST_RETRY_S = 0.1


def print_line(line: str) -> None:
    """Print one line for the person who watches this worker."""
    with contextlib.suppress(OSError, ValueError):
        # One write, so that lines of several processes on one terminal do not mix.
        print(
            "".join(f"[graphsplit] {part}\n" for part in line.splitlines()),
            end="",
            file=sys.stderr,
            flush=True,
        )


class Member:
    """This worker's membership in one job. Create it with ``join``.

    Thread-safe. ``agree``, ``barrier`` and ``finish`` wait for all workers, and every worker must
    call them in the same order.

    Attributes:
        rank: This worker's rank.
        num_workers: How many workers there are.
        job: The job's random id, 128 bits in hexadecimal.
        generation: Fences messages of former memberships; 1 in a new job.
        seed: One random seed for all workers; the script's own if it set one.
        peers: All workers in the order of their ranks, this one included.
        position: Where this worker is; write to it while computing.
    """

    def __init__(
        self, settings: ClusterSettings, abort: AbortSignal, log: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._abort = abort
        self._log = log
        self._address = format_address(settings.scheduler_host, settings.scheduler_port)
        self._host = cut_end(encodable(socket.gethostname() or "unknown"), limits.MAX_HOST_CHARS)
        self._pid = os.getpid()
        self._state = MemberState(self._address)
        self._changed = threading.Condition()
        self._collective = threading.Lock()
        self._session: Session | None = None
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
        log: Callable[[str], None] = print_line,
    ) -> Member:
        """Register with the scheduler and wait until all workers have.

        Args:
            settings: Where the scheduler is, and which rank this worker wishes.
            endpoints: Where this worker's data plane can be reached, by transport.
            identity: What must fit the other workers.
            abort: Set when the job fails, anywhere, for any reason.
            log: Takes lines for the person who watches.

        Raises:
            ClusterError: The scheduler is not there.
            RegistrationRefusedError: The scheduler does not want this worker; says why.
            JobFailedError: The job failed while it was formed, or not all workers came in time.
        """
        member = cls(settings, abort, log)
        abort.add_waker(member._wake)
        drop_in_children(settings.scheduler_host, settings.scheduler_port)
        atexit.register(member.close)
        try:
            member._register(member._registration(endpoints, identity))
            member._formed = member._wait_formed()
        except BaseException:
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
    def seed(self) -> int:
        """One seed for all workers."""
        return self._job.seed

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All workers, this one included, in the order of their ranks."""
        return self._job.peers

    def progress(self, rank: int) -> int:
        """A number that grows while that worker makes progress; about a second old."""
        if rank == self.rank:
            return self.position.progress
        return self._state.progress(rank)

    def agree(self, topic: str, text: str) -> None:
        """Wait until all workers have come with the same text.

        Only a digest is sent, unless they differ. A text longer than the scheduler would take to
        compare, such as the plan of a tall network, is agreed on part by part.

        Raises:
            PlanMismatchError: The texts differ; shows the first differing line of two workers.
            JobFailedError: The job was aborted meanwhile.
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
            self._meet(Arrive(Place.AGREEMENT, _checked_name(topic), digest))
        except JobFailedError:
            cause = self._abort.cause
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
        self._meet(Arrive(Place.BARRIER, _checked_name(name)))

    def finish(self) -> None:
        """Tell that this worker is done, and wait until all are.

        Raises:
            JobFailedError: The job was aborted meanwhile.
        """
        self._meet(Arrive(Place.FINISH))

    def failure_of(self, error: BaseException) -> FailureCause | None:
        """What an error on this worker means for the job; None if it only echoes the job's end."""
        return failure_of(
            error,
            rank=self.rank,
            host=self._host,
            pid=self._pid,
            position=self.position.text(),
        )

    def report_failure(self, cause: FailureCause) -> None:
        """Tell the scheduler that this worker failed, and wait up to a second for its answer.

        Does nothing if the job has ended already: what follows an abort is not a cause.
        """
        with self._changed:
            if self._session is None or self._state.phase is not MemberPhase.RUNNING:
                return
            if self._abort.cause not in (None, cause):
                return
            self._session.send(Failed(bounded(cause)))
            self._changed.wait_for(
                lambda: self._state.is_failure_noted or self._state.is_over, _REPORT_TIMEOUT_S
            )

    def close(self) -> None:
        """Leave. Safe to call twice, after a failure, and from a forked child (a no-op there)."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            session, self._session = self._session, None
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

    def _registration(self, endpoints: Mapping[str, str], identity: NodeIdentity) -> Register:
        incarnation = secrets.token_hex(16)
        anonymous = f"{self._host[:64]}-{self._pid}-{incarnation[:8]}"
        return Register(
            node_id=self._settings.node_id or anonymous,
            incarnation=incarnation,
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
        )

    def _register(self, registration: Register) -> None:
        """Attempt after attempt, until the scheduler answers or ``MS_TOPO_TIMEOUT`` is over."""
        started = time.monotonic()
        next_report = started + _FIRST_REPORT_S
        num_attempts = 0
        while (end := self._attempt(registration, started)) is not None:
            num_attempts += 1
            waited_s = time.monotonic() - started
            if not end.is_retryable or waited_s >= self._settings.topo_timeout_s:
                raise self._unreachable(waited_s, end)
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + _REPORT_INTERVAL_S
                self._log(
                    f"no scheduler at {self._address} after {waited_s:.0f} s; trying until "
                    f"{self._settings.topo_timeout_s:g} s have passed (MS_TOPO_TIMEOUT)"
                )
            self._pause(num_attempts, started)

    def _attempt(self, registration: Register, started: float) -> StreamEnd | None:
        """Open one stream and register on it. None once the scheduler has answered."""
        session = Session(
            self._settings,
            first=registration,
            beat=self._heartbeat,
            on_message=self._handle,
            on_end=self._handle_end,
        )
        with self._changed:
            self._session = session
        session.start()
        left_s = max(0.0, started + self._settings.topo_timeout_s - time.monotonic())
        self._wait(lambda: self._has_answer or session.end is not None, timeout_s=left_s)
        if self._state.phase is MemberPhase.REFUSED:
            raise RegistrationRefusedError(
                f"the scheduler at {self._address} refused this worker (host {self._host}, pid "
                f"{self._pid}): {self._state.refusal}"
            )
        if self._has_answer:
            return None
        end = session.end or StreamEnd("it does not answer", is_retryable=True)
        with self._changed:
            self._session = None
        session.close(timeout_s=0.5)
        return end

    @property
    def _has_answer(self) -> bool:
        return self._state.phase is not MemberPhase.JOINING

    def _pause(self, num_attempts: int, started: float) -> None:
        settings = self._settings
        usual_s = random.uniform(settings.retry_lower_s, settings.retry_upper_s)
        pause_s = min(usual_s, _FIRST_RETRY_S * 2 ** min(num_attempts - 1, 16))
        left_s = started + settings.topo_timeout_s - time.monotonic()
        self._wait(lambda: False, timeout_s=max(0.0, min(pause_s, left_s)))

    def _unreachable(self, waited_s: float, end: StreamEnd) -> ClusterError:
        return ClusterError(
            f"no scheduler answers at {self._address} (MS_SCHED_HOST, MS_SCHED_PORT); tried for "
            f"{waited_s:.1f} s: {end.detail}\n"
            f"  Fix: start the scheduler (MS_ROLE=MS_SCHED) with this address, or mend the address"
        )

    def _wait_formed(self) -> Formed:
        # The scheduler keeps MS_TOPO_TIMEOUT and names who is missing; this is for one that froze.
        timeout_s = self._settings.topo_timeout_s + self._settings.node_timeout_s
        self._wait(lambda: self._state.formed is not None, timeout_s=timeout_s)
        if self._state.formed is None:
            raise ClusterError(
                f"the scheduler at {self._address} accepted this worker, then said nothing for "
                f"{timeout_s:g} s\n  Fix: look in its log, and start the job again"
            )
        return self._state.formed

    # Waiting, and being told.

    def _meet(self, arrival: Arrive) -> None:
        with self._collective:
            self._abort.raise_if_set()
            with self._changed:
                if self._session is None:
                    raise ClusterError("this worker has left the cluster already")
                if self._state.waits_at is not None:
                    raise ClusterError(
                        f"this worker still waits at {place_name(self._state.waits_at)}: that "
                        f"wait was broken off, so the workers are out of step"
                    )
                self._state.arrive(arrival)
                self._session.send(arrival)
            self._wait(lambda: self._state.waits_at is None)

    def _wait(self, is_done: Callable[[], bool], *, timeout_s: float | None = None) -> None:
        """Until done, or the time is over. Raises ``JobFailedError`` if the job is aborted."""
        with self._changed:
            self._changed.wait_for(
                lambda: is_done() or self._abort.cause is not None, timeout=timeout_s
            )
            if not is_done():
                self._abort.raise_if_set()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(progress=max(0, self.position.progress), position=self.position.text())

    def _handle(self, session: Session, message: SchedulerMessage) -> None:
        with self._changed:
            if session is not self._session:
                return
            effects = self._state.handle(message)
            self._changed.notify_all()
        self._carry_out(effects)

    def _handle_end(self, session: Session, end: StreamEnd) -> None:
        with self._changed:
            if session is not self._session:
                return
            effects = self._state.lose_stream(end.detail)
            self._changed.notify_all()
        self._carry_out(effects)

    def _carry_out(self, effects: list[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case EndJob():
                    self._abort.set(effect.cause)
                case ShowText():
                    self._show_text(effect.name)
                case Say():
                    self._log(effect.line)

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
