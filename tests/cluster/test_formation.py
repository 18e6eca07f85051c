from __future__ import annotations

import itertools
import re

import pytest

from graphsplit.cluster.scheduler.job.events import Connected, Disconnected, Malformed, Tick
from graphsplit.cluster.scheduler.job.formation import assign_ranks
from graphsplit.cluster.scheduler.job.state import JobPhase
from graphsplit.cluster.wire.messages import Accepted, Formed, Heartbeat, Started

ACCEPTED = Accepted(job="ab" * 16)


@pytest.mark.parametrize(
    ("wishes", "ranks"),
    [
        ([None, None, None], [0, 1, 2]),
        ([None, 0, None], [1, 0, 2]),
        ([2, 1, 0], [2, 1, 0]),
        ([None, 0, None, 3], [1, 0, 2, 3]),
    ],
)
def test_numeric_wishes_win_and_others_get_the_lowest_free_ranks(wishes, ranks):
    assert assign_ranks(wishes, 5) == ranks


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_ranks_do_not_depend_on_the_order_of_arrival(drive, registration, order):
    scheduler = drive(num_workers=3)
    for rank in order:
        scheduler.register(rank, registration(str(rank)))

    for rank in range(3):
        assert scheduler.sent[rank][0] == ACCEPTED
        formed = scheduler.sent[rank][1]
        assert isinstance(formed, Formed)
        assert formed.rank == rank
        assert [peer.host for peer in formed.peers] == ["host-0", "host-1", "host-2"]
        assert [peer.rank for peer in formed.peers] == [0, 1, 2]
        assert (formed.job, formed.generation, formed.seed) == ("ab" * 16, 1, 4711)
        assert formed.peers[1].endpoints == {"grpc": "10.0.0.1:4711"}
        assert formed.warnings == ()
    assert scheduler.state.job.phase is JobPhase.PLANNED
    scheduler.answer_plan()
    assert scheduler.state.job.phase is JobPhase.RUNNING
    assert [scheduler.last(rank) for rank in range(3)] == [Started(1)] * 3


def test_nobody_is_told_a_rank_before_all_have_arrived(drive, registration):
    scheduler = drive(num_workers=2)
    scheduler.register(7, registration("named"))
    assert scheduler.sent[7] == [ACCEPTED]
    scheduler.register(8, registration("0"))
    assert scheduler.last(7).rank == 1
    assert scheduler.last(8).rank == 0


def test_every_ten_seconds_a_line_names_the_missing_ranks(drive, registration):
    scheduler = drive()
    for name in ("0", "2", "3"):
        scheduler.register(int(name), registration(name))
    scheduler.log.clear()
    for _ in range(3):
        scheduler.pass_time(10)
        for node in (0, 2, 3):
            scheduler.say(node, Heartbeat(0))
    assert scheduler.log == ["3 of 5 workers registered, missing ranks 1, 4"] * 3


def test_named_workers_count_as_the_lowest_free_ranks_in_that_line(drive, registration):
    scheduler = drive()
    scheduler.register(1, registration("a"))
    scheduler.register(2, registration("1"))
    scheduler.pass_time(10)
    assert scheduler.log[-1] == "2 of 5 workers registered, missing ranks 2, 3, 4"


def test_no_rank_is_missing_while_those_that_have_registered_prepare(drive, registration):
    scheduler = drive()
    for name in "01234":
        scheduler.register(int(name), registration(name))
    scheduler.pass_time(10)
    assert scheduler.log[-1] == "5 of 5 workers registered"


def test_missing_workers_end_the_job_when_the_time_is_over(drive, registration):
    scheduler = drive(topo_timeout_s=20, node_timeout_s=100)
    scheduler.register(1, registration("1"))
    scheduler.register(3, registration("3"))
    scheduler.pass_time(19.8)
    assert scheduler.state.job.phase is JobPhase.FORMING
    scheduler.pass_time(0.4)

    cause = scheduler.last(1).cause
    assert cause.kind == "timeout"
    assert "within 20 s (MS_TOPO_TIMEOUT)" in cause.message
    assert "2 of 5 workers registered, missing ranks 0, 2, 4" in cause.message
    scheduler.feed(Disconnected(1))
    scheduler.feed(Disconnected(3))
    assert (scheduler.exit.status, scheduler.exit.cause) == (1, cause)


