"""The options and steps of every command that starts a job on this machine."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from graphsplit.cli.launch.children import Child, StartChild
from graphsplit.cli.launch.console import Console, Sink
from graphsplit.cli.launch.cores import Share, bind
from graphsplit.cli.launch.environment import ChildSpec, job_children
from graphsplit.cli.launch.hosts import HostPart, read_part, shared_variables
from graphsplit.cli.launch.request import JobOptions
from graphsplit.cli.launch.supervise import Restarts, say, supervise
from graphsplit.cli.launch.verdict import JobVerdict
from graphsplit.cli.launch.warm import WarmStart, can_fork, may_fork, start_worker
from graphsplit.cli.tokens import kept_token
from graphsplit.launchers.ports import find_free_port
from graphsplit.settings import FAIL_FAST, GO_ON, RESTART, WAIT_REJOIN, recovery_policy

# What follows the script belongs to the script, options included.
SCRIPT_SETTINGS = {"allow_interspersed_args": False}
PORT = click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="The scheduler's port (MS_SCHED_PORT).  [default: a free one]",
)
CERTIFICATES = click.option(
    "--certs",
    "certificates",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder made by `graphsplit certs`: use mutual TLS.",
    metavar="DIR",
)
_OPTIONS = (
    click.option(
        "-n",
        "--num-workers",
        type=click.IntRange(min=1),
        help="How many workers the job has, beside one scheduler.",
    ),
    PORT,
    click.option(
        "--host",
        default="127.0.0.1",
        show_default=True,
        help="The address that the scheduler listens on (MS_SCHED_HOST).",
    ),
    click.option(
        "--log-dir",
        type=click.Path(file_okay=False, path_type=Path),
        help="Also write each process's output to DIR/scheduler.log, DIR/worker_0.log ...",
        metavar="DIR",
    ),
    CERTIFICATES,
)
_RESTARTS = click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often to start again what was lost: a killed process under "
    "GS_RECOVERY=wait_rejoin or go_on, the whole job under GS_RECOVERY=restart.",
)
_BIND = click.option(
    "--bind",
    is_flag=True,
    help="Keep each worker on cores of its own: those of a host are shared out in order of ranks.",
)
_MODULE = click.option(
    "-m",
    "as_module",
    is_flag=True,
    help="SCRIPT is the name of a module, as of `python -m`: pkg.train.",
)
_FRESH = click.option(
    "--fresh",
    is_flag=True,
    help="Start every process as `python SCRIPT`. By default workers are forked from one "
    "process that has imported torch, unless SCRIPT speaks of environment variables.",
)
_HOSTS = (
    click.option(
        "--workers",
        type=click.IntRange(min=1),
        help="How many of the workers to start here, where other hosts start the others.  "
        "[default: all]",
    ),
    click.option(
        "--first-rank",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="The rank of the first worker that is started here.",
    ),
    click.option(
        "--scheduler",
        default="",
        metavar="HOST:PORT",
        help="Where the scheduler listens, which the launcher of another host starts.",
    ),
)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SCRIPT = (
    click.argument("script", type=click.Path(path_type=Path)),
    click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]..."),
)


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a job; it is called with ``JobOptions``, then with its own."""
    return _with_options(command, (*_OPTIONS, *_HOSTS, _RESTARTS, _BIND, _FRESH, _MODULE, *_SCRIPT))


def single_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """As ``job_options``, for a job of which nothing is started again."""
    return _with_options(command, (*_OPTIONS, _MODULE, *_SCRIPT))


def _with_options(
    command: Callable[..., None], options: Sequence[Callable[..., Any]]
) -> Callable[..., None]:
    names = list(JobOptions.__annotations__)

    @wraps(command)
    def call(**given: Any) -> None:
        parts = {name: given.pop(name) for name in names if name in given}
        if str(parts["script"]) == "-m" and parts["arguments"]:  # behind "--", as python has it
            module, *rest = parts["arguments"]
            parts |= {"as_module": True, "script": Path(module), "arguments": tuple(rest)}
        if not parts.get("as_module") and given.get("remote") is None:
            _check_file(parts["script"])
        parts |= _part_of(parts, given)
        command(JobOptions(**parts), **given)

    found: Callable[..., None] = call
    for option in reversed(options):
        found = option(found)
    return found


