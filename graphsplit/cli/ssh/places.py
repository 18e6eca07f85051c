"""The host of each worker, which is another one once its own is lost and a spare one is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphsplit.cli.ssh.connection import HostConnection
from graphsplit.cli.ssh.hosts import JobHost


class Places:
    """Where the workers of a job run.

    Args:
        hosts: The hosts, with the workers that each has at first. The first one has the scheduler.
        spares: Hosts that have none yet.
        connections: The connections to all of them, by name.
    """

    def __init__(
        self,
        hosts: Sequence[JobHost],
        spares: Sequence[JobHost],
        connections: Mapping[str, HostConnection],
    ) -> None:
        self._connections = connections
        self._spares = [host.name for host in spares]
        self._now = {host.name: host.name for host in hosts}

    def find(self, host: JobHost) -> HostConnection:
        """The connection to where a host's processes run; those of a lost one move to a spare."""
        found = self._connections[self._now[host.name]]
        if found.is_lost and (spare := self._next_spare()):
            self._spares.remove(spare)
            self._now[host.name] = spare
            found = self._connections[spare]
        return found

    def has_place(self, host: JobHost) -> bool:
        """Whether a worker of a host could be started again."""
        return not self._connections[self._now[host.name]].is_lost or bool(self._next_spare())

    def _next_spare(self) -> str:
        return next((one for one in self._spares if not self._connections[one].is_lost), "")
