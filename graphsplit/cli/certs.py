"""The command ``graphsplit certs``: certificates for a job's processes, for a start or a test."""

from __future__ import annotations

from pathlib import Path

import click

from graphsplit.errors import ConfigurationError


@click.command()
@click.option(
    "-n",
    "--num-workers",
    type=click.IntRange(min=1, max=1024),
    required=True,
    help="How many workers the job has, beside one scheduler.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    metavar="DIR",
    help="The folder to fill. What is there already is kept.",
)
@click.option(
    "--hosts",
    default="",
    metavar="NAME,...",
    help="Names and addresses of machines, for other programs that check them; graphsplit "
    "checks role and rank alone.",
)
@click.option(
    "--days",
    type=click.IntRange(min=1, max=3650),
    default=30,
    show_default=True,
    help="How long the certificates are valid.",
)
def certs(*, num_workers: int, out: Path, hosts: str, days: int) -> None:
    """Make an authority, and a certificate for the scheduler and each worker.

    Give each process ca.pem and its own two files, and nobody ca.key: whoever has it can make
    more. Run it again with a larger -n for more workers of the same authority.

    Example: graphsplit certs --out certs -n 5
    """
    # Imported here: the other commands need no cryptography.
    from graphsplit.security.issue import fill_folder

    names = [host.strip() for host in hosts.split(",") if host.strip()]
    try:
        made = fill_folder(out, num_workers=num_workers, hosts=names, days=days)
    except (ConfigurationError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if not made:
        click.echo(f"{out} holds everything already")
    else:
        click.echo(f"made in {out}: {', '.join(made)}")
