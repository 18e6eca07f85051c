"""Reaches the hosts of a command all at once, and collects what is wrong with each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TypeVar

from graphsplit.cli.ssh import frames
from graphsplit.cli.ssh.connection import HostConnection, HostError

_F = TypeVar("_F", bound=frames.Frame)


@contextmanager
def connected(
    names: Iterable[str], ssh: Sequence[str], python: str, silence_s: float
) -> Iterator[dict[str, HostConnection]]:
    """Connections to these hosts, which are closed at the end.

    Raises:
        HostError: There is no SSH client.
    """
    with ExitStack() as stack:
        found = {
            name: stack.enter_context(closing(HostConnection(ssh, name, python, silence_s)))
            for name in names
        }
        for connection in found.values():
            connection.serve()
        try:
            yield found
        finally:
            for connection in found.values():  # they leave side by side
                connection.hang_up()


def answers(
    connections: Mapping[str, HostConnection], kind: type[_F]
) -> tuple[dict[str, _F], list[str]]:
    """The answer of each host, by name, and the problems of those that do not."""
    found: dict[str, _F] = {}
    problems = []
    for name, connection in connections.items():
        try:
            found[name] = connection.answer(kind)
        except HostError as error:
            problems.append(str(error))
    return found, problems
