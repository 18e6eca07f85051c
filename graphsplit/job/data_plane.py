"""A worker's part of the data plane, opened anew for every generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphsplit.cluster.member.member import Member
from graphsplit.errors import ConfigurationError
from graphsplit.job.meter import Meter
from graphsplit.launchers.ports import address_of
from graphsplit.security.names import WORKER
from graphsplit.security.protection import load_protection
from graphsplit.settings import ClusterSettings
from graphsplit.transport.base import Transport
from graphsplit.transport.hub import Hub
from graphsplit.transport.wait import Waiting, WaitPolicy

GENERATOR_KEY = "generator"
"""Under which a worker registers the state of its generator."""
LABELS_KEY = "labels"
"""Under which a worker registers the names that scripts may place by."""


@dataclass(frozen=True)
class DataPlane:
    """Opens this worker's part of the data plane, anew for every generation.

    A new generation has new addresses and a new secret, so that what was sent in an earlier one
    has no way in.

    Attributes:
        settings: The cluster.
        generator: Digest of the generator's state when this process joined.
        meter: Counts what goes through; None: nobody counts.
    """

    settings: ClusterSettings
    generator: str
    meter: Meter | None = None

    def open(self) -> Hub:
        """Listen for peers."""
        settings = self.settings
        named, scheduler = settings.worker_host, settings.scheduler_host
        try:
            host = address_of(named, scheduler, settings.scheduler_port)
        except OSError as error:
            raise ConfigurationError(
                f"MS_WORKER_IP={named!r} has no address ({error.strerror or error})\n"
                f"  Fix: set it to an address of this machine that other workers reach"
            ) from None
        return Hub(
            bind_host=host,
            ports=settings.worker_ports,
            mode=settings.transport,  # type: ignore[arg-type]
            protection=load_protection(settings.security, role=WORKER, rank=settings.wished_rank),
            num_workers=settings.num_workers,
            silence_s=settings.silence_s,
        )

    def endpoints(self, hub: Hub) -> dict[str, str]:
        """The addresses to tell the peers."""
        found = {**hub.endpoints, GENERATOR_KEY: self.generator}
        labels = ",".join(self.settings.labels)
        return {**found, LABELS_KEY: labels} if labels else found

    def connect(self, hub: Hub, member: Member) -> Transport:
        """Become part of the generation that runs."""
        try:
            policy = WaitPolicy(member.abort, self.settings.receive_timeout_s, member.progress)
            member.position.waiting_source = _by_seat(policy.waiting, member.seats)
            return hub.connect(
                rank=member.rank,
                job=member.plan.job,
                generation=member.generation,
                peers=[peer.endpoints for peer in member.peers],
                policy=policy,
                traffic=None if self.meter is None else self.meter.traffic,
                seats=member.seats,
            )
        except BaseException as error:
            cause = member.failures.cause_of(error)
            if cause is not None:
                member.failures.report(cause)
            raise


def _by_seat(waiting: Waiting, seats: Sequence[int]) -> Callable[[], tuple[int, str] | None]:
    """Whom this worker waits for, by the rank that the scheduler knows, and for what."""

    def now() -> tuple[int, str] | None:
        found = waiting.now()
        return None if found is None else (seats[found[0]], found[1])

    return now
