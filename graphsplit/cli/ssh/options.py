"""The options by which a command names the hosts of a job, and what they mean."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from graphsplit.cli.job import CERTIFICATES, PORT, job_options
from graphsplit.cli.ssh.hosts import JobHost, give_ranks, read_hosts

# Those of one process alone, and files of this machine alone.
_STAYS = frozenset(
    ("MS_ROLE", "MS_NODE_ID", "MS_WORKER_NUM", "MS_WORKER_IP", "MS_SCHED_HOST", "MS_SCHED_PORT")
) | {
    *("GS_LAUNCHER", "GS_LAUNCHER_LINE", "GS_REPORT_FILE", "GS_WORKER_LABELS"),
    *("GS_JOB_TOKEN", "GS_JOB_TOKEN_FILE"),
}
_CLUSTER = re.compile(r"auto|local|(ray://)?[\w.\[\]:-]+:[0-9]{1,5}")
_TRAVELS = ("OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY")
_HOSTS = (
    click.option(
        "-H",
        "--hosts",
        metavar="NAME:SLOTS,...",
        help="Start the workers on these hosts by SSH, so many on each, in this order: a:2,b:3.",
    ),
    click.option(
        "--hostfile",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="The same, a host in each line: NAME:SLOTS, or NAME slots=SLOTS.",
    ),
)
_RAY = (
    click.option(
        "--ray",
        is_flag=False,
        flag_value="",
        default=None,
        metavar="[ADDRESS]",
        help="Start the workers on a Ray cluster: at HOST:PORT, or the one that Ray finds. Write "
        "it before another option.",
    ),
    click.option(
        "--resources",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="What each worker takes of the Ray cluster, in YAML: `all: {CPU: 1}`, `0: {GPU: 1}`.",
    ),
)
_REACH = (
    click.option(
        "--python",
        metavar="PATH",
        help="The interpreter on those hosts.  [default: the path of this one]",
    ),
    click.option(
        "--ssh",
        default="ssh",
        metavar="COMMAND",
        help="The SSH client with options, as in --ssh 'ssh -F my_config'.  [default: ssh]",
    ),
)
_WORKDIR = click.option(
    "--workdir",
    metavar="DIR",
    help="The folder on those hosts in which all runs.  [default: the path of this one]",
)
_HOST = click.option(
    "--host",
    metavar="ADDRESS",
    help="The address that the scheduler would listen on.  [default: where SSH reaches the first]",
)
_JOB = (
    _WORKDIR,
    click.option(
        "--env",
        "names",
        multiple=True,
        metavar="NAME",
        help="Give the processes there this variable of the environment here, or NAME=VALUE. "
        "Those of graphsplit and OMP_NUM_THREADS are given in any case.",
    ),
    click.option(
        "--spares",
        metavar="NAME,...",
        help="Hosts that wait for a host to be lost, and get its workers then: with --restarts.",
    ),
    click.option(
        "--dry-run",
        is_flag=True,
        help="Only print what would be run on those hosts.",
    ),
)


@dataclass(frozen=True)
class RemoteJob:
    """Where a job runs, if not here.

    Attributes:
        hosts: The hosts, with the workers of each.
        python: The interpreter there.
        ssh: The SSH client, with options.
        workdir: The folder there.
        names: Further variables that travel: ``NAME``, or ``NAME=VALUE``.
        dry_run: Whether only to say what would run.
        address: Where the scheduler listens; empty: where SSH has reached the first host.
        ray: The Ray cluster in place of hosts, empty for the one that Ray finds; None: no Ray.
        resources: The file that says what each worker takes of it.
        spares: Hosts that have no workers until another one is lost.
    """

    hosts: tuple[JobHost, ...]
    python: str
    ssh: tuple[str, ...]
    workdir: str
    names: tuple[str, ...] = ()
    dry_run: bool = False
    address: str = ""
    ray: str | None = None
    resources: Path | None = None
    spares: tuple[JobHost, ...] = ()


def remote_job(
    hosts: tuple[JobHost, ...], python: str | None, ssh: str, workdir: str | None, **others: Any
) -> RemoteJob:
    """A job on hosts, by what the options say; what they leave out is as it is here.

    Raises:
        click.BadParameter: ``ssh`` is no command.
    """
    path, folder = python or sys.executable, workdir or str(Path.cwd())
    return RemoteJob(hosts, path, _ssh_command(ssh), folder, **others)


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """As ``job_options``; the command also gets ``remote``: a ``RemoteJob``, or None."""
    local = job_options(command)

    @wraps(local)
    def call(**given: Any) -> None:
        changed = _remote(given)
        local(**given, **changed)

    found: Callable[..., None] = call
    for option in reversed((*_HOSTS, *_RAY, *_REACH, *_JOB)):
        found = option(found)
    return found


def doctor_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that name hosts, how to reach them, and what they must have."""
    for option in reversed((*_HOSTS, *_REACH, _WORKDIR, _HOST, PORT, CERTIFICATES)):
        command = option(command)
    return command


