"""From which snapshot all workers go on. Pure: every worker decides alike from the same offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from graphsplit.encoding.fields import integer
from graphsplit.errors import ClusterError

Numbers = tuple[Annotated[int, integer(0, 1 << 62)], ...]
START = 0
"""The number that stands for the state in which the script began."""


@dataclass(frozen=True)
class Offer:
    """The offer of one worker.

    Attributes:
        is_fresh: It has just started, and has nothing but what its script builds.
        own: Snapshots of which it has its own part, and to which it can go back.
        held: Snapshots of which it has the part of the worker before it.
        disk: Snapshots that it sees complete on its disk.
        reaches: Snapshots to which it could go back if they were on disk.
        can_start: Whether it can go back to where the script began.
        owners: For each Model, by index, the owners that are fixed.
    """

    is_fresh: bool
    own: Numbers = ()
    held: Numbers = ()
    disk: Numbers = ()
    reaches: Numbers = ()
    can_start: bool = True
    owners: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """Where all go on.

    Attributes:
        number: Number of the snapshot; ``START`` for the beginning of the script.
        from_disk: Whether its parts come from disk, rather than from memories.
        fresh: The workers that have just started.
        owners: For each Model, by index, the owners that are fixed.
    """

    number: int
    from_disk: bool
    fresh: tuple[int, ...]
    owners: Mapping[str, Mapping[str, int]]


def choose(offers: Sequence[Offer]) -> Target:
    """The newest snapshot of which every worker's part is somewhere.

    Args:
        offers: What each worker offers, by rank.

    Raises:
        ClusterError: There is none.
    """
    fresh = tuple(rank for rank, offer in enumerate(offers) if offer.is_fresh)
    owners: dict[str, Mapping[str, int]] = {}
    for offer in offers:
        owners.update(offer.owners)
    in_memory = [n for n in {n for o in offers for n in (*o.own, *o.held)} if _has_all(offers, n)]
    on_disk = [
        n
        for n in {n for offer in offers for n in offer.disk}
        if all(offer.is_fresh or n in offer.reaches for offer in offers)
    ]
    start = [START] if all(offer.can_start for offer in offers) else []
    if not (in_memory or on_disk or start):
        raise ClusterError(_lost(offers, fresh))
    number = max([*in_memory, *on_disk, *start])
    from_disk = number in on_disk and number not in in_memory
    return Target(number, from_disk, fresh, owners)


def _has_all(offers: Sequence[Offer], number: int) -> bool:
    return all(
        number in (offers[(rank + 1) % len(offers)].held if offer.is_fresh else offer.own)
        for rank, offer in enumerate(offers)
    )


def _lost(offers: Sequence[Offer], fresh: Sequence[int]) -> str:
    """Why nothing is left."""
    pairs = [r for r in fresh if (r + 1) % len(offers) in fresh]
    lost = ", ".join(str(rank) for rank in fresh) or "none"
    why = "no snapshot is complete"
    if pairs:
        first = pairs[0]
        why = (
            f"worker {first} was lost together with worker {(first + 1) % len(offers)}, which held "
            f"the copy of its state"
        )
    return (
        f"the job cannot go on after the loss of workers {lost}: {why}, and no snapshot on disk "
        f"fits\n  Fix: set MS_RECOVERY_PATH, so that snapshots go to disk as well, and start the "
        f"job again from its last save."
    )
