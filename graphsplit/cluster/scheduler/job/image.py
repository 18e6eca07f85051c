"""The state that lets a scheduler go on where another one was lost. Frozen, and without secrets.

Endpoints and their tokens are not in it: every worker says them again when it comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from graphsplit.cluster.wire.messages import Register
from graphsplit.encoding import records
from graphsplit.encoding.fields import MessageError
from graphsplit.root_cause import FailureCause

FORMAT = 2


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


def to_json(image: JobImage) -> dict[str, Any]:
    """The image as plain JSON values."""
    members = {rank: replace(one, endpoints={}, resume=None) for rank, one in image.members.items()}
    return {"format": FORMAT, **records.to_node(replace(image, members=members))}


def from_json(found: Mapping[str, Any]) -> JobImage:
    """The image that ``to_json`` wrote.

    Raises:
        MessageError: It is of another format, or not an image.
    """
    values = dict(found)
    written = values.pop("format", None)
    if written != FORMAT:
        raise MessageError(f"it has format {written!r}; this version of graphsplit reads {FORMAT}")
    return records.from_node(JobImage, values, what="the image of a job")
