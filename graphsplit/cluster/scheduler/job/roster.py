"""The workers that the scheduler knows, by connection, life and rank. Mutable, but no rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from graphsplit.cluster.scheduler.job.formation import Holders, assign_ranks
from graphsplit.cluster.status.job_status import AWAY, FINISHED, LOST, RUNNING
from graphsplit.cluster.wire.messages import NO_CALLS, CallsMade, Peer, Register
from graphsplit.root_cause import NOWHERE, FailureCause, Location

NO_NODE = -1
"""The connection of a worker that has none."""


@dataclass(eq=False)
class Worker:
    """One accepted worker.

    ``rank`` is provisional until all have arrived. ``last_seen`` is when anything came from it,
    ``last_change`` when its progress number, its position or what it waits for changed.
    ``is_gone``: the launcher saw its process end, and starts no other.
    """

    node: int
    registration: Register
    last_seen: float
    last_change: float
    rank: int = -1
    progress: int = 0
    position: str = ""
    location: Location = NOWHERE
    calls: CallsMade = NO_CALLS
    training: str = ""
    is_finished: bool = False
    is_leaving: bool = False
    is_lost: bool = False
    is_gone: bool = False
    is_connected: bool = True

    @property
    def state(self) -> str:
        """The worker's state in one word, for people."""
        if self.is_finished:
            return FINISHED
        if self.is_lost:
            return LOST
        return RUNNING if self.is_connected else AWAY

    def is_process(self, host: str, pid: int) -> bool:
        """Whether this is that process."""
        return (self.registration.host, self.registration.pid) == (host, pid)

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
            location=self.location,
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
    """All accepted workers.

    Attributes:
        in_order: Those, in the order of arrival until ``seal``, then in that of ranks.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self.in_order: list[Worker] = []
        self._by_node: dict[int, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.in_order)

    def __len__(self) -> int:
        return len(self.in_order)

    @property
    def is_full(self) -> bool:
        """Whether every rank is held."""
        return len(self.in_order) == self._num_workers

    @property
    def registrations(self) -> list[Register]:
        """The registrations of all workers."""
        return [worker.registration for worker in self.in_order]

    @property
    def vacant(self) -> list[int]:
        """The ranks that nobody holds, once ranks are final."""
        held = {worker.rank for worker in self.in_order}
        return [rank for rank in range(self._num_workers) if rank not in held]

    def get(self, node: int) -> Worker | None:
        """The worker on this connection, if it is one."""
        return self._by_node.get(node)

    def of(self, incarnation: str) -> Worker | None:
        """The worker that lives this life, if it is one."""
        return self._first(lambda one: one.incarnation == incarnation)

    def holders(self, new: Register) -> Holders:
        """The workers that may stand in the way of a newcomer."""
        wish = new.wished_rank
        of_rank = None if wish is None else self._first(lambda one: one.wished_rank == wish)
        of_name = self._first(lambda one: one.node_id == new.node_id)
        return Holders(
            of_rank=of_rank.registration if of_rank else None,
            of_name=of_name.registration if of_name else None,
            first=self.in_order[0].registration if self.in_order else None,
            num_registered=len(self.in_order),
        )

    def _first(self, is_it: Callable[[Register], bool]) -> Worker | None:
        return next((one for one in self.in_order if is_it(one.registration)), None)

    def add(self, worker: Worker) -> None:
        """Add a worker, and give everyone the rank they would have if nobody else came."""
        self._list(worker)
        wishes = [one.registration.wished_rank for one in self.in_order]
        for one, rank in zip(self.in_order, assign_ranks(wishes, self._num_workers), strict=True):
            one.rank = rank

    def fill(self, worker: Worker, rank: int) -> None:
        """Give a rank that nobody holds to a worker."""
        worker.rank = rank
        self._list(worker)
        self.seal()

    def _list(self, worker: Worker) -> None:
        self.in_order.append(worker)
        if worker.node != NO_NODE:
            self._by_node[worker.node] = worker

    def attach(self, worker: Worker, node: int) -> None:
        """The worker speaks on this connection from now on."""
        self._by_node.pop(worker.node, None)
        self._by_node[node] = worker
        worker.node, worker.is_connected = node, True

    def remove(self, worker: Worker) -> None:
        """Its rank is vacant again, and what still comes on its connection is a stranger's."""
        self.in_order.remove(worker)
        self._by_node.pop(worker.node, None)

    def seal(self) -> None:
        """All have arrived: the ranks are final, and order the roster."""
        self.in_order.sort(key=lambda worker: worker.rank)