def named_hosts(hosts: str | None, hostfile: Path | None) -> list[tuple[str, int]]:
    """Names and slots that the options give; none where neither is given.

    Raises:
        click.UsageError: Both are given, or one names no hosts.
    """
    if hosts is not None and hostfile is not None:
        raise click.UsageError("-H and --hostfile both name the hosts: give one of them")
    if hostfile is not None:
        return read_hosts(hostfile.read_text(), str(hostfile))
    return [] if hosts is None else read_hosts(hosts, "-H")


def _ssh_command(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--ssh") from None
    if not words:
        raise click.BadParameter("it is empty", param_hint="--ssh")
    return words


def _remote(given: dict[str, Any]) -> dict[str, Any]:
    """The hosts of the job, and the options that change with them; what is here alone is taken."""
    parts = {name: given.pop(name) for name in ("hosts", "hostfile", "python", "ssh", "workdir")}
    names, dry_run = given.pop("names"), given.pop("dry_run")
    ray, resources = given.pop("ray"), given.pop("resources")
    spares = given.pop("spares") or ""
    hosts = named_hosts(parts["hosts"], parts["hostfile"])
    if ray is not None:
        if spares:
            raise click.UsageError("--spares are hosts for SSH: leave out --ray")
        hosts = _of_ray(ray, hosts, parts, given["num_workers"])
    elif resources is not None:
        raise click.UsageError("--resources is for a Ray cluster: --ray")
    if not hosts:
        for option, value in (("--python", parts["python"]), ("--workdir", parts["workdir"]),
                              ("--env", names), ("--dry-run", dry_run),
                              ("--spares", spares)):  # fmt: skip
            if value:
                raise click.UsageError(f"{option} is for other hosts; name them: -H a:2,b:3")
        return {"remote": None}
    if given.get("workers") is not None or given.get("scheduler"):
        raise click.UsageError(
            "--workers and --scheduler are for a launcher on each host, not -H or --ray"
        )
    ranked = give_ranks(hosts, given["num_workers"])
    given["num_workers"] = ranked[-1].ranks.stop
    source = click.get_current_context().get_parameter_source("host")
    is_named = source is not ParameterSource.DEFAULT
    return {
        "remote": remote_job(
            ranked,
            *(parts[name] for name in ("python", "ssh", "workdir")),
            names=names,
            dry_run=dry_run,
            address=given["host"] if is_named else "",
            ray=ray,
            resources=resources,
            spares=_read_spares(spares, [name for name, _ in hosts]),
        )
    }


def _read_spares(text: str, taken: Sequence[str]) -> tuple[JobHost, ...]:
    """Hosts without workers.

    Raises:
        click.BadParameter: One is no host, or has workers already.
    """
    names = [name for name, _ in read_hosts(text, "--spares")] if text else []
    for name in names:
        if name in taken:
            raise click.BadParameter(f"{name} has workers already", param_hint="--spares")
    return tuple(JobHost(name, range(0)) for name in names)


def _of_ray(
    address: str, hosts: list[tuple[str, int]], parts: Mapping[str, Any], num_workers: int | None
) -> list[tuple[str, int]]:
    """A place for each worker of a job on a Ray cluster, which has names once it is there.

    Raises:
        click.UsageError: The options name something else, too.
    """
    if click.get_current_context().params.get("bind"):
        raise click.UsageError("--bind is not for --ray: Ray counts cores, and does not name them")
    if hosts or parts["python"] or parts["ssh"] != "ssh":
        raise click.UsageError("--ray has nodes of its own: leave out -H, --python and --ssh")
    if address and not _CLUSTER.fullmatch(address):
        raise click.UsageError(
            f"--ray {address}: no address of a cluster (HOST:PORT); without one, write --ray "
            f"before another option"
        )
    if num_workers is None:
        raise click.UsageError("Missing option '-n' / '--num-workers': how many workers --ray has")
    return [(f"actor-{rank}", 1) for rank in range(num_workers)]


def travelling(environ: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """The variables that processes on other hosts get from here.

    Raises:
        click.BadParameter: One of ``names`` is not set here.
    """
    found = {
        name: value
        for name, value in environ.items()
        if (name.startswith(("MS_", "GS_")) and name not in _STAYS) or name in _TRAVELS
    }
    for one in names:
        name, is_given, value = one.partition("=")
        if not is_given and name not in environ:
            raise click.BadParameter(f"{name} is not set here", param_hint="--env")
        found[name] = value if is_given else environ[name]
    return found
