from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from cluster_helpers import Process
from quiet_time import quiet_time

pytestmark = pytest.mark.real_processes


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.end()


def kill_and_wait_everywhere(cluster, process, joined):
    killed_at = quiet_time()
    process.send_signal(signal.SIGKILL)
    for one in joined:
        cause = one.wait_aborted()
        assert one.aborted_at - killed_at < 3
        assert (cause.kind, cause.rank, cause.pid) == ("lost", 2, process.pid)
        assert cause.host
        assert cause.position == "step 7, module conv1"
        one.member.close()
    assert cluster.wait_status() == 1


def start_with_process(cluster, mode):
    process = cluster.start_process(mode, "2")
    joined = cluster.join_all("0", "1")
    for future in [cluster.submit(one.member.barrier, "start") for one in joined]:
        future.result(10)
    process.wait_line("started")
    # Its position is known without another second's wait: it is said on the way to a meeting.
    return process, joined


def test_a_killed_worker_is_named_everywhere_within_three_seconds(start_cluster):
    cluster = start_cluster(3)
    process, joined = start_with_process(cluster, "hang")
    kill_and_wait_everywhere(cluster, process, joined)


@pytest.mark.parametrize("fork_support", [None, "0", "1"])
def test_a_child_that_outlives_a_killed_worker_does_not_hide_its_death(
    start_cluster, monkeypatch, fork_support
):
    if fork_support is None:
        monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    else:
        monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", fork_support)
    cluster = start_cluster(3)
    process, joined = start_with_process(cluster, "fork")
    child = int(process.wait_line("child"))
    try:
        kill_and_wait_everywhere(cluster, process, joined)
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
    if fork_support is None:
        assert len(process.rest()) == 2, "gRPC's own fork handlers are silent"


def test_a_script_that_ends_without_finishing_is_named(start_cluster):
    cluster = start_cluster(2)
    process = cluster.start_process("exit", "1")
    (one,) = cluster.join_all("0")
    one.member.barrier("start")
    cause = one.wait_aborted()
    assert (cause.kind, cause.rank) == ("lost", 1)
    assert "left before the job was finished" in cause.message
    one.member.close()
    assert cluster.wait_status() == 1
    assert process.wait() == 0
    assert process.rest() == ["started"], "nothing is printed at the interpreter's end"


def start_apart(processes, *modes):
    """A scheduler in a process of its own, and workers 0, 1, ... in others."""
    scheduler = Process("serve", role="MS_SCHED", num_workers=len(modes), port=1, node_id="")
    processes.append(scheduler)
    port = int(scheduler.wait_line("port"))
    workers = [
        Process(mode, role="MS_WORKER", num_workers=len(modes), port=port, node_id=str(rank))
        for rank, mode in enumerate(modes)
    ]
    processes.extend(workers)
    for worker in workers:
        worker.wait_line("started")
    return scheduler, workers


def test_a_killed_scheduler_ends_every_worker(processes):
    scheduler, workers = start_apart(processes, "report", "report")
    scheduler.send_signal(signal.SIGKILL)
    for worker in workers:
        text = worker.wait_line("aborted: scheduler_lost:")
        assert "the connection to the scheduler at 127.0.0.1:" in text
        assert worker.wait() == 1


def test_a_frozen_worker_is_lost_after_the_node_timeout(start_cluster):
    cluster = start_cluster(2, node_timeout_s=2.0)
    process = cluster.start_process("hang", "1")
    (one,) = cluster.join_all("0")
    one.member.barrier("start")
    process.send_signal(signal.SIGSTOP)
    cause = one.wait_aborted()
    assert (cause.kind, cause.rank) == ("lost", 1)
    one.member.close()
    process.send_signal(signal.SIGKILL)
    assert cluster.wait_status() == 1


def test_real_processes_finish_with_status_zero_and_without_noise(processes):
    scheduler, workers = start_apart(processes, "finish", "finish", "finish")
    assert scheduler.wait() == 0
    for worker in workers:
        assert worker.wait() == 0
        assert worker.rest() == ["started"]
    assert scheduler.rest()[-1] == "[scheduler] all workers have finished"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_scheduler_ends_all_in_order(processes, number, status):
    scheduler, workers = start_apart(processes, "report", "report")
    scheduler.send_signal(number)
    for worker in workers:
        text = worker.wait_line("aborted: interrupted:")
        assert text == f"the job was interrupted by {number.name}"
        assert worker.wait() == 1
    assert scheduler.wait() == status
