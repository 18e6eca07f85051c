"""A function on workers of a Ray cluster: ``gs.launch`` over the nodes that Ray has.

``graphsplit run --ray`` does the same for a script. Every node needs ``pip install
'graphsplit[ray]'``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from graphsplit.cli.call import cause_of
from graphsplit.cli.job import terminal
from graphsplit.cli.launch.request import CallAnswer, JobOptions
from graphsplit.cli.ray.run import RayActors, ray_actors, supervise_actors, wanted_resources
from graphsplit.cli.ssh.agent import FIRST_KEPT
from graphsplit.cli.ssh.client import HostError
from graphsplit.cli.ssh.options import RemoteJob
from graphsplit.cli.ssh.run import JobStart
from graphsplit.errors import ConfigurationError
from graphsplit.launching import call, outcome
from graphsplit.launching.launch import WORKER, check_call, results_of
from graphsplit.launching.outcome import Raised, Returned

_INTERRUPTED = 130


def run(
    fn: Callable[..., Any],
    workers: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    address: str = "",
    resources: str | Path | None = None,
    restarts: int = 0,
    log_dir: str | Path | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on workers of a Ray cluster, and wait for their results.

    Each worker is a process beside an actor, and the actors are in one placement group. Each has
    joined the job when ``fn`` begins, with the caller's random generators. Ctrl-C ends all.

    Args:
        fn: The function. It reaches the workers with all that it uses, by ``cloudpickle``, through
            Ray.
        workers: How many.
        args: Its arguments, the same on every worker.
        kwargs: Its arguments by name.
        address: The cluster; empty: the one that this process is connected to, else the one that
            Ray finds, else a new one on this machine.
        resources: A YAML file that says what each worker takes; None: one CPU each.
        restarts: How often to start again what was lost, as ``graphsplit run --restarts``.
        log_dir: A folder where each process's output is written as well.

    Returns:
        What ``fn`` returned on each worker, in the order of ranks, as ``gs.launch`` does.

    Raises:
        ConfigurationError: An argument is wrong, Ray is not there, or the cluster has not enough.
        Exception: The root cause, where ``fn`` raised on a worker.
        JobFailedError: A worker was lost.
    """
    check_call(fn, workers, None, restarts, called="graphsplit.integrations.ray.run")
    wanted = call.LaunchedCall(fn, tuple(args), dict(kwargs or {}))
    options = _options(workers, restarts, log_dir)
    file = None if resources is None else Path(resources)
    remote = RemoteJob((), "", (), os.getcwd(), ray=address, resources=file)
    body = call.pickled(wanted)
    try:
        start = JobStart.of(options, remote, os.environ)
        with ray_actors(address, wanted_resources(remote, workers), body) as actors:
            ended = supervise_actors(options, remote, start, actors, terminal())
            found = [_result(actors, rank) for rank in range(workers)]
    except click.ClickException as error:
        raise ConfigurationError(error.message) from None
    except (HostError, OSError) as error:
        raise ConfigurationError(str(error)) from None
    if ended.status == _INTERRUPTED:
        raise KeyboardInterrupt
    return results_of(CallAnswer(cause_of(ended)), found, wanted)


def _options(workers: int, restarts: int, log_dir: str | Path | None) -> JobOptions:
    """A job of workers that call what their agents have been given."""
    return JobOptions(
        num_workers=workers,
        log_dir=None if log_dir is None else Path(log_dir),
        script=Path(WORKER),
        arguments=(str(FIRST_KEPT), *[str(FIRST_KEPT + 1)] * workers),
        restarts=restarts,
        as_module=True,
    )


def _result(actors: RayActors, rank: int) -> Returned | Raised | None:
    try:
        found = bytearray(actors.ray.get(actors.handles[rank].result.remote()))
    except actors.ray.exceptions.RayError:
        return None  # the actor was lost, and the verdict says so
    return outcome.read(torch.frombuffer(found, dtype=torch.uint8)) if found else None
