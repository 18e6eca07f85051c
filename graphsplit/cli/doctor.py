"""The command ``graphsplit doctor``: what is wrong with the hosts of a job, before it runs."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from graphsplit.cli.ssh import frames
from graphsplit.cli.ssh.client import HostError, SshClient
from graphsplit.cli.ssh.connection import HostConnection
from graphsplit.cli.ssh.facts import own_facts, problems_of, remarks_on
from graphsplit.cli.ssh.frames import Facts
from graphsplit.cli.ssh.meeting import answers, connected
from graphsplit.cli.ssh.options import named_hosts, reach_options, ssh_command
from graphsplit.errors import ConfigurationError
from graphsplit.launchers.ports import holder_of, is_free
from graphsplit.security.protection import load_protection
from graphsplit.settings import NODE_TIMEOUT_S, ClusterSettings

_HERE = "this machine"
_PORT = 8118
_ANY_JOB = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "1", "MS_SCHED_PORT": str(_PORT)}


@click.command()
@reach_options
@click.pass_context
def doctor(
    context: click.Context,
    *,
    hosts: str | None,
    hostfile: Path | None,
    python: str | None,
    ssh: str,
) -> None:
    """Look for what would keep a job from running here, or with -H on other hosts.

    Prints versions, instruction sets, cores and clocks, with -H also latency and bandwidth of each
    pair of hosts; then what is wrong, each with its fix. Nothing is changed. The exit status is 1
    if a job could not run, else 0.

    Example: graphsplit doctor -H a,b
    """
    problems, remarks = environment_findings(os.environ)
    names = [name for name, _ in named_hosts(hosts, hostfile)]
    if names:
        try:
            client, there = ssh_command(ssh), python or sys.executable
            with connected(
                names, lambda name: SshClient(client, name, there), NODE_TIMEOUT_S
            ) as found:
                of_hosts = _look_at(found)
        except HostError as error:
            raise click.ClickException(str(error)) from None
        problems, remarks = problems + of_hosts[0], remarks + of_hosts[1]
    else:
        facts = {_HERE: own_facts(os.environ)}
        click.echo(facts_table(facts, late_s={}))
        problems, remarks = problems + problems_of(facts), remarks + remarks_on(facts, late_s={})
        remarks += _taken_port(os.environ)
    for finding in (*problems, *remarks):
        click.echo(f"\n{finding}")
    click.echo(f"\n{_in_words(len(problems), len(remarks))}")
    context.exit(bool(problems))


def _look_at(hosts: Mapping[str, HostConnection]) -> tuple[list[str], list[str]]:
    """Print what hosts say, and measure between them; problems, and remarks."""
    facts, problems = answers(hosts, frames.Facts)
    late_s = {name: hosts[name].late_s for name in facts}
    if facts:
        click.echo(facts_table(facts, late_s=late_s))
    reached = {name: one for name, one in hosts.items() if name in facts}
    measured, more = _measure({name: facts[name].address or name for name in reached}, reached)
    if measured:
        click.echo(f"\n{links_table(measured)}")
    return problems + problems_of(facts) + more, remarks_on(facts, late_s=late_s)


def _measure(
    addresses: Mapping[str, str], hosts: Mapping[str, HostConnection]
) -> tuple[dict[tuple[str, str], frames.Measured], list[str]]:
    """Every pair of hosts, one after the other, and the problems of those that cannot."""
    if len(hosts) < 2:
        return {}, []
    secret = secrets.token_hex(16)
    for name, connection in hosts.items():
        connection.tell(frames.Listen(addresses[name], secret))
    listening, problems = answers(hosts, frames.Listening)
    measured = {}
    for name, connection in hosts.items():
        for other in listening:
            if other == name:
                continue
            port = listening[other].port
            connection.tell(frames.Measure(addresses[other], port, secret))
            try:
                measured[name, other] = connection.answer(frames.Measured)
            except HostError as error:
                problems.append(str(error))
    return measured, problems


def environment_findings(environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Problems of the variables that a job would read, in the words of a job; and remarks."""
    own = {name: value for name, value in environ.items() if value.strip()}
    try:
        settings = ClusterSettings.from_environ({**_ANY_JOB, **own})
        if settings is not None:
            load_protection(settings.security, role=settings.role)
    except ConfigurationError as error:
        return [f"{_HERE}: {error}"], []
    return [], []


def _taken_port(environ: Mapping[str, str]) -> list[str]:
    port = environ.get("MS_SCHED_PORT", "").strip()
    number = int(port) if port.isdecimal() else _PORT
    if is_free("127.0.0.1", number):
        return []
    return [
        f"{_HERE}: port {number}, which the scheduler has by default, is taken by "
        f"{holder_of(number)}\n"
        f"  Fix: `graphsplit run` takes a free one; for other launchers set MS_SCHED_PORT"
    ]


def facts_table(facts: Mapping[str, Facts], *, late_s: Mapping[str, float]) -> str:
    """The facts of hosts, side by side."""
    rows = [
        ("", *facts),
        ("graphsplit", *(one.graphsplit for one in facts.values())),
        ("torch", *(one.torch or "none" for one in facts.values())),
        ("Python", *(one.python for one in facts.values())),
        ("CPU capability", *(one.cpu for one in facts.values())),
        ("cores", *(str(one.num_cores) for one in facts.values())),
        ("/dev/shm, free", *(f"{one.shared_bytes >> 20} MiB" for one in facts.values())),
    ]
    if late_s:
        rows.append(("address", *(one.address or "unknown" for one in facts.values())))
        rows.append(("clock", *(f"{-late_s[name]:+.1f} s" for name in facts)))
    return _aligned(rows)


def links_table(measured: Mapping[tuple[str, str], frames.Measured]) -> str:
    """Latency and bandwidth of pairs."""
    rows = [("from", "to", "there and back", "bandwidth")]
    for (name, other), link in measured.items():
        latency = f"{link.latency_s * 1e3:.3f} ms"
        rows.append((name, other, latency, f"{link.bytes_per_s / 1e6:.0f} MB/s"))
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
             for row in rows)  # fmt: skip
    return "\n".join(line.rstrip() for line in lines)


def _in_words(num_problems: int, num_remarks: int) -> str:
    if not num_problems and not num_remarks:
        return "nothing is wrong"
    parts = []
    if num_problems:
        parts.append(f"{num_problems} that keep{'s' * (num_problems == 1)} a job from running")
    if num_remarks:
        parts.append(f"{num_remarks} that a job stands")
    return "found: " + ", ".join(parts)
