"""The hosts of a job, and the workers of each: ``a:2,b:3``, or a file. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import click

_HOST = re.compile(
    r"(?P<name>\[[0-9A-Fa-f:.%\w]+\]|[\w.@%-]+)(?:(?::|\s+slots\s*=\s*)(?P<slots>[0-9]{1,4}))?",
    re.A,
)
_EXPECTED = "expected NAME or NAME:SLOTS, as in a:2,b:3"


@dataclass(frozen=True)
class JobHost:
    """One host of a job.

    Attributes:
        name: As ``ssh`` is given it.
        ranks: The workers that it starts.
        labels: By which the script may name these workers, too.
    """

    name: str
    ranks: range
    labels: tuple[str, ...] = ()


def read_hosts(text: str, source: str) -> list[tuple[str, int]]:
    """Names and slots, from ``a:2,b:3`` or from the lines of a file, ``a slots=2`` among them.

    Raises:
        click.BadParameter: What stands there is no host, or one comes twice; names ``source``.
    """
    lines = [line.partition("#")[0].strip() for line in re.split("[,\n]", text)]
    found: dict[str, int] = {}
    for line in filter(None, lines):
        parts = _HOST.fullmatch(line)
        if parts is None or line.startswith("-"):
            raise click.BadParameter(f"{line!r} is no host; {_EXPECTED}", param_hint=source)
        name = parts["name"].removeprefix("[").removesuffix("]")
        slots = int(parts["slots"] or 1)
        if name in found or slots < 1:
            problem = "comes twice" if name in found else "has no slot"
            raise click.BadParameter(f"{name} {problem}; {_EXPECTED}", param_hint=source)
        found[name] = slots
    if not found:
        raise click.BadParameter(f"no host is named; {_EXPECTED}", param_hint=source)
    return list(found.items())


def give_ranks(hosts: Sequence[tuple[str, int]], num_workers: int | None) -> tuple[JobHost, ...]:
    """The workers of each host, in the order of hosts. Those without any are left out.

    Raises:
        click.BadParameter: There are more workers than slots.
    """
    slots = sum(count for _, count in hosts)
    wanted = slots if num_workers is None else num_workers
    if wanted > slots:
        raise click.BadParameter(
            f"{wanted} workers, but the hosts have {slots} slots; give more: a:2,b:3",
            param_hint="-n",
        )
    given, first = [], 0
    for name, count in hosts:
        last = min(first + count, wanted)
        if last > first:
            given.append(JobHost(name, range(first, last)))
        first = last
    return tuple(given)
