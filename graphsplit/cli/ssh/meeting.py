"""Reaches the hosts of a command all at once, and collects what is wrong with each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import TypeVar

from graphsplit.cli.ssh import frames
from graphsplit.cli.ssh.client import AgentClient, HostError
from graphsplit.cli.ssh.connection import HostConnection

_F = TypeVar("_F", bound=frames.Frame)


@contextmanager
def connected(
    names: Iterable[str], open_client: Callable[[str], AgentClient], silence_s: float
) -> Iterator[dict[str, HostConnection]]:
    """Connections to these hosts, by clients of their names, which are closed at the end.

    Raises:
        HostError: A client cannot be had.
    """
    with ExitStack() as stack:
        found = {
            name: stack.enter_context(closing(HostConnection(name, open_client(name), silence_s)))
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
    for connection in connections.values():  # all have been asked at the same time
        connection.await_answer()
    for name, connection in connections.items():
        try:
            found[name] = connection.answer(kind)
        except HostError as error:
            problems.append(str(error))
    return found, problems
