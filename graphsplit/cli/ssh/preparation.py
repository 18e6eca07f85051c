"""Sees before a job starts that its hosts can take part: what each must have, and reach.

``graphsplit run -H`` starts nothing where there is a problem; ``graphsplit doctor -H`` tells all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from graphsplit.cli.launch.request import JobOptions
from graphsplit.cli.ssh import frames
from graphsplit.cli.ssh.client import HostError
from graphsplit.cli.ssh.connection import HostConnection
from graphsplit.cli.ssh.frames import DialedPort, Facts, HostReady, Setup
from graphsplit.cli.ssh.meeting import answers
from graphsplit.cli.ssh.options import RemoteJob
from graphsplit.security.protection import is_loopback
from graphsplit.settings import worker_ports


def scheduler_address(facts: Mapping[str, Facts], named: str) -> str:
    """Where the scheduler listens, on the first host.

    Args:
        facts: By host.
        named: The address that the user named; empty: where SSH has reached the first host.

    Raises:
        HostError: Others cannot reach it.
    """
    first, *others = facts
    address = named or facts[first].address or first
    away = [name for name in others if not is_loopback(facts[name].address or name)]
    if is_loopback(address) and away:
        raise HostError(
            f"host {first}: the scheduler would listen on {address}, which host {away[0]} cannot "
            f"reach\n  Fix: name {first} by an address that the others reach, or give it: --host"
        )
    return address


def setups(
    options: JobOptions,
    remote: RemoteJob,
    address: str,
    silence_s: float,
    variables: Mapping[str, str],
) -> dict[str, Setup]:
    """The part of a job that each host is to be ready for; the first one has the scheduler, too.

    Args:
        options: The job.
        remote: Its hosts.
        address: Where the scheduler listens.
        silence_s: How long the launcher may be silent.
        variables: Those that its processes will have.
    """
    found = {}
    folder = options.certificates
    job = replace(options, host=address, certificates=folder and folder.absolute())
    movable = [rank for host in remote.hosts[1:] for rank in host.ranks]
    for host in (*remote.hosts, *remote.spares):
        is_first = host is remote.hosts[0]
        ranks = movable if host in remote.spares else host.ranks
        holders = [*(["scheduler"] if is_first else []), *(f"worker-{rank}" for rank in ranks)]
        found[host.name] = Setup(
            job, remote.workdir, tuple(holders), silence_s, is_first, worker_ports(variables)
        )
    return found


def get_ready(
    hosts: Mapping[str, HostConnection], wanted: Mapping[str, Setup]
) -> tuple[dict[str, HostReady], list[str]]:
    """Have hosts see that all is there; what they answer, and the problems of those that cannot."""
    for name, setup in wanted.items():
        hosts[name].tell(setup)
    ready, problems = answers({name: hosts[name] for name in wanted}, HostReady)
    first = next(iter(ready), "")
    for name, one in ready.items():
        if one.digest != ready[first].digest:
            problems.append(
                f"host {name}: its {wanted[name].job.script} is another one than that of host "
                f"{first}\n"
                f"  Fix: copy the same file to every host"
            )
    return ready, problems


def reach_each_other(
    hosts: Mapping[str, HostConnection], wanted: Mapping[str, Setup], ready: Mapping[str, HostReady]
) -> tuple[set[tuple[str, str]], list[str]]:
    """Have each host dial the scheduler's port, and one at which the workers of each other listen.

    Returns:
        The pairs of which the first host does not reach the second; and the problems.
    """
    peers = {name: tuple(_peers_of(name, wanted, ready)) for name in ready}
    for name, ports in peers.items():
        hosts[name].tell(frames.Reach(ports))
    reached, problems = answers({name: hosts[name] for name in ready}, frames.Dialed)
    pairs = set()
    for name, one in reached.items():
        for peer, text in zip(peers[name], one.problems, strict=True):
            if text:
                pairs.add((name, peer.name))
                problems.append(f"host {name}: {text}")
    return pairs, problems


def _peers_of(
    name: str, wanted: Mapping[str, Setup], ready: Mapping[str, HostReady]
) -> Iterator[DialedPort]:
    for other, one in ready.items():
        if other == name:
            continue
        if wanted[other].has_scheduler:
            what = f"the scheduler on host {other}"
            yield DialedPort(other, what, wanted[other].job.host, one.port)
        yield DialedPort(other, f"workers of host {other}", one.worker_host, one.worker_port)
