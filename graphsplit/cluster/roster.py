"""The workers that the scheduler knows, by connection and by rank. Mutable, but no rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphsplit.cluster.formation import assign_ranks
from graphsplit.cluster.messages import Peer, Register
from graphsplit.failure import FailureCause


@dataclass
class Worker:
    """One accepted worker.

    ``rank`` is provisional until all have arrived. ``last_seen`` is when anything came from it,
    ``last_change`` when its progress number or its position changed.
    """

    node: int
    registration: Register
    last_seen: float
    last_change: float
    rank: int = -1
    progress: int = 0
    position: str = ""
    is_finished: bool = False
    is_leaving: bool = False
    is_lost: bool = False
    is_connected: bool = True

    def cause(self, kind: str, message: str, *, traceback: str = "") -> FailureCause:
        """A failure of this worker, with all that is known about its process."""
        return FailureCause(
            kind=kind,
            message=message,
            rank=self.rank,
            host=self.registration.host,
            pid=self.registration.pid,
            position=self.position,
            traceback=traceback,
        )

    def peer(self) -> Peer:
        """This worker as the others know it."""
        one = self.registration
        return Peer(
            rank=self.rank,
            node_id=one.node_id,
            incarnation=one.incarnation,
            host=one.host,
            pid=one.pid,
            endpoints=one.endpoints,
        )


class Roster:
    """All accepted workers, in the order of arrival until ``seal``, then in that of ranks."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._workers: list[Worker] = []
        self._by_node: dict[int, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def registrations(self) -> list[Register]:
        """What every worker said when it registered."""
        return [worker.registration for worker in self._workers]

    @property
    def connected(self) -> list[Worker]:
        """The workers whose stream is still there."""
        return [worker for worker in self._workers if worker.is_connected]

    def get(self, node: int) -> Worker | None:
        """The worker on this connection, if it is one."""
        return self._by_node.get(node)

    def add(self, worker: Worker) -> None:
        """Add a worker, and give everyone the rank they would have if nobody else came."""
        self._workers.append(worker)
        self._by_node[worker.node] = worker
        wishes = [one.registration.wished_rank for one in self._workers]
        for one, rank in zip(self._workers, assign_ranks(wishes, self._num_workers), strict=True):
            one.rank = rank

    def seal(self) -> None:
        """All have arrived: the ranks are final, and order the roster."""
        self._workers.sort(key=lambda worker: worker.rank)
