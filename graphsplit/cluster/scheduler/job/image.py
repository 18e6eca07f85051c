"""The state that lets a scheduler go on where another one was lost. Frozen, and without secrets.

Endpoints and their tokens are not in it: every worker says them again when it comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from graphsplit.cluster.wire.messages import Register
from graphsplit.root_cause import FailureCause, Location

FORMAT = 1


class ImageError(ValueError):
    """The JSON that was read is no image; the text says why."""


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
    found = asdict(replace(image, members={}))
    found["format"] = FORMAT
    found["members"] = {
        str(rank): asdict(replace(one, endpoints={}, resume=None))
        for rank, one in image.members.items()
    }
    return found


def from_json(found: Mapping[str, Any]) -> JobImage:
    """The image that ``to_json`` wrote.

    Raises:
        ImageError: It is of another format, or not an image.
    """
    values = dict(found)
    written = values.pop("format", None)
    if written != FORMAT:
        raise ImageError(f"it has format {written!r}; this version of graphsplit reads {FORMAT}")
    try:
        members = {int(rank): Register(**one) for rank, one in values.pop("members").items()}
        return JobImage(members=members, cause=_cause(values.pop("cause")), **values)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ImageError(f"it is not the image of a job: {error}") from error


def _cause(found: Mapping[str, Any] | None) -> FailureCause | None:
    if found is None:
        return None
    values = dict(found)
    return FailureCause(location=Location(**values.pop("location")), **values)
