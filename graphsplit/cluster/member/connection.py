"""A worker's way to the scheduler: one ``MemberSession`` after another; their news are acted on.

What arrives goes to the state machine in the session's reading thread, which also carries out the
effects. A thread of its own comes back after a stream was lost. All of them look at one
``Membership`` under its lock; nothing that may wait, or wakes the user's code, is done under it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from graphsplit.cluster.member.membership import Membership
from graphsplit.cluster.member.session import MemberSession, SessionEnd
from graphsplit.cluster.member.state_machine import (
    BeginGeneration,
    EndGeneration,
    EndJob,
    MemberEffect,
    MemberPhase,
    Reconnect,
    Say,
    ShowText,
    Tell,
)
from graphsplit.cluster.wire.messages import (
    Accepted,
    Formed,
    Refused,
    Register,
    SchedulerMessage,
    Text,
    WorkerMessage,
)
from graphsplit.errors import ClusterError
from graphsplit.logs import LogLine
from graphsplit.security.grpc_ports import tls_hint
from graphsplit.security.protection import Protection

_REPORT_INTERVAL_S = 10.0
_FIRST_REPORT_S = 2.0  # the scheduler's process imports torch, too
# The first attempts come quickly: processes started together miss each other by moments only.
_FIRST_RETRY_S = 0.1
# Not Python's own generator: that one is the script's, and its draws are part of the bits.
_CHANCE = secrets.SystemRandom()


class Connection:
    """Keeps a stream to the scheduler open, and does what the state machine says.

    Attributes:
        session: The present attempt; None while there is no stream.
        is_reconnecting: Whether a stream was lost, and another one is being opened.
    """

    def __init__(self, membership: Membership, protection: Protection, log: LogLine) -> None:
        self._membership = membership
        self._settings = membership.settings
        self._protection = protection
        self._log = log
        self._registration: Register | None = None
        self._num_attempts = 0
        self._answered: MemberSession | None = None
        self.session: MemberSession | None = None
        self.is_reconnecting = False

    def register(self, registration: Register) -> None:
        """Attempt after attempt, until the scheduler answers or ``MS_TOPO_TIMEOUT`` is over."""
        membership = self._membership
        self._registration = registration
        started = time.monotonic()
        end = self._try_until_answered(started + self._settings.topo_timeout_s)
        if membership.has_failed:
            membership.abort.raise_if_set()
        if end is not None:
            raise self._unreachable(time.monotonic() - started, end)
        if membership.state.phase is MemberPhase.REFUSED:
            raise membership.refused()

    def _unreachable(self, waited_s: float, end: SessionEnd) -> ClusterError:
        address = self._membership.address
        return ClusterError(
            f"no scheduler answers at {address} (MS_SCHED_HOST, MS_SCHED_PORT); tried for "
            f"{waited_s:.1f} s: {end.detail}{tls_hint(end.detail, self._protection)}\n"
            f"  Fix: start the scheduler (MS_ROLE=MS_SCHED) with this address, or mend the address"
        )

    def tell(self, message: WorkerMessage) -> None:
        """Send a message; while there is no stream, the state repeats it on the next one."""
        if self.session is not None:
            self.session.send(message)

    # Streams.

    def _reconnect(self, why: str) -> None:
        """The stream was lost: open another one, for as long as the scheduler may be away."""
        membership, settings = self._membership, self._settings
        patience_s = (
            settings.topo_timeout_s if membership.state.keeps_journal else settings.node_timeout_s
        )
        self._log(
            f"lost the scheduler at {membership.address} ({why}); trying to come back",
            event="scheduler_lost",
            level="warning",
        )
        end = self._try_until_answered(time.monotonic() + patience_s)
        with membership.changed:
            effects = (
                [] if end is None else membership.state.lose_scheduler(f"{why}; then: {end.detail}")
            )
            membership.changed.notify_all()
        self.carry_out(effects)

    def _try_until_answered(self, deadline: float) -> SessionEnd | None:
        """Open streams until one is answered. The last one's end if none was; None if one was."""
        started = time.monotonic()
        next_report = started + _FIRST_REPORT_S
        num_attempts = 0
        while True:
            end = self._attempt(deadline)
            if end is None or self._membership.is_done:
                return None
            num_attempts += 1
            if not end.is_retryable or time.monotonic() >= deadline:
                return end
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + _REPORT_INTERVAL_S
                self._log(
                    f"no scheduler at {self._membership.address} after "
                    f"{time.monotonic() - started:.0f} s; "
                    f"trying for another {deadline - time.monotonic():.0f} s",
                    event="no_scheduler",
                    level="warning",
                )
            self._pause(num_attempts, deadline)

    def _attempt(self, deadline: float) -> SessionEnd | None:
        """Open one stream and say who this is on it. None once the scheduler has answered."""
        membership = self._membership
        with membership.changed:
            if membership.is_done:
                return SessionEnd("this worker has left", is_retryable=False)
            former = self.session
            session = self.session = self._next_session()
            session.start()  # here, so that whoever closes it finds it started
        if former is not None:
            former.close(timeout_s=0.1)

        def is_decided() -> bool:
            is_answered = self._answered is session
            return is_answered or session.end is not None or membership.is_done

        with membership.changed:
            membership.changed.wait_for(is_decided, max(0.0, deadline - time.monotonic()))
            is_answered = self._answered is session
            if is_answered and (session.end is None or membership.state.is_over):
                self.is_reconnecting = False
                return None
            self.session = None
        session.close(timeout_s=0.5)
        return session.end or SessionEnd("it does not answer", is_retryable=True)

    def _next_session(self) -> MemberSession:
        assert self._registration is not None
        self._num_attempts += 1
        first = replace(self._registration, attempt=self._num_attempts)
        return MemberSession(
            self._settings,
            protection=self._protection,
            first=self._membership.state.registration(first),
            fence=self._membership.fence,
            beat=self._membership.heartbeat,
            on_message=self._handle,
            on_end=self._handle_end,
        )

    def _pause(self, num_attempts: int, deadline: float) -> None:
        membership, settings = self._membership, self._settings
        usual_s = _CHANCE.uniform(settings.retry_lower_s, settings.retry_upper_s)
        pause_s = min(usual_s, _FIRST_RETRY_S * 2 ** min(num_attempts - 1, 16))
        left_s = deadline - time.monotonic()
        with membership.changed:
            membership.changed.wait_for(lambda: membership.is_done, max(0.0, min(pause_s, left_s)))

    # What arrives, and what is done about it.

    def _handle(self, session: MemberSession, message: SchedulerMessage, generation: int) -> None:
        membership = self._membership
        with membership.changed:
            if session is not self.session:
                return
            effects = membership.state.handle(message, generation)
            if isinstance(message, (Accepted, Refused)):
                self._answered = session
                if membership.to_report is not None and not membership.state.is_failure_noted:
                    session.send(membership.to_report)
            if isinstance(message, Formed):
                # It arrives before ``gs.init`` returns: who vanishes right after that has a line.
                session.send(membership.heartbeat())
            self.carry_out_locked(effects)
            membership.changed.notify_all()
        self.carry_out(effects)

    def _handle_end(self, session: MemberSession, end: SessionEnd) -> None:
        membership = self._membership
        with membership.changed:
            if session is not self.session:
                return
            effects = [] if self.is_reconnecting else membership.state.lose_stream(end.detail)
            self.is_reconnecting |= any(isinstance(effect, Reconnect) for effect in effects)
            membership.changed.notify_all()
        self.carry_out(effects)

    def carry_out_locked(self, effects: Sequence[MemberEffect]) -> None:
        """Carry out the effects that nobody may see the new state without."""
        for effect in effects:
            match effect:
                case Tell():
                    self.tell(effect.message)
                case BeginGeneration():
                    self._membership.begin(effect.generation)

    def carry_out(self, effects: Sequence[MemberEffect]) -> None:
        """All the rest, without the lock."""
        for effect in effects:
            match effect:
                case EndJob():
                    self._membership.abort.set(effect.cause)
                case EndGeneration():
                    self._membership.abort.set(effect.cause, recovers=True)
                case Reconnect():
                    threading.Thread(
                        target=self._reconnect,
                        args=(effect.why,),
                        name="graphsplit-reconnect",
                        daemon=True,
                    ).start()
                case ShowText():
                    if self.session is not None:
                        text = self._membership.texts.get(effect.name, b"")
                        self.session.send(Text(effect.name, text))
                case Say():
                    self._log(effect.line, event="warning", level="warning")
