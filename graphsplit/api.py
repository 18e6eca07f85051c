"""The effect of importing graphsplit: every ``torch.nn.Module`` gets the method ``place``.

It also says what a process does when it joins a job, and that a scheduler's process never trains.
What takes longer to import waits for its use.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn

from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphsplit.errors import ConfigurationError
from graphsplit.job.when_joined import on_joined
from graphsplit.marks.annotations import install as install_place
from graphsplit.settings import FAIL_FAST, SCHEDULER_ROLE, ClusterSettings

if TYPE_CHECKING:
    from graphsplit.job.job import Job


def _install_recovery(job: Job) -> None:
    """When a job recovers, its script does."""
    settings = ClusterSettings.from_environ(os.environ)
    if settings is not None and job.recovery_policy != FAIL_FAST:
        from graphsplit.recovery.script import RecoveringScript
        from graphsplit.recovery.settings import SnapshotSettings

        job.script = RecoveringScript(job, SnapshotSettings.of(settings))


def _refuse_to_train(*_: Any) -> NoReturn:
    raise ConfigurationError(
        f"this is the scheduler's process (MS_ROLE={SCHEDULER_ROLE}), which trains nothing: it "
        f"serves from gs.init() on, and that was not called\n"
        f"  Fix: call gs.init() first in the script."
    )


install_place()
on_joined.append(_install_recovery)
if os.environ.get("MS_ROLE", "").strip() == SCHEDULER_ROLE:  # gs.init() never returns there
    register_optimizer_step_pre_hook(_refuse_to_train)
