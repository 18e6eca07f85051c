"""A link that broke: told to the scheduler at once, which then says what it means."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from graphsplit.cluster.member import failure_reports
from graphsplit.cluster.member.identity import ReportedPosition
from graphsplit.cluster.member.member import Member
from graphsplit.errors import JobFailedError, MembershipChangedError, TransportError
from graphsplit.failure import AbortSignal, FailureCause
from graphsplit.job.job import Job
from graphsplit.settings import FAIL_FAST, ClusterSettings

LOST = FailureCause("lost", "lost: nothing was heard from it for 4 s", rank=2)


class FakeMember:
    """Reports, and is told a verdict."""

    rank, num_workers, generation, seats = 1, 3, 1, (0, 1, 2)
    recovery = FAIL_FAST

    def __init__(self, verdict: FailureCause | None, *, recovers: bool = False) -> None:
        self.abort = AbortSignal()
        self.position = ReportedPosition()
        self.told: list[FailureCause] = []
        self._verdict = verdict
        self._recovers = recovers
        self.failures = self  # it is its own reporter

    def cause_of(self, error: BaseException) -> FailureCause:
        return FailureCause("lost", str(error), rank=1)

    def report(self, cause: FailureCause) -> None:
        self.told.append(cause)

    def await_verdict(self) -> None:
        assert self.told, "told before the wait, not after it"
        if self._verdict is not None:
            self.abort.set(self._verdict, recovers=self._recovers)

    def is_own(self, cause: FailureCause) -> bool:
        return cause in self.told


def break_a_link(member: Any) -> None:
    with Job(member, None, member.abort).reporting():  # type: ignore[arg-type]
        raise TransportError("worker 2: the connection to it broke")


def test_the_scheduler_knows_better():
    member = FakeMember(LOST)
    with pytest.raises(JobFailedError) as found:
        break_a_link(member)
    assert found.value.cause == LOST
    assert [cause.rank for cause in member.told] == [1]


def test_the_job_recovers_from_it():
    with pytest.raises(MembershipChangedError):
        break_a_link(FakeMember(LOST, recovers=True))


def test_nobody_knows_better():
    own = FailureCause("lost", "worker 2: the connection to it broke", rank=1)
    for verdict in (own, None):  # it is the root cause itself, or the scheduler does not answer
        with pytest.raises(TransportError, match="the connection to it broke"):
            break_a_link(FakeMember(verdict))


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Member:
    monkeypatch.setattr(failure_reports, "_VERDICT_S", 0.01)
    settings = ClusterSettings("MS_WORKER", num_workers=3, scheduler_port=1)
    abort = AbortSignal()
    made = Member(settings, abort, None)
    abort.add_waker(made.wake)
    return made


def test_a_scheduler_that_says_nothing_is_not_waited_for_for_ever(member: Member):
    member.failures.await_verdict()


def test_a_worker_that_is_cut_off_waits_as_long_as_it_may_come_back(member: Member):
    """The job may go on without it, or wait for it: only who it comes back to can say."""
    member._connection.is_reconnecting = True
    waiting = threading.Thread(target=member.failures.await_verdict, daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    member.abort.set(LOST, recovers=True)
    waiting.join(10)
    assert not waiting.is_alive()
