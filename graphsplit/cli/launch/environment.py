"""The names and the environment variables of the processes of a job on this machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from graphsplit.cli.launch.cores import Share
from graphsplit.cli.launch.ending import SCHEDULER

GIB, MIB = 1 << 30, 1 << 20

_NOBODY: Mapping[int, Share] = {}
OF_A_JOB = ("MS_ROLE", "MS_NODE_ID", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT")


@dataclass(frozen=True)
class ChildSpec:
    """One process to start; told so to the agent of its host, where another one starts it.

    Attributes:
        name: As it is shown to people: ``"scheduler"`` or ``"worker 3"``.
        variables: Its whole environment; an agent is told what comes to its host's own.
        share: Its part of the host's cores; None: it may use all.
        labels: Names of a worker by its place, beside those in the variables.
    """

    name: str
    variables: Mapping[str, str] = field(repr=False)
    share: Share | None = None
    labels: tuple[str, ...] = ()

    @property
    def file_stem(self) -> str:
        """The name as part of a file name."""
        return self.name.replace(" ", "_")


def job_children(
    base: Mapping[str, str],
    *,
    num_workers: int,
    host: str,
    port: int,
    certificates: Path | None = None,
    ranks: Sequence[int] | None = None,
    has_scheduler: bool = True,
    has_defaults: bool = True,
    shares: Mapping[int, Share] = _NOBODY,
) -> tuple[ChildSpec, ...]:
    """Return the scheduler and the workers, or those of them that this launcher starts.

    Where ``base`` has no secret for the job, they get one that nobody else knows.

    Args:
        base: The environment they start from.
        num_workers: How many workers there are.
        host: Where the scheduler listens.
        port: Its port.
        certificates: A folder with a certificate for each of them, for mutual TLS.
        ranks: The workers to start; None: all.
        has_scheduler: Whether to start the scheduler, too.
        has_defaults: Whether to set what ``defaults`` names where ``base`` does not.
        shares: The part of the host's cores of each worker that is bound, by rank.
    """
    shared = {**(defaults() if has_defaults else {}), **base}
    if not (base.get("GS_JOB_TOKEN") or base.get("GS_JOB_TOKEN_FILE")):
        # In the environment, which only this user can read; never in an argument.
        shared["GS_JOB_TOKEN"] = secrets.token_urlsafe(32)
    shared |= {
        "MS_WORKER_NUM": str(num_workers),
        "MS_SCHED_HOST": host,
        "MS_SCHED_PORT": str(port),
    }
    # One that the shell left behind must not become the rank of every process.
    shared.pop("MS_NODE_ID", None)
    own = {"MS_ROLE": "MS_SCHED", **tls_files(certificates, "scheduler")}
    children = [ChildSpec(SCHEDULER, {**shared, **own})] if has_scheduler else []
    for rank in range(num_workers) if ranks is None else ranks:
        own = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank)}
        own |= tls_files(certificates, f"worker-{rank}")
        children.append(ChildSpec(f"worker {rank}", {**shared, **own}, shares.get(rank)))
    return tuple(children)


def lone_child(base: Mapping[str, str], name: str) -> ChildSpec:
    """One process that runs a script by itself, with all else as a job's processes have it."""
    variables = {**defaults(), **base}
    for variable in OF_A_JOB:
        variables.pop(variable, None)
    variables["GS_LAUNCHER"] = "none"  # another one may have started the command
    return ChildSpec(name, variables)


def tls_files(folder: Path | None, name: str) -> dict[str, str]:
    """The files of one process in a folder that ``graphsplit certs`` filled."""
    if folder is None:
        return {}
    files = {"GS_TLS_CA": "ca.pem", "GS_TLS_CERT": f"{name}.pem", "GS_TLS_KEY": f"{name}.key"}
    return {variable: str((folder / file).absolute()) for variable, file in files.items()}


def defaults() -> dict[str, str]:
    """Variables that are set only where the user did not set them. They depend on the machine."""
    return {
        # The number of threads changes the order of sums, and with it the bits.
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # Otherwise glibc returns memory after each step and pays for it with page faults.
        "MALLOC_TRIM_THRESHOLD_": str(GIB),
        "MALLOC_MMAP_THRESHOLD_": str(_mmap_threshold_bytes()),
    }


def _mmap_threshold_bytes() -> int:
    """The largest threshold that this machine's glibc accepts; it ignores larger ones."""
    try:
        _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        major, minor = (int(part) for part in version.split(".")[:2])
    except (OSError, ValueError):
        return 32 * MIB
    return GIB if (major, minor) >= (2, 35) else 32 * MIB
