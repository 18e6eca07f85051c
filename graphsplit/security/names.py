"""The names in certificates: which role, and which rank, the holder of the key has.

A certificate of graphsplit names its holder by one DNS name::

    scheduler.graphsplit.internal     the scheduler
    worker-3.graphsplit.internal      worker 3, and no other
    worker.graphsplit.internal        a worker of any rank

They are DNS names, not URIs, because every TLS library compares a DNS name by itself: whoever
connects says which one it expects. ``.internal`` is reserved for private use, so no public
authority signs such a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

DOMAIN = "graphsplit.internal"
SCHEDULER, WORKER = "scheduler", "worker"

_NAME = re.compile(r"(?:(scheduler)|(worker)(?:-(0|[1-9][0-9]{0,3}))?)\.graphsplit\.internal")


@dataclass(frozen=True)
class CertifiedName:
    """The holder that a certificate names.

    Attributes:
        role: ``"scheduler"`` or ``"worker"``.
        rank: The worker's rank; None if any rank will do.
    """

    role: str
    rank: int | None = None

    @property
    def dns(self) -> str:
        """The name as it stands in a certificate."""
        return f"{self.role}{'' if self.rank is None else f'-{self.rank}'}.{DOMAIN}"

    def __str__(self) -> str:
        """The holder in words."""
        if self.role == SCHEDULER:
            return "the scheduler"
        return "a worker of any rank" if self.rank is None else f"worker {self.rank}"


def read_name(dns: str) -> CertifiedName | None:
    """The holder that a DNS name names, or None if it is another kind of name."""
    found = _NAME.fullmatch(dns)
    if found is None:
        return None
    scheduler, worker, rank = found.groups()
    return CertifiedName(scheduler or worker, int(rank) if rank else None)


def holder_of(dns_names: Iterable[str]) -> CertifiedName | None:
    """The one holder that a certificate names; None if it names none, or several."""
    found = {name for name in map(read_name, dns_names) if name is not None}
    return found.pop() if len(found) == 1 else None


def why_not_worker(holder: CertifiedName | None, rank: int | None) -> str | None:
    """The reason why the holder of a certificate may not act as this worker, or None.

    Args:
        holder: What the certificate says; None if it names nobody.
        rank: The rank that the peer says it has; None if it has none yet.
    """
    if holder is None:
        return f"its certificate does not name one role of {DOMAIN}"
    if holder.role != WORKER:
        return f"its certificate is for {holder}, and it says that it is a worker"
    if None not in (rank, holder.rank) and rank != holder.rank:
        return f"its certificate is for {holder}, and it says that it is worker {rank}"
    return None
