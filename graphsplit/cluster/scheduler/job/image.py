"""The state that lets a scheduler go on where another one was lost. Frozen, and without secrets.

Endpoints and their tokens are not in it: every worker says them again when it comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from graphsplit.cluster.wire.messages import Register
from graphsplit.encoding import records
from graphsplit.root_cause import FailureCause


@dataclass(frozen=True)
class JobImage:
    """The durable state of a job.

    Attributes:
        job: The job's id.
        seed: One seed for all workers.
        num_workers: How many workers the job has.
        recovery: The recovery policy.
        phase: ``planned``, ``running``, ``recovering``, ``draining``, ``failed`` or ``ended``.
        generation: The generation that is planned, that runs, or that is to be formed.
        members: Who holds each rank; ranks that wait for somebody are not there.
        cause: Why the job recovers or has failed.
    """

    job: str
    seed: int
    num_workers: int
    recovery: str
    phase: str
    generation: int
    members: Mapping[int, Register]
    cause: FailureCause | None = None

    def to_text(self) -> str:
        """The image as one line of JSON."""
        members = {r: replace(one, endpoints={}, resume=None) for r, one in self.members.items()}
        return records.to_text(replace(self, members=members))

    @classmethod
    def read(cls, text: str | bytes) -> JobImage:
        """The image that ``to_text`` wrote.

        Raises:
            MessageError: It is none.
        """
        return records.from_text(cls, text, what="the image of a job")
