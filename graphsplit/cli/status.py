"""The command ``graphsplit status``: what is going on in a job."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace

import click

from graphsplit.cli.tokens import find_token, local_jobs
from graphsplit.errors import ClusterError, ConfigurationError
from graphsplit.security.names import SCHEDULER, WORKER
from graphsplit.security.options import SecurityOptions
from graphsplit.security.protection import Protection, load_protection
from graphsplit.settings import read_security

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^:\[\]]+):(?P<port>[0-9]{1,5})")


@click.command()
@click.argument("address", metavar="[HOST:PORT]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each job.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0.1, max=600),
    default=10.0,
    show_default=True,
    help="Seconds to wait for the answer.",
)
def status(*, address: str | None, as_json: bool, timeout_s: float) -> None:
    """Show who is in a job, where each worker is, and what it waits for.

    Asks the scheduler at HOST:PORT, by default the one that MS_SCHED_HOST and MS_SCHED_PORT name;
    without either, those of all jobs that 'graphsplit run' started on this machine.

    Where the job has a token or certificates, this command needs them too (GS_JOB_TOKEN,
    GS_JOB_TOKEN_FILE, GS_TLS_CA, GS_TLS_CERT, GS_TLS_KEY); the token of a job that 'graphsplit
    run' started on this machine is found by itself.

    Example: graphsplit status 10.0.0.1:8118
    """
    # Imported here: the other commands need no gRPC.
    from graphsplit.cluster.status.client import fetch_status
    from graphsplit.cluster.status.table import status_object, status_table

    shown, errors = [], list[Exception]()
    for host, port in _addresses(address, os.environ):
        try:
            protection = _protection(os.environ, host, port)
            found = fetch_status(host, port, protection, timeout_s=timeout_s)
        except (ClusterError, ConfigurationError) as error:
            errors.append(error)
            continue
        shown.append(json.dumps(status_object(found)) if as_json else status_table(found))
    if not shown:  # of several jobs one may begin or end just now
        raise click.ClickException(str(errors[0])) from errors[0]
    click.echo(("\n" if as_json else "\n\n").join(shown))


def _addresses(given: str | None, environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """The schedulers to ask."""
    host = environ.get("MS_SCHED_HOST", "").strip() or "127.0.0.1"
    port = environ.get("MS_SCHED_PORT", "").strip()
    text = given or (f"{host}:{port}" if port else "")
    if not text:
        if jobs := local_jobs():
            return jobs
        raise click.ClickException(
            "no job that 'graphsplit run' started runs on this machine\n"
            "  Fix: name the scheduler of a job elsewhere: graphsplit status 10.0.0.1:8118, or set "
            "MS_SCHED_HOST and MS_SCHED_PORT."
        )
    found = _ADDRESS.fullmatch(text)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        raise click.BadParameter(
            f"expected an address such as 10.0.0.1:8118; found {text!r}",
            param_hint="HOST:PORT",
        )
    return [(found["host"].removeprefix("[").removesuffix("]"), int(found["port"]))]


def _protection(environ: Mapping[str, str], host: str, port: int) -> Protection:
    options = read_security(environ)
    if not options.job_token and not options.job_token_file:
        options = replace(options, job_token=find_token(host, port))
    if not options.has_tls:
        return load_protection(options, role=WORKER)
    return _with_any_certificate(options)


def _with_any_certificate(options: SecurityOptions) -> Protection:
    """Whatever role the certificate is for: who holds one of the job's may ask."""
    try:
        return load_protection(options, role=WORKER)
    except ConfigurationError as error:
        try:
            return load_protection(options, role=SCHEDULER)
        except ConfigurationError:
            raise error from None
