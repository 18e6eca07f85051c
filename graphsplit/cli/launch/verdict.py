"""The launcher's last line: the root cause, and the exit status. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphsplit.cli.launch.ending import SCHEDULER, JobEnding, exit_status
from graphsplit.reports import EndReport


@dataclass(frozen=True)
class JobVerdict:
    """How a job ended.

    Attributes:
        status: The exit status: of the process with the root cause, where that is known.
        reason: The root cause, in one line; empty if all is well.
        rank: The worker that is to blame; -1 if none is.
    """

    status: int
    reason: str = ""
    rank: int = -1

    @property
    def line(self) -> str:
        """One line that names both; empty if all is well."""
        return f"graphsplit: {self.reason}; exit status {self.status}" if self.status else ""


def verdict(ending: JobEnding, reports: Mapping[str, EndReport]) -> JobVerdict:
    """Weigh what is known.

    Args:
        ending: How the processes ended, and which was first.
        reports: The reports of processes, by name. The scheduler's is about the whole job.
    """
    if ending.status == 0:
        return JobVerdict(0)
    if ending.is_interrupted:
        return JobVerdict(ending.status, ending.reason)
    first = _rank(ending.first_failed)
    report = reports.get(SCHEDULER) or reports.get(ending.first_failed)
    if report is None:
        return JobVerdict(ending.status, ending.reason, first)
    returncode = ending.returncodes.get(f"worker {report.rank}", 0)
    if report.rank < 0 and ending.returncodes.get(SCHEDULER, 0) < 0:
        # Who was heard first may be one that only lost the scheduler.
        status = exit_status(ending.returncodes[SCHEDULER])
        return JobVerdict(status, f"{SCHEDULER} {ending.hows[SCHEDULER]}")
    status = exit_status(returncode) if returncode else ending.status
    # The launcher knows better how its own child ended than those who only lost it.
    blamed = f"worker {report.rank}"
    what = f"{blamed} {ending.hows[blamed]}" if returncode < 0 else report.headline
    reason = "; ".join(filter(None, (what, report.where)))
    return JobVerdict(status, reason, first if report.rank < 0 else report.rank)


def _rank(name: str) -> int:
    """The rank of a process by its name; -1 for the scheduler."""
    return int(name.split()[-1]) if name.startswith("worker ") else -1
