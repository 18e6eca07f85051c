"""When a job recovers, its script does."""

from __future__ import annotations

import os

from graphsplit.job.job import Job
from graphsplit.recovery.script import RecoveringScript
from graphsplit.recovery.settings import SnapshotSettings
from graphsplit.settings import FAIL_FAST, ClusterSettings


def install(job: Job) -> None:
    """Called when a worker has joined a job."""
    settings = ClusterSettings.from_environ(os.environ)
    if settings is not None and job.recovery_policy != FAIL_FAST:
        job.script = RecoveringScript(job, SnapshotSettings.of(settings))
