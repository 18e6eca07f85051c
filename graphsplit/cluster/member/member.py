"""A worker's part in the cluster: join, agree, meet, report, finish, leave."""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping

from graphsplit.cluster.member.connection import Connection
from graphsplit.cluster.member.failure_reports import FailureReports
from graphsplit.cluster.member.forked import drop_in_children
from graphsplit.cluster.member.identity import ReportedPosition
from graphsplit.cluster.member.membership import Membership
from graphsplit.cluster.member.state_machine import MemberPhase, MemberState
from graphsplit.cluster.wire import limits
from graphsplit.cluster.wire.messages import STOPPED, MeetingKind, NodeIdentity, Peer
from graphsplit.errors import ClusterError, JobFailedError, PlanMismatchError
from graphsplit.failure import AbortSignal
from graphsplit.logs import teller
from graphsplit.security.names import WORKER
from graphsplit.security.protection import load_protection
from graphsplit.settings import ClusterSettings
from graphsplit.text import split_lines

__all__ = ["Member", "NodeIdentity", "Peer", "ReportedPosition"]

_GOES_OUT_S = 0.1  # no answer says that a message is on its way


class Member(Membership):
    """This worker's membership in one job. Create it with ``join``.

    Thread-safe. ``agree``, ``barrier`` and ``finish`` wait for all workers, and every worker must
    call them in the same order. When a worker is lost and the job recovers, they all raise
    ``MembershipChangedError``; then ``recover`` leads to the next generation.

    Attributes:
        failures: Tells the scheduler of this worker's failures.
    """

    def __init__(
        self, settings: ClusterSettings, abort: AbortSignal, log: Callable[[str], None] | None
    ) -> None:
        protection = load_protection(settings.security, role=WORKER, rank=settings.wished_rank)
        super().__init__(settings, abort)
        self._connection = Connection(self, protection, teller(log))
        self.failures = FailureReports(self, self._connection)
        self._collective = threading.Lock()

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
            identity: The properties that must fit those of the other workers.
            abort: Set when the job fails, anywhere, for any reason, or recovers.
            log: Takes lines for the person who watches; None: the logger ``graphsplit``.

        Raises:
            ConfigurationError: A certificate, key or token is not what it should be.
            ClusterError: The scheduler is not there.
            RegistrationRefusedError: The scheduler refuses this worker; says why.
            JobFailedError: The job failed while it was formed, or not all workers came in time.
        """
        member = cls(settings, abort, log)
        abort.add_waker(member.wake)
        drop_in_children(settings.scheduler_host, settings.scheduler_port)
        atexit.register(member.close)
        try:
            member.state = MemberState(member.address, endpoints)
            member._connection.register(member.registration(endpoints, identity))
            member._wait_running(0)
        except BaseException as error:
            member.failures.report_early(error)
            member.close()
            raise
        return member

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.plan.rank

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return len(self.plan.peers)

    @property
    def num_seats(self) -> int:
        """How many there are when nobody is away."""
        return self.settings.num_workers

    @property
    def seats(self) -> tuple[int, ...]:
        """The ranks by which scripts know the workers that there are, in the order of ranks."""
        return tuple(peer.rank for peer in self.plan.peers)

    @property
    def generation(self) -> int:
        """The span of constant membership: fences messages of former ones; 1 in a new job."""
        return self.plan.generation

    @property
    def recovery(self) -> str:
        """The policy for lost workers: ``fail_fast``, ``wait_rejoin``, ``restart``, ``go_on``."""
        return self.state.recovery

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All workers, this one included, in the order of their ranks."""
        return self.plan.peers

    def progress(self, rank: int) -> int:
        """A number that grows while that worker makes progress; one or two seconds old.

        Asking for it makes the next heartbeat ask the scheduler.
        """
        if rank == self.rank:
            return self.position.progress
        self.watched.add(rank)
        return self.state.progress.get(rank, 0)

    def tell_last(self, source: str) -> None:
        """Tell at once where the script ends this process, and let that go out first.

        Args:
            source: Where, as the others are to read it.
        """
        self._connection.tell(self.last_words(source))
        time.sleep(_GOES_OUT_S)

    # Meeting the others.

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
        self.texts = {topic: text}
        try:
            self._meet(MeetingKind.AGREEMENT, _checked_name(topic), digest)
        except JobFailedError:
            cause = self.abort.cause
            if cause is not None and cause.kind == "disagreement":
                raise PlanMismatchError(cause.message) from None
            raise
        finally:
            self.texts = {}

    def barrier(self, name: str) -> None:
        """Wait until all workers have come to the barrier of this name.

        Raises:
            JobFailedError: The job was aborted meanwhile.
        """
        self._meet(MeetingKind.BARRIER, _checked_name(name))

    def finish(self, *, stopped: bool = False) -> None:
        """Tell that this worker is done, and wait until all are.

        Args:
            stopped: It ends early, in order, because the job was asked to end.

        Raises:
            JobFailedError: The job was aborted meanwhile.
        """
        self._meet(MeetingKind.FINISH, STOPPED if stopped else "")

    def _meet(self, kind: MeetingKind, name: str = "", digest: str = "") -> None:
        with self._collective:
            abort = self.abort
            abort.raise_if_set()
            number = 0
            with self.changed:
                state = self.state
                if self.has_left or state.phase is MemberPhase.FINISHED:
                    raise ClusterError("this worker has left the cluster already")
                if state.waits_at is not None:
                    raise ClusterError(
                        f"this worker still waits at {state.waits_at.meeting_name}: that "
                        f"wait was broken off, so the workers are out of step"
                    )
                if state.phase is MemberPhase.RUNNING:
                    arrival = state.arrive(kind, name, digest)
                    number = arrival.number
                    # So that something is known of a worker that is lost before its next one.
                    self.position.calls.pass_milestone()
                    self._connection.tell(self.heartbeat())
                    self._connection.tell(arrival)

                # In any other phase the abort is on its way.
                def is_let_go() -> bool:
                    return 0 < number <= state.num_departed

                self.changed.wait_for(lambda: abort.cause is not None or is_let_go())
                is_over = abort.cause is not None and not is_let_go()
            if is_over:
                abort.raise_if_set()

    # Ending in order, and going on after a loss.

    def ask_to_stop(self) -> None:
        """Ask, by the next heartbeat, that all workers end in order. Safe in a signal handler."""
        self.wants_stop = True

    def recover(self, endpoints: Mapping[str, str]) -> None:
        """Leave the generation that is over, and wait until the next one runs.

        Args:
            endpoints: Where this worker's data plane can be reached then: other places, and with
                another secret, than before.

        Raises:
            ClusterError: No worker was lost.
            JobFailedError: The job failed for good, or could not be completed in time.
        """
        with self.changed:
            former = self.generation
            effects = self.state.offer(endpoints)
            self._connection.carry_out_locked(effects)
        if not effects and not self.abort.recovers:
            self.abort.raise_if_set()
            raise ClusterError("this job has nothing to recover from: no worker was lost")
        self._connection.carry_out(effects)
        self._wait_running(former)

    def _wait_running(self, former: int) -> None:
        """Until a generation after the former one runs."""
        settings = self.settings
        # The scheduler keeps MS_TOPO_TIMEOUT and names who is missing; this is for one that froze.
        timeout_s = settings.topo_timeout_s + settings.node_timeout_s

        def is_running() -> bool:
            return self.formed is not None and self.formed.generation > former

        def is_refused() -> bool:
            return self.state.phase is MemberPhase.REFUSED

        with self.changed:
            if not self.changed.wait_for(
                lambda: is_running() or self.has_failed or is_refused(), timeout_s
            ):
                raise ClusterError(
                    f"the scheduler at {self.address} accepted this worker, then said "
                    f"nothing for {timeout_s:g} s\n"
                    f"  Fix: look in its log, and start the job again"
                )
            if is_running():
                return
        if is_refused():
            raise self.refused()
        self.abort.raise_if_set()

    def close(self) -> None:
        """Leave. Safe to call twice, after a failure, and from a forked child (a no-op there)."""
        connection = self._connection
        if os.getpid() != self.pid:
            return
        with self.changed:
            session, connection.session = connection.session, None
            self.has_left = True
            self.changed.notify_all()
            if not self.state.is_over:
                # What happens to the stream from here on is our own doing.
                self.state.phase = MemberPhase.FINISHED
        atexit.unregister(self.close)
        if session is not None:
            session.close()


def _checked_name(name: str) -> str:
    if not name or len(name) > limits.MAX_NAME_CHARS or not name.isprintable():
        raise ValueError(
            f"{name[:200]!r} is no name for a meeting of workers: it must have 1 to "
            f"{limits.MAX_NAME_CHARS} printable characters"
        )
    return name
