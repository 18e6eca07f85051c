"""The command ``graphsplit doctor``: what is wrong with the hosts of a job, before it runs."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from graphsplit.cli.launch.request import JobOptions
from graphsplit.cli.ssh import frames
from graphsplit.cli.ssh.client import HostError, SshClient
from graphsplit.cli.ssh.connection import HostConnection
from graphsplit.cli.ssh.facts import own_facts, problems_of, remarks_on
from graphsplit.cli.ssh.frames import Facts
from graphsplit.cli.ssh.hosts import give_ranks
from graphsplit.cli.ssh.links import reserve_for_workers
from graphsplit.cli.ssh.meeting import answers, connected
from graphsplit.cli.ssh.options import RemoteJob, doctor_options, named_hosts, remote_job
from graphsplit.cli.ssh.preparation import (
    get_ready,
    reach_each_other,
    scheduler_address,
    setups,
)
from graphsplit.encoding.links import MeasuredHost, MeasuredLink, MeasuredLinks
from graphsplit.errors import ConfigurationError
from graphsplit.launchers.ports import holder_of, is_free
from graphsplit.security.protection import load_protection
from graphsplit.settings import NODE_TIMEOUT_S, ClusterSettings
from graphsplit.text import align

_HERE = "this machine"
_PORT = 8118
_ANY_JOB = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "1", "MS_SCHED_PORT": str(_PORT)}


@click.command()
@doctor_options
@click.option(
    "--save-links",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Save what was measured, for `model.explain(*batch, links=FILE)`.",
)
@click.argument("script", type=click.Path(path_type=Path), required=False)
@click.pass_context
def doctor(
    context: click.Context,
    /,
    *,
    hosts: str | None,
    hostfile: Path | None,
    python: str | None,
    ssh: str,
    script: Path | None,
    save_links: Path | None,
    **given: Any,
) -> None:
    """Look for what would keep a job from running here, or with -H on other hosts.

    Prints versions, instruction sets, cores and clocks, with -H also latency and bandwidth of each
    pair of hosts; then what is wrong, each with its fix. Hosts are asked what `graphsplit run`
    asks them before it starts a job with these options, and the SCRIPT, if one is named. Nothing is
    changed. The exit status is 1 if a job could not run, else 0.

    Example: graphsplit doctor -H a,b train.py
    """
    named = named_hosts(hosts, hostfile)
    stays = {"MS_WORKER_IP"} if named else set()
    remarks: list[str] = []
    problems = environment_findings(
        {name: value for name, value in os.environ.items() if name not in stays}
    )
    if named:
        job, workdir = _job(script, **given), given["workdir"]
        ranked, address = give_ranks(named, None), given["host"] or ""
        remote = remote_job(ranked, python, ssh, workdir, address=address)
        try:
            with connected(
                [name for name, _ in named],
                lambda name: SshClient(remote.ssh, name, remote.python),
                NODE_TIMEOUT_S,
            ) as found:
                of_hosts = _look_at(job, remote, found, save_links)
        except HostError as error:
            raise click.ClickException(str(error)) from None
        problems, remarks = problems + of_hosts[0], remarks + of_hosts[1]
    elif any(value is not None for value in (script, save_links, *given.values())):
        raise click.UsageError("these options and SCRIPT are about other hosts; name them: -H a,b")
    else:
        facts = {_HERE: own_facts(os.environ)}
        click.echo(facts_table(facts, late_s={}))
        problems, remarks = problems + problems_of(facts), remarks + remarks_on(facts, late_s={})
        remarks += _taken_port(os.environ)
    for finding in (*problems, *remarks):
        click.echo(f"\n{finding}")
    click.echo(f"\n{_in_words(len(problems), len(remarks))}")
    context.exit(bool(problems))


def _job(script: Path | None, host: str | None, **given: Any) -> JobOptions:
    """The job that hosts are asked about: without a script it is of no file."""
    common = {name: given[name] for name in ("port", "certificates")}
    return JobOptions(0, script or Path(), host=host or "", as_module=script is None, **common)


def _look_at(
    job: JobOptions,
    remote: RemoteJob,
    hosts: Mapping[str, HostConnection],
    save_links: Path | None,
) -> tuple[list[str], list[str]]:
    """Print what hosts say, and measure between them; problems, and remarks."""
    facts, problems = answers(hosts, frames.Facts)
    problems += problems_of(facts)
    late_s = {name: hosts[name].late_s for name in facts}
    if facts:
        click.echo(facts_table(facts, late_s=late_s))
    # Those whose agents can be asked more: problems of their own would only show again.
    first = next(iter(facts.values()), None)
    sound = {
        name: one
        for name, one in facts.items()
        if first is not None and one.graphsplit == first.graphsplit and not one.problems
    }
    if sound:
        measured, more = _try_out(job, remote, {name: hosts[name] for name in sound}, sound)
        problems += more
        if save_links is not None:
            _save(save_links, remote, facts, measured)
    return problems, remarks_on(facts, late_s=late_s)


def _try_out(
    job: JobOptions,
    remote: RemoteJob,
    hosts: Mapping[str, HostConnection],
    facts: Mapping[str, Facts],
) -> tuple[dict[tuple[str, str], frames.Measured], list[str]]:
    """Have hosts get ready as for a job, reach each other, and measure; and the problems."""
    ranked = tuple(host for host in remote.hosts if host.name in hosts)
    try:
        address = scheduler_address(facts, remote.address)
    except HostError as error:
        return {}, [str(error)]
    wanted = setups(job, replace(remote, hosts=ranked), address, NODE_TIMEOUT_S, os.environ)
    ready, problems = get_ready(hosts, wanted)
    unreached, more = reach_each_other(hosts, wanted, ready)
    addresses = {name: facts[name].address or name for name in ready}
    measured, broken = _measure(addresses, hosts, unreached)
    if measured:
        click.echo(f"\n{links_table(measured)}")
    return measured, problems + more + broken


def _save(
    path: Path,
    remote: RemoteJob,
    facts: Mapping[str, Facts],
    measured: Mapping[tuple[str, str], frames.Measured],
) -> None:
    hosts = (
        MeasuredHost(host.name, tuple(host.ranks), facts[host.name].num_cores)
        for host in remote.hosts
        if host.name in facts
    )
    links = (MeasuredLink(*pair, one.latency_s, one.bytes_per_s) for pair, one in measured.items())
    try:
        MeasuredLinks(tuple(hosts), tuple(links)).save(path)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from None


def _measure(
    addresses: Mapping[str, str],
    hosts: Mapping[str, HostConnection],
    unreached: Set[tuple[str, str]],
) -> tuple[dict[tuple[str, str], frames.Measured], list[str]]:
    """Every pair of hosts, one after the other, and the problems of those that cannot."""
    if len(addresses) < 2:
        return {}, []
    secret = secrets.token_hex(16)
    for name, address in addresses.items():
        hosts[name].tell(frames.Listen(address, secret))
    listening, problems = answers({name: hosts[name] for name in addresses}, frames.Listening)
    measured = {}
    for name in addresses:
        for other in listening:
            if other == name or (name, other) in unreached:
                continue
            port = listening[other].port
            hosts[name].tell(frames.Measure(addresses[other], port, secret))
            try:
                measured[name, other] = hosts[name].answer(frames.Measured)
            except HostError as error:
                problems.append(str(error))
    return measured, problems


def environment_findings(environ: Mapping[str, str]) -> list[str]:
    """Problems of the variables that a job would read, in the words of a job."""
    own = {name: value for name, value in environ.items() if value.strip()}
    try:
        settings = ClusterSettings.from_environ({**_ANY_JOB, **own})
        if settings is not None:
            load_protection(settings.security, role=settings.role)
            scheduler = settings.scheduler_host, settings.scheduler_port
            ports = settings.worker_ports
            reserve_for_workers(settings.worker_host, scheduler, ports).close()
    except ConfigurationError as error:
        return [f"{_HERE}: {error}"]
    except click.ClickException as error:
        return [f"{_HERE}: {error.message}"]
    return []


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
    return "\n".join(align(rows))


def links_table(measured: Mapping[tuple[str, str], frames.Measured]) -> str:
    """Latency and bandwidth of pairs."""
    rows = [("from", "to", "there and back", "bandwidth")]
    for (name, other), link in measured.items():
        latency = f"{link.latency_s * 1e3:.3f} ms"
        rows.append((name, other, latency, f"{link.bytes_per_s / 1e6:.0f} MB/s"))
    return "\n".join(align(rows))


def _in_words(num_problems: int, num_remarks: int) -> str:
    if not num_problems and not num_remarks:
        return "nothing is wrong"
    parts = []
    if num_problems:
        parts.append(f"{num_problems} that keep{'s' * (num_problems == 1)} a job from running")
    if num_remarks:
        parts.append(f"{num_remarks} that a job stands")
    return "found: " + ", ".join(parts)
