"""The launcher's last line: the root cause, and the exit status. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphsplit.cli.launch.ending import SCHEDULER, JobEnding, describe, exit_status
from graphsplit.reports import EndReport


@dataclass(frozen=True)
class JobVerdict:
    """How a job ended.

    Attributes:
        status: The exit status: of the process with the root cause, where that is known.
        line: One line that names both; empty if all is well.
    """

    status: int
    line: str


def verdict(ending: JobEnding, reports: Mapping[str, EndReport]) -> JobVerdict:
    """Weigh what is known.

    Args:
        ending: How the processes ended, and which was first.
        reports: The reports of processes, by name. The scheduler's is about the whole job.
    """
    if ending.status == 0:
        return JobVerdict(0, "")
    if ending.is_interrupted:
        return _with_status(ending.status, ending.reason)
    report = reports.get(SCHEDULER) or reports.get(ending.first_failed)
    if report is None:
        return _with_status(ending.status, ending.reason)
    blamed = f"worker {report.rank}"
    returncode = ending.returncodes.get(blamed, 0)
    status = exit_status(returncode) if returncode else ending.status
    # The launcher knows better how its own child ended than those who only lost it.
    what = f"{blamed} {describe(returncode)}" if returncode < 0 else report.headline
    return _with_status(status, what, report.where)


def _with_status(status: int, *parts: str) -> JobVerdict:
    return JobVerdict(status, f"graphsplit: {'; '.join(filter(None, parts))}; exit status {status}")
