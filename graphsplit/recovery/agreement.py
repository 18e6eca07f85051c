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
        begins_anew: Whether it would fix owners anew there.
        owners: For each Model, by index, the owners that are fixed.
        seats: The workers among whom ``own`` and ``held`` were taken, by their seats.
        whole: Snapshots of which it has the parts of all.
    """

    is_fresh: bool
    own: Numbers = ()
    held: Numbers = ()
    disk: Numbers = ()
    reaches: Numbers = ()
    can_start: bool = True
    begins_anew: bool = True
    owners: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    seats: Numbers = ()
    whole: Numbers = ()


@dataclass(frozen=True)
class Target:
    """Where all go on.

    Attributes:
        number: Number of the snapshot; ``START`` for the beginning of the script.
        from_disk: Whether its parts come from disk, rather than from memories.
        fresh: The workers that have just started.
        owners: For each Model, by index, the owners that are fixed.
        givers: Where other workers may be there than took it: who brings each of its parts, or all
            of them if there is one.
    """

    number: int
    from_disk: bool
    fresh: tuple[int, ...]
    owners: Mapping[str, Mapping[str, int]]
    givers: tuple[int, ...] = ()


def choose(offers: Sequence[Offer], seats: Sequence[int] | None = None) -> Target:
    """The newest snapshot of which every worker's part is somewhere.

    Args:
        offers: What each worker offers, by rank.
        seats: Where the job goes on without those who are lost: the workers that are there, by
            their seats. Each part may then be with any of them, and owners are fixed anew.

    Raises:
        ClusterError: There is none.
    """
    fresh = tuple(rank for rank, offer in enumerate(offers) if offer.is_fresh)
    owners: dict[str, Mapping[str, int]] = {}
    for offer in offers:
        owners.update(offer.owners)
    numbers = {n for o in offers for n in (*o.own, *o.held, *o.whole)}
    givers = {n: found for n in numbers if (found := _givers(offers, n, seats))}
    in_memory = list(givers)
    on_disk = [
        n
        for n in {n for offer in offers for n in offer.disk}
        if all(offer.is_fresh or n in offer.reaches for offer in offers)
    ]
    start = [START] if all(offer.can_start for offer in offers) else []
    if not (in_memory or on_disk or start):
        raise ClusterError(_lost(offers, fresh) if seats is None else _lost_together(offers, seats))
    number = max([*in_memory, *on_disk, *start])
    from_disk = number in on_disk and number not in in_memory
    if number == START and all(offer.begins_anew for offer in offers):
        owners = {}  # those who come must not place by what the others forget
    if seats is None:
        return Target(number, from_disk, fresh, owners)
    return Target(number, from_disk, fresh, {}, () if from_disk else givers.get(number, ()))


def _givers(offers: Sequence[Offer], number: int, seats: Sequence[int] | None) -> tuple[int, ...]:
    """Who has each part of a snapshot, or one who has all; empty if a part is nowhere."""
    ranks = range(len(offers))
    whole = next((rank for rank in ranks if number in offers[rank].whole), None)
    if whole is not None:
        return (whole,)
    took: Sequence[int] = ranks
    if seats is not None:
        having = (o.seats for o in offers if number in (*o.own, *o.held))
        took, ranks_of = next(having, ()), {seat: rank for rank, seat in enumerate(seats)}
    else:
        ranks_of = {rank: rank for rank in ranks}
    found = []
    for place, seat in enumerate(took):
        rank, holder = ranks_of.get(seat), ranks_of.get(took[(place + 1) % len(took)])
        if rank is not None and not offers[rank].is_fresh:
            found += [rank] if number in offers[rank].own else []
        elif holder is not None and number in offers[holder].held:
            found.append(holder)
    return tuple(found) if len(found) == len(took) else ()


def _lost_together(offers: Sequence[Offer], seats: Sequence[int]) -> str:
    """Why nothing is left where the job goes on without the lost ones."""
    lost = sorted({seat for offer in offers for seat in offer.seats} - set(seats))
    return (
        f"the job cannot go on without workers {', '.join(map(str, lost)) or 'that were lost'}: "
        f"one of them held the copy of another one's state, and no snapshot on disk fits\n"
        f"  Fix: set MS_RECOVERY_PATH, so that snapshots go to disk as well, and start the job "
        f"again from its last save."
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
