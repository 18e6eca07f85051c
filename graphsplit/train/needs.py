"""The needs of a Model's methods, and the errors where they are not met."""

from __future__ import annotations

from collections.abc import Mapping

from graphsplit.errors import ConfigurationError
from graphsplit.job import joined
from graphsplit.planning.task import Task
from graphsplit.settings import FAIL_FAST
from graphsplit.train.cluster_engine import ClusterEngine
from graphsplit.train.engine import Engine
from graphsplit.train.metrics import Metric


def need_optimizer(task: Task, method: str) -> None:
    """Raise ``ConfigurationError`` if there is nothing that trains."""
    if not task.optimizers:
        raise ConfigurationError(
            f"{method} needs an optimizer\n  Fix: Model(..., optimizer=torch.optim.SGD("
            f"net.parameters(), lr=0.01))."
        )


def need_metrics(metrics: Mapping[str, Metric]) -> None:
    """Raise ``ConfigurationError`` if there is nothing to evaluate."""
    if not metrics:
        raise ConfigurationError(
            "eval needs metrics\n  Fix: Model(..., metrics={'Accuracy': gs.metrics.Accuracy()})."
        )


def need_cluster(engine: Engine) -> ClusterEngine:
    """The engine of a job that can be profiled.

    Raises:
        ConfigurationError: It is that of one process, or the job recovers from lost workers.
    """
    if not isinstance(engine, ClusterEngine):
        raise ConfigurationError(
            "profile measures what several workers do and wait for, and this is one process\n"
            "  Fix: start the script with graphsplit run, or use torch.profiler."
        )
    job = joined.current()
    if job is not None and job.recovery_policy != FAIL_FAST:
        raise ConfigurationError(
            f"profile measures every worker, and this job runs with {job.recovery_policy}: a "
            f"worker that comes back would have measured nothing\n"
            f"  Fix: start the job with GS_RECOVERY=fail_fast to profile it."
        )
    return engine
