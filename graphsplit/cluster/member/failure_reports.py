"""Reports of a worker's failures to the scheduler, and the scheduler's verdict on them."""

from __future__ import annotations

import time

from graphsplit.cluster.member.connection import Connection
from graphsplit.cluster.member.identity import bounded, failure_of
from graphsplit.cluster.member.membership import Membership
from graphsplit.cluster.member.state_machine import MemberPhase
from graphsplit.cluster.wire.messages import Failed
from graphsplit.failure import FailureCause

_REPORT_TIMEOUT_S = 1.0
_VERDICT_S = 3.0  # the scheduler's grace, and a busy machine


class FailureReports:
    """The reports of this worker's own failures."""

    def __init__(self, membership: Membership, connection: Connection) -> None:
        self._membership = membership
        self._connection = connection

    def cause_of(self, error: BaseException) -> FailureCause | None:
        """The failure that an error on this worker means; None if it only echoes the job's end."""
        membership = self._membership
        return failure_of(
            error,
            rank=membership.plan.peers[membership.plan.rank].rank,
            host=membership.host,
            pid=membership.pid,
            position=membership.position.text(),
            location=membership.position.location(),
        )

    def report(self, cause: FailureCause) -> None:
        """Tell the scheduler that this worker failed, and wait a moment for its answer.

        Does nothing if the job has ended already: what follows an abort is not a cause. While the
        scheduler is away, and will be back, this waits up to ``MS_NODE_TIMEOUT`` for it.
        """
        membership, connection = self._membership, self._connection
        with membership.changed:
            state, abort = membership.state, membership.abort
            is_unknown = state.phase is MemberPhase.JOINING
            is_away = connection.is_reconnecting
            if is_unknown or state.is_over or (connection.session is None and not is_away):
                return
            if abort.cause not in (None, cause) and not abort.recovers:
                return
            membership.to_report = Failed(bounded(cause), membership.position.calls.made())
            state.is_failure_noted = False
            # And again on the next stream, until it is noted.
            connection.tell(membership.to_report)
            membership.changed.wait_for(
                lambda: state.is_failure_noted or state.is_over,
                membership.settings.node_timeout_s if is_away else _REPORT_TIMEOUT_S,
            )

    def report_early(self, error: BaseException) -> None:
        """Report while joining: this worker has a name already, but no rank of its own."""
        membership = self._membership
        wished = membership.settings.wished_rank
        rank = -1 if wished is None else wished
        cause = failure_of(error, rank=rank, host=membership.host, pid=membership.pid, position="")
        if cause is not None:
            self.report(cause)

    def await_verdict(self, timeout_s: float | None = None) -> None:
        """Wait until the scheduler has said what a failure that was reported means for the job.

        While it is away, and may be back, nobody can know: this worker may be the one that is cut
        off, and the job may go on without it.
        """
        membership, limit_s = self._membership, _VERDICT_S if timeout_s is None else timeout_s
        with membership.changed:
            deadline = time.monotonic() + limit_s
            while membership.abort.cause is None and not membership.has_left:
                if self._connection.is_reconnecting:
                    deadline = time.monotonic() + limit_s
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return
                membership.changed.wait(left_s)

    def is_own(self, cause: FailureCause) -> bool:
        """Whether this is what this worker itself has reported."""
        report = self._membership.to_report
        told = report.cause if report is not None else None
        return told is not None and (told.rank, told.message) == (cause.rank, cause.message)
