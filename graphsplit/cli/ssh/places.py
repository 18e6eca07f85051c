"""The host of each worker; once it is lost, a spare one, or the way to it is made anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from graphsplit.cli.ssh.connection import HostConnection
from graphsplit.cli.ssh.hosts import JobHost


class Places:
    """Where the workers of a job run.

    Args:
        hosts: The hosts, with the workers that each has at first. The first one has the scheduler.
        spares: Hosts that have none yet.
        connections: The connections to all of them, by name.
        renew: Makes another connection in the place of one that is lost; None if that cannot be.
    """

    def __init__(
        self,
        hosts: Sequence[JobHost],
        spares: Sequence[JobHost],
        connections: Mapping[str, HostConnection],
        renew: Callable[[JobHost], HostConnection] | None = None,
    ) -> None:
        self._connections = dict(connections)
        self._renew = renew
        self._spares = [host.name for host in spares]
        self._now = {host.name: host.name for host in hosts}

    def find(self, host: JobHost) -> HostConnection:
        """The connection to where a host's processes run; those of a lost one go elsewhere."""
        found = self._connections[self._now[host.name]]
        if found.is_lost and (spare := self._next_spare()):
            self._spares.remove(spare)
            self._now[host.name] = spare
            found = self._connections[spare]
        elif found.is_lost and self._renew is not None:
            found = self._connections[host.name] = self._renew(host)
        return found

    def has_place(self, host: JobHost) -> bool:
        """Whether a worker of a host could be started again."""
        is_there = not self._connections[self._now[host.name]].is_lost
        return is_there or self._renew is not None or bool(self._next_spare())

    def _next_spare(self) -> str:
        return next((one for one in self._spares if not self._connections[one].is_lost), "")
