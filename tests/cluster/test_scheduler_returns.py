from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster_helpers import DEADLINE_S, Joined, Process, wait_until

from graphsplit.cluster.member.member import Member, NodeIdentity
from graphsplit.failure import AbortSignal, FailureCause
from graphsplit.settings import ClusterSettings

pytestmark = pytest.mark.real_processes


class Job:
    """Two members in threads, and a scheduler in a process that can be killed."""

    def __init__(self, path: Path | None, *, node_timeout_s: float) -> None:
        self._environ = {
            "MS_NODE_TIMEOUT": str(node_timeout_s),
            "MS_RECOVERY_PATH": "" if path is None else str(path),
        }
        self.schedulers: list[Process] = []
        self.port = 1
        self.port = int(self.start("serve").wait_line("port"))
        self.settings = ClusterSettings(
            role="MS_WORKER",
            num_workers=2,
            scheduler_port=self.port,
            retry_lower_s=0.1,
            retry_upper_s=0.2,
            topo_timeout_s=DEADLINE_S,
            node_timeout_s=node_timeout_s,
        )
        self.pool = ThreadPoolExecutor(4)
        futures = [self.pool.submit(self._join) for _ in range(2)]
        joined = [future.result(DEADLINE_S) for future in futures]
        self.joined = sorted(joined, key=lambda one: one.member.rank)

    def start(self, mode: str) -> Process:
        """A scheduler, on the port of the job."""
        scheduler = Process(
            mode,
            role="MS_SCHED",
            num_workers=2,
            port=self.port,
            node_id="",
            environ=self._environ,
        )
        self.schedulers.append(scheduler)
        return scheduler

    def _join(self) -> Joined:
        abort = AbortSignal()
        identity = NodeIdentity(versions={"torch": "2.13.0"})
        member = Member.join(
            self.settings, endpoints={}, identity=identity, abort=abort, log=lambda line: None
        )
        return Joined(member, abort)

    def kill_scheduler(self) -> None:
        self.schedulers[-1].send_signal(signal.SIGKILL)
        self.schedulers[-1].wait()

    def close(self) -> None:
        for one in self.joined:
            one.member.close()
        for scheduler in self.schedulers:
            scheduler.end()
        self.pool.shutdown()


@pytest.fixture
def start_job() -> Iterator[type[Job]]:
    jobs: list[Job] = []

    def start(path: Path | None, *, node_timeout_s: float = 30.0) -> Job:
        jobs.append(Job(path, node_timeout_s=node_timeout_s))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def test_workers_outlive_their_scheduler_and_go_on_with_the_next_one(start_job, tmp_path):
    job = start_job(tmp_path)
    first, second = job.joined
    waiting = job.pool.submit(first.member.barrier, "x")
    job.kill_scheduler()

    after = job.start("serve_here")
    line = after.wait_line("[scheduler] back from the journal:")
    assert line == "generation 1, running"
    job.pool.submit(second.member.barrier, "x").result(DEADLINE_S)
    waiting.result(DEADLINE_S)
    assert [one.abort.cause for one in job.joined] == [None, None]
    for future in [job.pool.submit(one.member.finish) for one in job.joined]:
        future.result(DEADLINE_S)
    for one in job.joined:
        one.member.close()
    assert after.wait() == 0


def test_a_worker_that_was_lost_while_the_scheduler_was_away_is_noticed(start_job, tmp_path):
    job = start_job(tmp_path, node_timeout_s=3.0)  # the other one comes back, however busy it is
    first, second = job.joined
    job.kill_scheduler()
    second.member.close()
    after = job.start("serve_here")
    cause = first.wait_aborted()
    assert (cause.kind, cause.rank) == ("lost", 1)
    assert "did not come back within 2 s (see MS_NODE_TIMEOUT)" in cause.message
    first.member.close()
    assert after.wait() == 1


def test_what_a_worker_reports_while_the_scheduler_is_away_reaches_the_next_one(
    start_job, tmp_path
):
    job = start_job(tmp_path)
    first, second = job.joined
    generator = random.getstate()
    first.member.state.is_failure_noted = True  # of an earlier report
    job.kill_scheduler()
    connection = first.member._connection
    wait_until(lambda: connection.session is None, "no attempt to come back has failed")
    cause = FailureCause("exception", "ValueError: the disk is full", rank=0)
    reporting = job.pool.submit(first.member.failures.report, cause)
    after = job.start("serve_here")
    assert second.wait_aborted().message == cause.message
    reporting.result(DEADLINE_S)
    assert random.getstate() == generator  # it is the script's, also while we try again
    for one in job.joined:
        one.member.close()
    assert after.wait() == 1


def test_without_a_journal_the_loss_of_the_scheduler_ends_the_job_at_once(start_job):
    job = start_job(None)
    job.kill_scheduler()
    assert [one.wait_aborted().kind for one in job.joined] == ["scheduler_lost"] * 2
