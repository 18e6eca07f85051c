"""A script on workers that are threads gives what it gives by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recovery_helpers import Generators, ThreadCluster
from simulated.compare import difference


def assert_as_alone(
    alone: Callable[[], Any],
    on_a_worker: Callable[[], Any],
    workers: int = 2,
    *,
    is_recoverable: bool = False,
) -> None:
    """Compare what a script returns by itself and on each of some workers.

    Args:
        alone: Runs it by itself.
        on_a_worker: Runs it on a worker; all begin with the generators that ``alone`` began with.
        workers: How many workers.
        is_recoverable: Whether the job could go on without a worker.
    """
    before = Generators.now()
    expected = alone()
    before.put_back()
    cluster = ThreadCluster(lambda rank: on_a_worker(), workers, is_recoverable=is_recoverable)
    for rank, found in enumerate(cluster.run()):
        differing = difference(expected, found)
        assert differing is None, f"worker {rank}: {differing}"
