"""The streams of one scheduler: feeds its state what comes on them, and carries out its effects."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphsplit.cluster.scheduler.admission import Admission
from graphsplit.cluster.scheduler.decisions import view
from graphsplit.cluster.scheduler.job.events import (
    Connected,
    Disconnected,
    Drop,
    Effect,
    Event,
    Exit,
    Log,
    Malformed,
    Persist,
    Received,
    Refuse,
    Send,
    TellLauncher,
    Tick,
)
from graphsplit.cluster.scheduler.job.rules import JobIdentity, JobRules
from graphsplit.cluster.scheduler.journal import Journal
from graphsplit.cluster.scheduler.launcher import Launcher
from graphsplit.cluster.scheduler.outbox import Outbox, Outboxes
from graphsplit.cluster.scheduler.state_machine import SchedulerState
from graphsplit.cluster.status.job_status import JobStatus
from graphsplit.cluster.wire.codec import open_worker
from graphsplit.cluster.wire.fencing import FencingVerdict, StreamGuard
from graphsplit.cluster.wire.limits import TICK_INTERVAL_S
from graphsplit.cluster.wire.messages import Abort, Fence, Refused, Register, SchedulerMessage
from graphsplit.encoding import records
from graphsplit.encoding.fields import MessageError
from graphsplit.failure import FailureCause
from graphsplit.logs import CONTEXT, LogLine
from graphsplit.reports import write_report
from graphsplit.security.protection import Protection
from graphsplit.settings import ClusterSettings

JOURNAL_NAME = "scheduler.journal"
_PAST_DUE_S = 0.001  # a timer may be early by what its clock does not tell apart


def _rules_of(settings: ClusterSettings) -> JobRules:
    return JobRules(
        num_workers=settings.num_workers,
        topo_timeout_s=settings.topo_timeout_s,
        node_timeout_s=settings.node_timeout_s,
        receive_timeout_s=settings.receive_timeout_s,
        recovery=settings.recovery,
        keeps_journal=bool(settings.recovery_path),
    )


def _first_state(rules: JobRules, journal: Journal | None) -> SchedulerState:
    """A new job, or the one that a lost scheduler wrote down."""
    now = time.monotonic()
    image = None if journal is None else journal.read(rules)
    # 63 bits: what both torch.manual_seed and a signed 64-bit number can hold.
    identity = JobIdentity(job=secrets.token_hex(16), seed=secrets.randbits(63))
    if image is not None:
        return SchedulerState.restored(rules, image, now, identity)
    return SchedulerState(rules, identity, now)


class Sessions:
    """All streams of one scheduler. Everything runs on one event loop, so nothing is locked.

    ``prove`` is told of each peer that has proved itself, as gRPC names it.

    Attributes:
        done: The exit status, once the job has ended.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        protection: Protection,
        log: LogLine,
        launcher: Launcher,
        prove: Callable[[str], None] = lambda peer: None,
    ) -> None:
        self._log = log
        self._launcher = launcher
        self._admission = Admission(settings.num_workers, protection, log, prove)
        self._outboxes = Outboxes()
        self._num_nodes = 0
        self._decides_at: float | None = None
        path = settings.recovery_path
        self._journal = Journal(Path(path) / JOURNAL_NAME) if path else None
        self._state = _first_state(_rules_of(settings), self._journal)
        job = self._state.job
        CONTEXT.source = lambda: {"job": job.identity.job, "generation": job.generation.number}
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        for effect in self._state.open():
            self._carry_out(effect)

    async def session(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """One stream, from its opening until either side ends it."""
        first = await self._admission.admit(requests, context)
        if first is None:
            return
        node = self._num_nodes = self._num_nodes + 1
        outbox = self._outboxes.add(node, first.incarnation)
        self.apply(Connected(node))
        self.apply(Received(node, first))
        reader = asyncio.create_task(self._read(node, requests, outbox, first, context.peer()))
        try:
            await self._outboxes.drain(outbox, context)
        finally:
            # Also reached, by cancellation, when the connection breaks.
            self._outboxes.remove(node)
            reader.cancel()
            self.apply(Disconnected(node))

    async def tell_status(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Answer somebody who asks what is going on."""
        if await self._admission.admit_visitor(requests, context):
            await context.write(records.to_text(self.status()).encode())

    def status(self) -> JobStatus:
        """The status of the job at this moment."""
        status = view.status(self._state.job, time.monotonic())
        return replace(status, num_refused=status.num_refused + self._admission.num_refused)

    async def _read(
        self,
        node: int,
        requests: AsyncIterator[bytes],
        outbox: Outbox,
        first: Register,
        peer: str,
    ) -> None:
        job = first.resume.job if first.resume is not None else ""
        guard = StreamGuard(Fence(job, incarnation=first.incarnation, number=1))
        try:
            async for data in requests:
                try:
                    fence, message = open_worker(data)
                except MessageError as error:
                    self.apply(Malformed(node, str(error)))
                    continue
                reason = self._admission.why_not_dialed(message, peer)
                if reason is not None:
                    self.apply(Malformed(node, reason))
                    continue
                verdict = guard.check(fence)
                if verdict is FencingVerdict.BREAK:
                    self._log(
                        f"a stream was broken off: {guard.why_broken}",
                        event="stream_broken",
                        level="warning",
                    )
                    return
                if verdict is FencingVerdict.TAKE:
                    self.apply(Received(node, message, fence.generation))
        finally:
            outbox.close()

    async def tick(self) -> None:
        """Tell the state that time passes, until the job ends."""
        while True:
            self.apply(Tick())
            self._launcher.beat()
            await asyncio.sleep(TICK_INTERVAL_S)

    def apply(self, event: Event) -> None:
        """Feed one event to the state and carry out what it says."""
        if self.done.done():
            return
        try:
            for effect in self._state.handle(event, time.monotonic()):
                self._carry_out(effect)
            self._decide_in_time()
        except Exception as error:
            self._break_down(error)

    def _decide_in_time(self) -> None:
        """Have the loss of a worker decided when its grace is over, not a tick later."""
        due_at = self._state.decides_at
        if due_at is None or due_at == self._decides_at or self.done.done():
            return
        self._decides_at = due_at
        wait_s = max(due_at - time.monotonic(), 0.0) + _PAST_DUE_S
        asyncio.get_running_loop().call_later(wait_s, self.apply, Tick())

    def _break_down(self, error: Exception) -> None:
        """A bug of ours. It would happen again, so all are told, and end."""
        kind = f"{type(error).__name__}: {error}".splitlines()[0]
        cause = FailureCause("exception", f"the scheduler failed: {kind}")
        for node in self._outboxes.nodes:
            self._send(node, Abort(cause))
        self._outboxes.close_all()
        write_report(os.environ, cause)
        self.done.set_exception(error)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect.node, effect.message)
            case Refuse():
                self._send(effect.node, Refused(effect.reason))
                self._outboxes.close(effect.node)
            case Drop():
                self._outboxes.close(effect.node)
            case TellLauncher():
                self._launcher.tell(effect.note)
            case Persist():
                assert self._journal is not None
                self._journal.write(effect.image)
            case Log():
                self._log(effect.line, event=effect.event, level=effect.level)
            case Exit():
                self._outboxes.close_all()
                if effect.cause is not None:
                    write_report(os.environ, effect.cause)
                self.done.set_result(effect.status)

    def _send(self, node: int, message: SchedulerMessage) -> None:
        job = self._state.job
        self._outboxes.send(node, message, job.identity.job, job.generation.number)