def _part_of(parts: Mapping[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Changes by the options of a job on several hosts, which are taken out of ``given``."""
    part = read_part(
        parts["num_workers"],
        given.pop("workers", None),
        given.pop("first_rank", 0),
        given.pop("scheduler", ""),
    )
    changed = {"num_workers": part.num_workers, "part": part}
    if part.scheduler is None:
        return changed
    if parts.get("restarts"):
        raise click.BadParameter(
            "only the launcher that starts the scheduler knows what was lost",
            param_hint="--restarts",
        )
    return {**changed, "host": part.scheduler[0], "port": part.scheduler[1]}


def _check_file(script: Path) -> None:
    context = click.get_current_context()
    parameter = next(one for one in context.command.params if one.name == "script")
    _FILE.convert(str(script), parameter, context)


def terminal() -> Console:
    """A console on the launcher's own output."""
    return Console(Sink.of(sys.stdout.buffer), Sink.of(sys.stderr.buffer), clock=time.monotonic)


def run_job(
    options: JobOptions,
    environ: Mapping[str, str],
    *,
    console: Console | None = None,
    **more: Any,
) -> int:
    """As ``supervise_job``, and say how it ended; the job's exit status."""
    console = console or terminal()
    return say(console, supervise_job(options, environ, console=console, **more))


def supervise_job(
    options: JobOptions,
    environ: Mapping[str, str],
    *,
    console: Console | None = None,
    own: Callable[[str], Mapping[str, str]] = lambda name: {},
    limit_s: float = math.inf,
    start: StartChild | None = None,
    interrupts: list[signal.Signals] | None = None,
) -> JobVerdict:
    """Start a scheduler and workers, and wait for their end.

    Args:
        options: The processes to start.
        environ: The environment that they start from.
        console: Shows their output; None: on this terminal.
        own: Further variables of one process, by its name.
        limit_s: How long they may take.
        start: How to start each; None: as ``starting`` does, for this job alone.
        interrupts: Takes the signals that ask for the job's end, for a ``start`` that lasts.
    """
    port = _port_of(options)
    part = options.part or HostPart(options.num_workers, range(options.num_workers))
    own_address = shared_variables(part, environ, options.host, port, options.certificates)
    specs = job_children(
        {**environ, **own_address},
        num_workers=options.num_workers,
        host=options.host,
        port=port,
        certificates=options.certificates,
        ranks=part.ranks,
        has_scheduler=part.scheduler is None,
        shares=shares_of(part.ranks) if options.bind else {},
    )
    specs = tuple(replace(s, variables={**s.variables, **own(s.name)}) for s in specs)
    restarts = read_restarts(options.restarts, environ)
    console = console or terminal()
    interrupts = [] if interrupts is None else interrupts
    begins = starting(options, console.say, console.turn, interrupts)
    with (
        kept_token(specs[0].variables, options.host, port),
        nullcontext(start) if start is not None else begins as start,
    ):
        count = len(part.ranks)
        of_all = "" if part.is_whole else f" of {part.num_workers}, the first is {part.ranks[0]}"
        console.say(f"graphsplit: starting {count} worker{'s' * (count > 1)}{of_all}")
        return supervise(
            specs,
            script_command(options),
            console=console,
            log_dir=options.log_dir,
            restarts=restarts,
            limit_s=limit_s,
            start=start,
            interrupts=interrupts,
        )


def _port_of(options: JobOptions) -> int:
    if options.port is not None:
        return options.port
    try:
        return find_free_port(options.host)
    except OSError as error:
        raise click.BadParameter(
            f"expected an address of this machine, but cannot listen on {options.host!r} ({error})",
            param_hint="--host",
        ) from error


def shares_of(ranks: Sequence[int]) -> dict[int, Share]:
    """The part of a host's cores of each of its workers, by rank."""
    return {rank: (index, len(ranks)) for index, rank in enumerate(ranks)}


@contextmanager
def starting(
    options: JobOptions,
    say: Callable[[str], None],
    turn: Callable[[str], None],
    interrupts: Sequence[signal.Signals],
) -> Iterator[StartChild]:
    """How processes are started here: by fork where the script allows it. See ``WarmStart``."""
    with _unbound(options, say, turn, interrupts) as start:

        def begin(spec: ChildSpec, command: Sequence[str], kept: Sequence[int]) -> Child:
            child = start(spec, command, kept)
            if spec.share is not None:
                bind(child.pid, spec.share)
            return child

        yield begin


@contextmanager
def _unbound(
    options: JobOptions,
    say: Callable[[str], None],
    turn: Callable[[str], None],
    interrupts: Sequence[signal.Signals],
) -> Iterator[StartChild]:
    script = options.script
    is_plain = options.fresh or options.as_module
    if not (can_fork() if options.called else not is_plain and may_fork(script)):
        yield partial(start_worker, options.kept)
        return
    warm = WarmStart(script, say, turn, interrupts=interrupts, kept=options.kept)
    try:
        yield warm.start
    finally:
        warm.close()


def script_command(options: JobOptions) -> list[str]:
    """The command that every process runs."""
    module = options.called or (str(options.script) if options.as_module else "")
    script = ["-m", module] if module else [str(options.script)]
    return [sys.executable, *script, *options.arguments]


def read_restarts(count: int, environ: Mapping[str, str]) -> Restarts:
    """The meaning of ``--restarts`` under the policy that the processes will read."""
    policy = recovery_policy(environ)
    if count and policy == FAIL_FAST:
        raise click.BadParameter(
            "a job that fails fast starts nothing again\n  Fix: set GS_RECOVERY=wait_rejoin (or "
            "MS_ENABLE_RECOVERY=1), GS_RECOVERY=go_on or GS_RECOVERY=restart",
            param_hint="--restarts",
        )
    return Restarts(
        processes=count if policy in (WAIT_REJOIN, GO_ON) else 0,
        jobs=count if policy == RESTART else 0,
        goes_on=policy == GO_ON,
        with_scheduler=bool(environ.get("MS_RECOVERY_PATH", "").strip()),
    )
