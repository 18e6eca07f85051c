"""The membership that the threads of a worker share, and the lock that guards it."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import replace

from graphsplit.cluster.member.identity import ReportedPosition, bounded_location
from graphsplit.cluster.member.state_machine import MemberState
from graphsplit.cluster.wire import limits
from graphsplit.cluster.wire.messages import (
    Failed,
    Fence,
    Formed,
    Heartbeat,
    NodeIdentity,
    Register,
)
from graphsplit.cluster.wire.rpc import format_address, own_host
from graphsplit.errors import RegistrationRefusedError
from graphsplit.failure import AbortSignal
from graphsplit.settings import ClusterSettings


class Membership:
    """One worker's part in a job: who it is, where it stands, and what it has to tell.

    Attributes:
        settings: Where the scheduler is, and which rank this worker wishes.
        address: The scheduler's address.
        host: This machine's name.
        pid: This process.
        incarnation: This life of the process.
        changed: Guards what follows; whoever waits is woken when anything changes.
        state: The state machine.
        abort: Ends the waits of this generation.
        formed: The plan of the generation that runs, or was left; None before the first.
        has_left: Whether this worker has closed its membership.
        to_report: The failure that the scheduler is to hear of.
        texts: The text that is being agreed on, by topic, in case somebody has another one.
        watched: Whose progress the next heartbeat asks for.
        wants_stop: Whether heartbeats ask that all workers end in order.
        position: Where this worker is in its computation.
    """

    def __init__(self, settings: ClusterSettings, abort: AbortSignal) -> None:
        self.settings = settings
        self.address = format_address(settings.scheduler_host, settings.scheduler_port)
        self.host = own_host()
        self.pid = os.getpid()
        self.incarnation = secrets.token_hex(16)
        self.changed = threading.Condition()
        self.state = MemberState(self.address)
        self.abort = abort
        self.formed: Formed | None = None
        self.has_left = False
        self.to_report: Failed | None = None
        self.texts: dict[str, bytes] = {}
        self.watched: set[int] = set()
        self.wants_stop = False
        self.position = ReportedPosition()

    @property
    def plan(self) -> Formed:
        """The plan of the generation that runs."""
        assert self.formed is not None, "a member exists only once the cluster has formed"
        return self.formed

    @property
    def is_done(self) -> bool:
        """Whether no stream is needed any more: this worker has left, or the job has failed."""
        return self.has_left or self.has_failed

    @property
    def has_failed(self) -> bool:
        """Whether the job has failed for good."""
        return self.abort.cause is not None and not self.abort.recovers

    def wake(self) -> None:
        """Have everybody who waits look again."""
        with self.changed:
            self.changed.notify_all()

    def begin(self, generation: int) -> None:
        """All workers are ready: from now on another abort signal counts."""
        if self.formed is not None:
            self.abort = AbortSignal(generation)
            self.abort.add_waker(self.wake)
        self.abort.generation = generation
        self.to_report = None  # what was wrong in the former generation is over with it
        self.formed = self.state.formed

    def registration(self, endpoints: Mapping[str, str], identity: NodeIdentity) -> Register:
        """The registration of this worker, for its first stream."""
        settings = self.settings
        anonymous = f"{self.host[:64]}-{self.pid}-{self.incarnation[:8]}"
        return Register(
            node_id=settings.node_id or anonymous,
            incarnation=self.incarnation,
            role=settings.role,
            num_workers=settings.num_workers,
            wished_rank=settings.wished_rank,
            host=self.host,
            pid=self.pid,
            endpoints=dict(endpoints),
            **vars(identity),
            recovery=settings.recovery,
        )

    def fence(self) -> Fence:
        """The fence of a message that this worker sends now."""
        return Fence(self.state.job, self.state.generation, self.incarnation)

    def heartbeat(self) -> Heartbeat:
        """The position of this worker at this moment, and the ranks whose progress it asks for."""
        watched, self.watched = self.watched, set()
        return Heartbeat(
            progress=max(0, self.position.progress + self.position.aside),
            position=self.position.text(),
            watched=tuple(sorted(watched)[: limits.MAX_WATCHED]),
            location=self.position.sample(),
            wants_stop=self.wants_stop,
            calls=self.position.calls.made(),
            training=self.position.training(),
        )

    def last_words(self, source: str) -> Heartbeat:
        """The last word of a worker whose script ends the process there."""
        beat = self.heartbeat()
        return replace(beat, location=bounded_location(replace(beat.location, source=source)))

    def refused(self) -> RegistrationRefusedError:
        """The error that says why the scheduler refuses this worker."""
        return RegistrationRefusedError(
            f"the scheduler at {self.address} refused this worker (host {self.host}, pid "
            f"{self.pid}): {self.state.refusal}"
        )
