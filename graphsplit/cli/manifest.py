"""The command ``graphsplit manifest``: what a cluster manager is given to start a job, as text."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

import click

from graphsplit.settings import FAIL_FAST, RESTART, WAIT_REJOIN, recovery_policy

_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")  # and room for a pod's index behind it


@click.group()
def manifest() -> None:
    """Print what a cluster manager is given to start a job."""


@manifest.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--num-workers",
    type=click.IntRange(min=1, max=1024),
    required=True,
    help="How many workers the job has: one in each pod.",
)
@click.option("--name", default="", help="The name of the job.  [default: that of the script]")
@click.option(
    "--image",
    default="",
    help="The image, which holds graphsplit and the script.  [default: NAME:latest]",
)
@click.option("--port", type=click.IntRange(1024, 65535), default=8118, show_default=True,
              help="The scheduler's port.")  # fmt: skip
@click.option("--cpu", default="1", show_default=True, help="The cores of each pod.")
@click.option("--memory", default="2Gi", show_default=True, help="The memory of each pod.")
@click.option("--restarts", type=click.IntRange(min=0, max=1000), default=0, show_default=True,
              help="How often each pod is started again; see GS_RECOVERY.")  # fmt: skip
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def k8s(
    *,
    num_workers: int,
    name: str,
    image: str,
    port: int,
    cpu: str,
    memory: str,
    restarts: int,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Print an Indexed Job with a headless Service and a Secret, for Kubernetes.

    SCRIPT is a path in the image. The Secret is new each time. GS_RECOVERY of the environment here
    is that of the job: restart and wait_rejoin need --restarts, and what is lost then is started
    again by Kubernetes (1.29 or later).

    Example: graphsplit manifest k8s -n 3 --image registry/train:7 train.py | kubectl apply -f -
    """
    name = name or re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")
    if not _LABEL.fullmatch(name):
        raise click.UsageError(
            f"{name!r} is no name of a job; expected at most 52 of a-z, 0-9 and -, a letter first\n"
            f"  Fix: --name NAME"
        )
    recovery = recovery_policy(os.environ)
    if recovery == FAIL_FAST and restarts:
        raise click.UsageError(
            "--restarts: a job that fails fast starts nothing again\n"
            "  Fix: set GS_RECOVERY=wait_rejoin, GS_RECOVERY=go_on or GS_RECOVERY=restart"
        )
    if recovery in (RESTART, WAIT_REJOIN) and not restarts:
        raise click.UsageError(
            f"GS_RECOVERY={recovery} waits for pods that Kubernetes would not start again\n"
            f"  Fix: say how often it does: --restarts 3"
        )
    # Imported here: the other commands need no YAML.
    from graphsplit.launchers.kubernetes import KubernetesJob, kubernetes_text

    job = KubernetesJob(
        name,
        num_workers,
        image or f"{name}:latest",
        ("python3", script, *arguments),
        port,
        cpu,
        memory,
        secrets.token_urlsafe(32),
        recovery,
        restarts,
    )
    click.echo(kubernetes_text(job), nl=False)