def test_a_job_without_any_worker_ends_at_once_when_the_time_is_over(drive):
    scheduler = drive(topo_timeout_s=1)
    scheduler.pass_time(1.2)
    assert scheduler.exit.status == 1
    assert "0 of 5 workers registered" in scheduler.exit.cause.message


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("x", {"wished_rank": 3}, r"rank 3 is already held by the worker at host host-3, pid 103"),
        ("a", {}, r"the name 'a' \(MS_NODE_ID\) is already held by the worker at host host-a, pid"),
        ("5", {}, r"asks for rank 5 \(MS_NODE_ID\), but the job has workers 0 to 4"),
        ("x", {"wished_rank": -1}, r"asks for rank -1"),
        ("x", {"role": "MS_SERVER"}, r"its role is 'MS_SERVER', but only MS_WORKER may register"),
        (
            "x",
            {"versions": {"graphsplit": "0.1.0", "torch": "2.12.1", "python": "3.11"}},
            r"worker 'x' \(host host-x, pid 150\) has torch 2.12.1, but worker '3' \(host host-3, "
            r"pid 103\) has torch 2.13.0",
        ),
        ("x", {"versions": {}}, r"has graphsplit none, but worker '3'"),
        (
            "x",
            {"script_digest": "e" * 64},
            r"runs another script than worker '3' .*e{64} against d{64}",
        ),
        (
            "x",
            {"endpoints": {"grpc": "127.0.0.1:4711"}},
            r"worker 'x' \(host host-x, pid 150\) listens on 127.0.0.1:4711, its own host's "
            r"loopback, and worker '3' \(host host-3, pid 103\) on 10.0.0.3:4711\n  Fix: set "
            r"MS_WORKER_IP for worker 'x'",
        ),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_and_harms_nobody(
    drive, registration, name, changes, reason
):
    scheduler = drive()
    scheduler.register(3, registration("3"))
    scheduler.register(4, registration("a"))
    scheduler.register(99, registration(name, **changes))

    text = scheduler.refused[99]
    assert re.search(reason, text)
    assert "Fix: " in text
    scheduler.feed(Disconnected(99))
    for rank in ("0", "1", "2"):
        scheduler.register(int(rank), registration(rank))
    assert scheduler.state.job.phase is JobPhase.PLANNED


def test_a_worker_of_a_job_of_another_size_is_refused(drive, registration):
    scheduler = drive(num_workers=2)
    scheduler.feed(Connected(1))
    scheduler.say(1, registration("0", num_workers=3))
    assert "MS_WORKER_NUM=3, the scheduler with MS_WORKER_NUM=2" in scheduler.refused[1]


def test_a_sixth_worker_of_five_is_refused_while_the_job_runs(drive, registration):
    scheduler = drive().form()
    scheduler.register(6, registration("late"))
    assert "the job has 5 workers, and all of them have registered" in scheduler.refused[6]
    scheduler.feed(Disconnected(6))
    scheduler.pass_time(1)
    assert scheduler.state.job.phase is JobPhase.RUNNING


def test_a_second_scheduler_client_with_a_taken_rank_hears_who_holds_it(drive, registration):
    scheduler = drive().form()
    scheduler.register(6, registration("4", host="elsewhere"))
    assert "rank 4 is already held by the worker at host host-4, pid 104" in scheduler.refused[6]


def test_a_worker_that_registers_twice_on_one_stream_ends_the_job(drive, registration):
    scheduler = drive(num_workers=2)
    scheduler.register(0, registration("0"))
    scheduler.say(0, registration("1", num_workers=2))
    assert scheduler.last(0).cause.kind == "refused"
    assert "registered twice" in scheduler.last(0).cause.message


def test_strangers_who_say_nonsense_or_nothing_are_refused(drive):
    scheduler = drive()
    scheduler.feed(Connected(1))
    scheduler.say(1, Heartbeat(3))
    assert scheduler.refused[1] == "sent Heartbeat before it was registered"
    scheduler.feed(Connected(2))
    scheduler.feed(Malformed(2, "host is missing"))
    assert scheduler.refused[2] == "sent a malformed message: host is missing"
    scheduler.feed(Connected(3))
    scheduler.pass_time(9.8)
    assert 3 not in scheduler.refused
    scheduler.pass_time(0.4)
    assert scheduler.refused[3] == "it did not register within 10 s"
    assert scheduler.state.job.phase is JobPhase.FORMING


def test_what_a_refused_node_still_says_is_not_refused_again(drive):
    scheduler = drive()
    scheduler.feed(Connected(1))
    scheduler.say(1, Heartbeat(3))
    scheduler.log.clear()
    scheduler.say(1, Heartbeat(4))
    assert scheduler.log == []


def test_differences_that_change_bits_warn_everyone(drive, registration):
    scheduler = drive(num_workers=2)
    scheduler.register(0, registration("0", cpu_capability="AVX512"))
    scheduler.register(1, registration("1", num_threads=4))
    for node in (0, 1):
        threads, capability = scheduler.last(node).warnings
        assert "thread counts differ (worker 0: 1, worker 1: 4)" in threads
        assert "CPU capabilities differ (worker 0: AVX512, worker 1: AVX2)" in capability
    assert any(line.startswith("warning: thread counts differ") for line in scheduler.log)


def test_the_seed_of_a_script_is_kept_for_all(drive, registration):
    scheduler = drive(num_workers=3)
    for name, seed in (("0", None), ("1", 7), ("2", 8)):
        scheduler.register(int(name), registration(name, seed=seed))
    assert [scheduler.last(node).seed for node in range(3)] == [7, 7, 7]
    assert (
        "different seeds (worker 0: None, worker 1: 7, worker 2: 8)"
        in (scheduler.last(0).warnings[0])
    )


def test_a_worker_that_is_lost_while_the_job_forms_ends_it(drive, registration):
    scheduler = drive()
    scheduler.register(1, registration("1"))
    scheduler.register(2, registration("2"))
    scheduler.feed(Disconnected(2))
    scheduler.pass_time(0.4)
    assert scheduler.last(1).cause.kind == "lost"
    assert scheduler.last(1).cause.pid == 102


def test_nothing_happens_after_the_end(drive, registration):
    scheduler = drive(topo_timeout_s=1)
    scheduler.pass_time(1)
    assert (scheduler.state.job.phase, scheduler.state.job.is_over) == (JobPhase.FAILED, True)
    assert scheduler.feed(Tick()) == []
    assert scheduler.feed(Connected(1)) == []
