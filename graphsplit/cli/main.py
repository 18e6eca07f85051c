"""The command ``graphsplit``. It starts fast: nothing here imports torch."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from graphsplit.cli.console import Console, Sink
from graphsplit.cli.environment import find_free_port, job_children
from graphsplit.cli.supervise import supervise

# What follows the script belongs to the script, options included.
_SCRIPT_SETTINGS = {"allow_interspersed_args": False}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="graphsplit")
def main() -> None:
    """Run one PyTorch model, cut into a program per worker, as if in one process."""


@main.command(context_settings=_SCRIPT_SETTINGS)
@click.option(
    "-n",
    "--num-workers",
    type=click.IntRange(min=1),
    required=True,
    help="How many workers to start, beside one scheduler.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="The scheduler's port (MS_SCHED_PORT).  [default: a free one]",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="The address that the scheduler listens on (MS_SCHED_HOST).",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also write each process's output to DIR/scheduler.log, DIR/worker_0.log ...",
    metavar="DIR",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
@click.pass_context
def run(
    context: click.Context,
    *,
    num_workers: int,
    port: int | None,
    host: str,
    log_dir: Path | None,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Start a scheduler and N workers of SCRIPT on this machine.

    Every output line is prefixed by its process. Ctrl-C ends all. When a process fails, the
    others get 5 seconds to name the cause, then they are ended; the exit status is that of the
    first failure (128+N for signal N).

    Example: graphsplit run -n 5 train.py --epochs 3
    """
    if port is None:
        try:
            port = find_free_port(host)
        except OSError as error:
            raise click.BadParameter(
                f"expected an address of this machine, but cannot listen on {host!r} ({error})",
                param_hint="--host",
            ) from error
    console = Console(Sink.of(sys.stdout.buffer), Sink.of(sys.stderr.buffer), clock=time.monotonic)
    specs = job_children(os.environ, num_workers=num_workers, host=host, port=port)
    command = [sys.executable, str(script), *arguments]
    context.exit(supervise(specs, command, console=console, log_dir=log_dir))
