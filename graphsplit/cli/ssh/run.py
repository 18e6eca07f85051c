"""``graphsplit run -H``: one supervisor here, and the processes on other hosts."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import click

from graphsplit.cli.job import read_restarts, shares_of, terminal
from graphsplit.cli.launch.console import Console
from graphsplit.cli.launch.ending import SCHEDULER
from graphsplit.cli.launch.environment import ChildSpec, job_children
from graphsplit.cli.launch.request import JobOptions
from graphsplit.cli.launch.supervise import Restarts, say, supervise
from graphsplit.cli.launch.verdict import JobVerdict
from graphsplit.cli.ssh import frames
from graphsplit.cli.ssh.client import AgentClient, HostError, SshClient
from graphsplit.cli.ssh.command import agent_command
from graphsplit.cli.ssh.connection import HostConnection, RemoteChild
from graphsplit.cli.ssh.facts import problems_of, remarks_on
from graphsplit.cli.ssh.hosts import JobHost
from graphsplit.cli.ssh.meeting import answers, connected
from graphsplit.cli.ssh.options import RemoteJob, travelling
from graphsplit.cli.ssh.places import Places
from graphsplit.cli.ssh.preparation import (
    get_ready,
    reach_each_other,
    scheduler_address,
    setups,
)
from graphsplit.cli.tokens import kept_token
from graphsplit.errors import ConfigurationError
from graphsplit.security.private_files import read_private_file
from graphsplit.settings import NODE_TIMEOUT_S, is_label, silence_within

_LEAST_SILENCE_S = 10.0


@dataclass(frozen=True)
class JobStart:
    """All that processes on other hosts get from the environment here.

    Attributes:
        variables: Their variables, the job's secret among them if the user has made one.
        restarts: How often to start again what was lost.
        silence_s: How long a host, or the launcher, may be silent.
    """

    variables: Mapping[str, str] = field(repr=False)
    restarts: Restarts
    silence_s: float

    @classmethod
    def of(cls, options: JobOptions, remote: RemoteJob, environ: Mapping[str, str]) -> JobStart:
        """Read it.

        Raises:
            click.ClickException: A variable or an option makes no sense.
        """
        variables = {**travelling(environ, remote.names), **_token(environ)}
        return cls(variables, read_restarts(options.restarts, environ), _silence_s(environ))


def run_on_hosts(options: JobOptions, remote: RemoteJob, environ: Mapping[str, str]) -> int:
    """Run a job on other hosts, and say how it ended; its exit status.

    Raises:
        click.ClickException: It could not be started; names each host at fault, and the fix.
    """
    start = JobStart.of(options, remote, environ)
    if remote.dry_run:
        click.echo(_dry_run(options, remote, start.variables))
        return 0
    names = [host.name for host in (*remote.hosts, *remote.spares)]
    if remote.spares and not (start.restarts.processes or start.restarts.jobs):
        raise click.BadParameter(
            "a worker of a lost host is started on another one only with --restarts",
            param_hint="--spares",
        )

    def client(name: str) -> SshClient:
        return SshClient(remote.ssh, name, remote.python)

    with told_to_the_user(), connected(names, client, start.silence_s) as hosts:
        console = terminal()
        return say(console, supervise_hosts(options, remote, start, hosts, console))


@contextmanager
def told_to_the_user() -> Iterator[None]:
    """Have hosts that cannot take part end the command.

    Raises:
        click.ClickException: Some cannot.
    """
    try:
        yield
    except HostError as error:
        raise click.ClickException(str(error)) from None


def supervise_hosts(
    options: JobOptions,
    remote: RemoteJob,
    beginning: JobStart,
    hosts: Mapping[str, HostConnection],
    console: Console,
    open_again: Callable[[str], AgentClient] | None = None,
) -> JobVerdict:
    """Run a job on hosts that are connected, and return how it ended.

    ``open_again`` opens a new way to a lost host, by its name, where there can be one.

    Raises:
        HostError: Some cannot take part; names each, and the fix.
    """
    address, port, wanted, remarks = _prepared(options, remote, hosts, beginning)
    for line in remarks:
        console.say(f"graphsplit: {line}")
    specs = _specs(options, beginning.variables, address, port)
    console.say(f"graphsplit: starting {_in_words(remote.hosts)}")
    host_of = {rank: host for host in remote.hosts for rank in host.ranks}
    renewed = ExitStack()

    def renew(host: JobHost) -> HostConnection:
        assert open_again is not None
        client = open_again(host.name)
        found = HostConnection(host.name, client, beginning.silence_s)
        renewed.enter_context(closing(found)).begin_anew(wanted[host.name])
        return found

    places = Places(remote.hosts, remote.spares, hosts, renew if open_again else None)

    def start(spec: ChildSpec, _: Sequence[str], kept: Sequence[int]) -> RemoteChild:
        if spec.name == SCHEDULER:
            return hosts[host_of[0].name].start(spec, kept)
        rank = int(spec.name.split()[-1])
        host = host_of[rank]
        share = shares_of(host.ranks)[rank] if options.bind else None
        labels = tuple(filter(is_label, host.labels or (host.name,)))
        spec = replace(spec, share=share, labels=labels)
        return places.find(host).start(spec, kept, partial(places.has_place, host))

    with renewed, kept_token(specs[0].variables, address, port):
        return supervise(
            specs,
            (),
            console=console,
            log_dir=options.log_dir,
            restarts=beginning.restarts,
            start=start,
        )


def _token(environ: Mapping[str, str]) -> dict[str, str]:
    """The secret of the job, if the user has made one: its file is on this machine alone."""
    path = environ.get("GS_JOB_TOKEN_FILE", "").strip()
    if not path:
        token = environ.get("GS_JOB_TOKEN", "")
        return {"GS_JOB_TOKEN": token} if token else {}
    try:
        content = read_private_file("GS_JOB_TOKEN_FILE", path)
    except ConfigurationError as error:
        raise click.ClickException(str(error)) from None
    return {"GS_JOB_TOKEN": content.decode("ascii", errors="replace").strip()}


def _silence_s(environ: Mapping[str, str]) -> float:
    """How long a host or the launcher may be silent; what is no number is told by the processes."""
    try:
        found = float(environ.get("MS_NODE_TIMEOUT", "") or NODE_TIMEOUT_S)
    except ValueError:
        found = NODE_TIMEOUT_S
    return max(_LEAST_SILENCE_S, silence_within(found))


def _prepared(
    options: JobOptions,
    remote: RemoteJob,
    hosts: Mapping[str, HostConnection],
    start: JobStart,
) -> tuple[str, int, Mapping[str, frames.Setup], list[str]]:
    """Where the scheduler will listen, what each host does, and what the user should know of them.

    Raises:
        HostError: Some cannot be reached, have no part in one job, or have not what it needs.
    """
    facts, problems = answers(hosts, frames.Facts)
    _require_none(problems + problems_of(facts))
    address = scheduler_address(facts, remote.address)
    wanted = setups(options, remote, address, start.silence_s, start.variables)
    ready, problems = get_ready(hosts, wanted)
    _require_none(problems)
    _require_none(reach_each_other(hosts, wanted, ready)[1])
    for connection in hosts.values():
        connection.watch()
    remarks = remarks_on(facts, late_s={name: one.late_s for name, one in hosts.items()})
    port = ready[remote.hosts[0].name].port
    moved = {
        name: replace(one, job=replace(one.job, port=port), has_scheduler=False)
        for name, one in wanted.items()
    }
    return address, port, moved, remarks


def _require_none(problems: Sequence[str]) -> None:
    if problems:
        raise HostError("\n".join(problems))


def _specs(
    options: JobOptions, base: Mapping[str, str], address: str, port: int
) -> tuple[ChildSpec, ...]:
    return job_children(
        base,
        num_workers=options.num_workers,
        host=address,
        port=port,
        certificates=options.certificates,
        has_defaults=False,
    )


def _in_words(hosts: Sequence[JobHost]) -> str:
    count = hosts[-1].ranks.stop
    each = ", ".join(f"{_ranks(host.ranks)} on {host.name}" for host in hosts)
    return f"{count} worker{'s' * (count > 1)}: {each}"


def _ranks(ranks: range) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _dry_run(options: JobOptions, remote: RemoteJob, base: Mapping[str, str]) -> str:
    """The commands that would be run, in words. The secret is not shown."""
    module = ["-m"] if options.as_module else []
    script = [remote.python, *module, str(options.script), *options.arguments]
    secret = "" if base.get("GS_INSECURE") else ", GS_JOB_TOKEN (a secret)"
    shown = [f"{name}={shlex.quote(base[name])}" for name in sorted(base) if name != "GS_JOB_TOKEN"]
    lines = []
    spares = [f"{host.name}: spare, for workers of a host that is lost" for host in remote.spares]
    for number, host in enumerate(remote.hosts):
        first = "the scheduler and " if number == 0 else ""
        what = f"worker{'s' * (len(host.ranks) > 1)} {_ranks(host.ranks)}"
        lines += [
            f"{host.name}: {first}{what} of {options.num_workers}",
            f"  {shlex.join(agent_command(remote.ssh, host.name, remote.python))}",
            f"  there, in {remote.workdir}: {shlex.join(script)}",
            f"  over standard input: {', '.join(shown)}{secret}".replace(": , ", ": "),
        ]
    return "\n".join([*lines, *spares])
