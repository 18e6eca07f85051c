"""``graphsplit run --ray``: one supervisor here, and an actor with an agent for each worker.

Ray finds the nodes, starts the actors and ends them when this process has gone; all else is as
over SSH, and the same code.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from graphsplit.cli.job import terminal
from graphsplit.cli.launch.console import Console
from graphsplit.cli.launch.request import JobOptions
from graphsplit.cli.launch.supervise import say
from graphsplit.cli.launch.verdict import JobVerdict
from graphsplit.cli.ray.actor import AgentActor
from graphsplit.cli.ray.client import RayClient
from graphsplit.cli.ray.resources import DEFAULT, Resources, read_resources
from graphsplit.cli.ssh.client import HostError
from graphsplit.cli.ssh.hosts import JobHost
from graphsplit.cli.ssh.meeting import connected
from graphsplit.cli.ssh.options import RemoteJob
from graphsplit.cli.ssh.run import JobStart, supervise_hosts, told_to_the_user

PLACE_WITHIN_S = 60.0
_TRY_AGAIN_S = 1.0
_CALLS = 4  # of one actor at a time: one waits for its words, others bring it orders


@dataclass(frozen=True)
class RayActors:
    """The actors of a job.

    Attributes:
        ray: The library.
        start: Starts the actor of a rank.
        handles: Ray's handles of the actors, by rank.
        hosts: Their nodes and numbers, as hosts of the job.
    """

    ray: Any
    start: Callable[[int], Any]
    handles: list[Any]
    hosts: tuple[JobHost, ...]

    def client(self, name: str) -> RayClient:
        """The way to the agent of one."""
        return RayClient(self.ray, lambda: self.handles[self._rank(name)], f"actor {name}")

    def client_of_another(self, name: str) -> RayClient:
        """The way to the agent of one more actor, in the place of one that is lost."""
        return RayClient(self.ray, lambda: self._another(self._rank(name)), f"actor {name}")

    def _another(self, rank: int) -> Any:
        """An actor that is there. Ray still starts some on a node that has been lost just now."""
        until_s = time.monotonic() + PLACE_WITHIN_S
        while True:
            with contextlib.suppress(Exception):  # Ray may know that it has gone
                self.ray.kill(self.handles[rank])  # its agent may have gone alone
            self.handles[rank] = self.start(rank)
            left_s = max(1.0, until_s - time.monotonic())
            try:
                self.ray.get(self.handles[rank].__ray_ready__.remote(), timeout=left_s)
                return self.handles[rank]
            except self.ray.exceptions.RayError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(_TRY_AGAIN_S)

    def _rank(self, name: str) -> int:
        return [host.name for host in self.hosts].index(name)


def run_on_ray(options: JobOptions, remote: RemoteJob, environ: Mapping[str, str]) -> int:
    """Run a job on a Ray cluster, and say how it ended; its exit status.

    Raises:
        click.ClickException: It could not be started; says why, and the fix.
    """
    start = JobStart.of(options, remote, environ)
    wanted = wanted_resources(remote, options.num_workers)
    if remote.dry_run:
        click.echo(_dry_run(options, remote, wanted))
        return 0
    console = terminal()
    with told_to_the_user(), ray_actors(remote.ray or "", wanted) as actors:
        return say(console, supervise_actors(options, remote, start, actors, console))


def wanted_resources(remote: RemoteJob, num_workers: int) -> list[Resources]:
    """The resources of each worker, by rank.

    Raises:
        click.BadParameter: The file is not what it should be.
    """
    if remote.resources is None:
        return [DEFAULT] * num_workers
    return read_resources(remote.resources.read_text(), num_workers, str(remote.resources))


def supervise_actors(
    options: JobOptions,
    remote: RemoteJob,
    start: JobStart,
    actors: RayActors,
    console: Console,
) -> JobVerdict:
    """Run a job on actors, and return how it ended.

    Raises:
        HostError: Some cannot take part.
    """
    remote = replace(remote, hosts=actors.hosts)
    names = [host.name for host in actors.hosts]
    with connected(names, actors.client, start.silence_s) as hosts:
        again = actors.client_of_another
        return supervise_hosts(options, remote, start, hosts, console, open_again=again)


@contextlib.contextmanager
def ray_actors(address: str, wanted: Sequence[Resources], call: bytes = b"") -> Iterator[RayActors]:
    """Actors in a placement group of their own, which are gone at the end.

    Args:
        address: The cluster; empty: the one that Ray finds, or a new one on this machine.
        wanted: The resources of each, by rank.
        call: The function to call, where no script is run.

    Raises:
        HostError: There is no Ray, or no such cluster, or it has not enough.
    """
    ray = _library()
    was_there = ray.is_initialized()
    with contextlib.ExitStack() as stack:
        if not was_there:
            _connect(ray, address)
            stack.callback(ray.shutdown)
        group = ray.util.placement_group([dict(one) for one in wanted], strategy="PACK")
        stack.callback(ray.util.remove_placement_group, group)
        if not group.wait(PLACE_WITHIN_S):
            raise HostError(_too_little(ray, wanted))

        def start(rank: int) -> Any:
            handle = _actor_class(ray, group, rank, wanted[rank]).remote(call)
            stack.callback(ray.kill, handle)
            return handle

        hosts = tuple(
            JobHost(f"{node}/{rank}", range(rank, rank + 1), (node, *_named(wanted[rank])))
            for rank, node in _nodes(ray, group, len(wanted)).items()
        )
        yield RayActors(ray, start, [start(rank) for rank in range(len(wanted))], hosts)


def _named(resources: Resources) -> list[str]:
    """The resources that not every worker has, as names of who takes them."""
    return [name for name in resources if name not in ("CPU", "memory")]


def _library() -> Any:
    try:
        import ray
    except ImportError:
        raise HostError(
            "Ray is not installed here\n  Fix: pip install 'graphsplit[ray]', on every node"
        ) from None
    return ray


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(address=address or None, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise HostError(
            f"no Ray cluster at {address or 'the usual places'}: {error}\n"
            f"  Fix: start one (`ray start --head`), and name it: --ray ADDRESS:6379"
        ) from None


def _too_little(ray: Any, wanted: Sequence[Resources]) -> str:
    has = {name: amount for name, amount in ray.cluster_resources().items() if ":" not in name}
    total: dict[str, float] = {}
    for one in wanted:
        for name, amount in one.items():
            total[name] = total.get(name, 0.0) + amount
    return (
        f"the cluster has not given {len(wanted)} workers their resources within "
        f"{PLACE_WITHIN_S:g} s: they want {_in_words(total)}, and all of it has {_in_words(has)}\n"
        f"  Fix: ask for less (--resources FILE), add nodes, or end what runs (`ray status`)"
    )


def _in_words(resources: Resources) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(resources.items()))


def _actor_class(ray: Any, group: Any, rank: int, wanted: Resources) -> Any:
    others = {k: v for k, v in wanted.items() if k not in ("CPU", "GPU", "memory")}
    scheduling = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=rank
    )
    return ray.remote(AgentActor).options(
        num_cpus=wanted.get("CPU", 0.0),
        num_gpus=wanted.get("GPU", 0.0),
        memory=int(wanted.get("memory", 0)) or None,
        resources=others,
        scheduling_strategy=scheduling,
        max_concurrency=_CALLS,
    )


def _nodes(ray: Any, group: Any, count: int) -> dict[int, str]:
    """The address of each actor's node, by rank."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    bundles = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return {rank: addresses[bundles[rank]] for rank in range(count)}


def _dry_run(options: JobOptions, remote: RemoteJob, wanted: Sequence[Resources]) -> str:
    """The actors that would be started, in words."""
    module = ["-m"] if options.as_module else []
    script = ["python", *module, str(options.script), *options.arguments]
    return "\n".join(
        [
            f"Ray: {remote.ray or 'the cluster that it finds, or a new one on this machine'}",
            *(f"worker {rank}: {_in_words(one)}" for rank, one in enumerate(wanted)),
            f"there, in {remote.workdir}: {shlex.join(script)}",
        ]
    )
