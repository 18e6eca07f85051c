"""``graphsplit trace``: run a script, and show where the time of its training steps goes."""

from __future__ import annotations

import os
from pathlib import Path

import click

from graphsplit.cli.job import SCRIPT_SETTINGS, job_options, run_job
from graphsplit.cli.launch.request import JobOptions


@click.command(context_settings=SCRIPT_SETTINGS)
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("trace"),
    show_default=True,
    help="The folder for what is found.",
    metavar="DIR",
)
@job_options
@click.pass_context
def trace(context: click.Context, options: JobOptions, *, output: Path) -> None:
    """Run SCRIPT as 'graphsplit run' does, and show where the time of a step goes.

    The script runs to its end. Two training steps warm up, the next ten are measured, and the
    step that follows from their costs is simulated. Writes to DIR: trace.json (for
    ui.perfetto.dev), timeline.svg, summary.txt and summary.json; prints the summary.

    Example: graphsplit trace -n 5 -o trace train.py --epochs 1
    """
    summary = output / "summary.txt"
    for old in (summary, output / "summary.json"):
        old.unlink(missing_ok=True)
    status = run_job(options, {**os.environ, "GS_TRACE": str(output.absolute())})
    if summary.is_file():
        click.echo(f"\n{summary.read_text()}\nPictures in {output}: timeline.svg, trace.json")
    elif status == 0:
        raise click.ClickException(
            f"{options.script} ended, and nothing was measured\n"
            "  Fix: train ten or more steps of a graphsplit.Model, with batches of one size."
        )
    context.exit(status)
