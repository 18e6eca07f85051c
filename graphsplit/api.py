"""The effect of importing graphsplit: every ``torch.nn.Module`` gets the method ``place``.

It also says what a process does when it joins a job. What takes longer to import waits for its use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsplit.job.when_joined import on_joined
from graphsplit.marks.annotations import install as install_place

if TYPE_CHECKING:
    from graphsplit.job.job import Job


def _install_recovery(job: Job) -> None:
    from graphsplit.recovery.install import install

    install(job)


install_place()
on_joined.append(_install_recovery)
