"""A job that several launchers start, one on each host: which part of it this one has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from graphsplit.launchers.ports import address_towards
from graphsplit.security.options import names_protection
from graphsplit.security.private_files import NEW_TOKEN
from graphsplit.security.protection import is_loopback

_MISSING = (
    "the launchers of a job on several hosts have no secret by which its processes know each "
    "other\n  Fix: make one, copy it to each host, and name it there:\n"
    f"    {NEW_TOKEN}\n"
    "    export GS_JOB_TOKEN_FILE=$PWD/job-token"
)


@dataclass(frozen=True)
class HostPart:
    """The processes of a job that one launcher starts.

    Attributes:
        num_workers: How many workers the whole job has.
        ranks: The workers that are started here.
        scheduler: ``(host, port)`` of a scheduler that another launcher starts; None: this one.
    """

    num_workers: int
    ranks: range
    scheduler: tuple[str, int] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all of the job is started here."""
        return self.scheduler is None and len(self.ranks) == self.num_workers


def read_part(
    num_workers: int | None, workers: int | None, first_rank: int, scheduler: str
) -> HostPart:
    """The part that the options name.

    Raises:
        click.UsageError: They name none.
    """
    if num_workers is None:
        if workers is None or not scheduler:
            raise click.UsageError(
                "Missing option '-n' / '--num-workers': how many workers the job has"
            )
        num_workers = first_rank + workers  # this is the last host, or the scheduler refuses it
    count = num_workers - first_rank if workers is None else workers
    if count < 1 or first_rank + count > num_workers:
        raise click.UsageError(
            f"workers {first_rank} to {first_rank + count - 1} of {num_workers}: --first-rank and "
            f"--workers must stay below -n"
        )
    where = _address(scheduler) if scheduler else None
    return HostPart(num_workers, range(first_rank, first_rank + count), where)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise click.BadParameter(
            f"{text!r} is no address; expected HOST:PORT, as in 10.0.0.1:8118",
            param_hint="--scheduler",
        )
    return host, int(port)


def shared_variables(
    part: HostPart, environ: Mapping[str, str], host: str, port: int, certificates: Path | None
) -> dict[str, str]:
    """The variables that every process needs where the job is on several hosts.

    Raises:
        click.ClickException: They have no secret, or the scheduler's host is not known here.
    """
    if part.is_whole:
        return {}
    if certificates is None and not names_protection(environ):
        raise click.ClickException(_MISSING)
    return worker_address(environ, host, port)


def worker_address(environ: Mapping[str, str], host: str, port: int) -> dict[str, str]:
    """Where workers of this host listen: at the address from which it reaches the scheduler.

    Raises:
        click.ClickException: The scheduler's host is not known here.
    """
    if environ.get("MS_WORKER_IP", "").strip() or is_loopback(host):
        return {}
    try:
        return {"MS_WORKER_IP": address_towards(host, port)}
    except OSError as error:
        raise click.ClickException(
            f"the scheduler's host {host} is not known here, or out of reach "
            f"({error.strerror or error})\n  Fix: make it known (DNS, /etc/hosts), or name it by "
            f"an IP address that this host reaches: --host"
        ) from None
