"""The command ``graphsplit``. It starts fast: nothing here imports torch."""

from __future__ import annotations

import os

import click

from graphsplit.cli.certs import certs
from graphsplit.cli.check import check
from graphsplit.cli.doctor import doctor
from graphsplit.cli.job import SCRIPT_SETTINGS, run_job
from graphsplit.cli.launch.request import JobOptions
from graphsplit.cli.manifest import manifest
from graphsplit.cli.ray.run import run_on_ray
from graphsplit.cli.ssh.options import RemoteJob, run_options
from graphsplit.cli.ssh.run import run_on_hosts
from graphsplit.cli.status import status
from graphsplit.cli.trace import trace


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="graphsplit")
def main() -> None:
    """Run one PyTorch model, cut into a program per worker, as if in one process."""


main.add_command(certs)
main.add_command(check)
main.add_command(doctor)
main.add_command(manifest)
main.add_command(status)
main.add_command(trace)


@main.command(context_settings=SCRIPT_SETTINGS)
@run_options
@click.pass_context
def run(context: click.Context, options: JobOptions, *, remote: RemoteJob | None) -> None:
    """Start a scheduler and N workers of SCRIPT: here, with -H on others, or with --ray on Ray.

    Every output line is prefixed by its process. Ctrl-C ends all. When a process fails, the
    others get 5 seconds to name the cause, then they are ended; the exit status is that of the
    first failure (128+N for signal N).

    Examples: graphsplit run -n 5 train.py --epochs 3

              graphsplit run -H a:2,b:3 train.py --epochs 3

              graphsplit run --ray -n 5 train.py --epochs 3
    """
    if remote is not None and remote.ray is not None:
        context.exit(run_on_ray(options, remote, os.environ))
    if remote is not None:
        context.exit(run_on_hosts(options, remote, os.environ))
    context.exit(run_job(options, os.environ))
