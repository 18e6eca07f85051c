from __future__ import annotations

from dataclasses import replace

import pytest
from cluster_helpers import DEADLINE_S, wait_until
from quiet_time import quiet_time

from graphsplit.errors import JobFailedError, MembershipChangedError, RegistrationRefusedError
from graphsplit.failure import FailureCause

ENDPOINTS = {"grpc": "127.0.0.1:2"}


def cut(member):
    """Break a member's stream as the kernel does when the process is killed."""
    connection = member._connection
    with member.changed:
        session, connection.session = connection.session, None
        member.has_left = True
    session._call.cancel()
    session._channel.close()


def recover(one):
    """What a survivor does: it hears of the change, and takes its part in the next generation."""
    assert one.wait_aborted().kind == "lost"
    assert one.abort.recovers
    one.member.recover(ENDPOINTS)


def test_who_comes_to_the_next_generation_at_another_address_ends_the_job(start_cluster):
    cluster = start_cluster(2, recovery="wait_rejoin")
    joined = cluster.join_all("0", "1")
    cut(joined[1].member)
    assert joined[0].wait_aborted().kind == "lost"
    with pytest.raises(JobFailedError, match=r"it would be dialed at 192\.0\.2\.7, and came from"):
        joined[0].member.recover({"grpc": "192.0.2.7:443"})


def finish_all(cluster, members):
    for future in [cluster.submit(member.finish) for member in members]:
        future.result(DEADLINE_S)
    for member in members:
        member.close()


def test_a_lost_worker_is_replaced_and_the_job_finishes_in_the_next_generation(start_cluster):
    cluster = start_cluster(3, recovery="wait_rejoin")
    joined = cluster.join_all("0", "1", "2")
    assert {one.member.recovery for one in joined} == {"wait_rejoin"}
    waiting = cluster.submit(joined[0].member.barrier, "never")
    started = quiet_time()
    cut(joined[2].member)

    with pytest.raises(MembershipChangedError, match=r"worker 2 .*killed or crashed") as caught:
        waiting.result(DEADLINE_S)
    assert quiet_time() - started < 5
    assert caught.value.generation == 1

    survivors = [cluster.submit(recover, one) for one in joined[:2]]
    newcomer = cluster.join("2")
    for future in survivors:
        future.result(DEADLINE_S)
    members = [joined[0].member, joined[1].member, newcomer.member]
    assert [member.generation for member in members] == [2, 2, 2]
    assert newcomer.member.rank == 2
    assert newcomer.member.peers[0].endpoints == ENDPOINTS
    assert members[0].abort.cause is None
    assert members[0].plan.seed == newcomer.member.plan.seed
    for future in [cluster.submit(member.barrier, "again") for member in members]:
        future.result(DEADLINE_S)
    finish_all(cluster, members)
    assert cluster.wait_status() == 0


def test_a_worker_whose_stream_broke_comes_back_itself_and_nobody_is_disturbed(start_cluster):
    cluster = start_cluster(2, recovery="wait_rejoin")
    joined = cluster.join_all("0", "1")
    joined[1].member._connection.session._call.cancel()
    wait_until(lambda: any("worker 1" in line and "is back" in line for line in cluster.log), "no")
    for future in [cluster.submit(one.member.barrier, "x") for one in joined]:
        future.result(DEADLINE_S)
    assert [one.member.generation for one in joined] == [1, 1]
    finish_all(cluster, [one.member for one in joined])
    assert cluster.wait_status() == 0


def test_an_exception_ends_a_job_that_could_recover(start_cluster):
    cluster = start_cluster(2, recovery="wait_rejoin")
    joined = cluster.join_all("0", "1")
    cause = FailureCause("exception", "ValueError: the loss is nan", rank=1)
    joined[1].member.failures.report(cause)
    assert joined[0].wait_aborted().kind == "exception"
    assert not joined[0].abort.recovers
    with pytest.raises(JobFailedError, match="the loss is nan"):
        joined[0].member.recover(ENDPOINTS)


def test_a_worker_that_does_not_come_back_fails_the_job_with_the_first_cause(start_cluster):
    cluster = start_cluster(2, recovery="wait_rejoin", topo_timeout_s=2.0)
    joined = cluster.join_all("0", "1")
    cut(joined[1].member)
    with pytest.raises(JobFailedError, match=r"worker 1 .* was lost") as caught:
        recover(joined[0])
    assert "could not recover within 2 s" in caught.value.cause.message
    assert "nobody came for ranks 1" in caught.value.cause.message
    assert cluster.wait_status() == 1


def test_workers_must_be_started_with_the_same_policy(start_cluster):
    cluster = start_cluster(1, recovery="wait_rejoin")
    cluster.settings = replace(cluster.settings, recovery="fail_fast")
    with pytest.raises(RegistrationRefusedError, match="recovery policy fail_fast, the scheduler"):
        cluster.join("0")
    cluster.settings = replace(cluster.settings, recovery="wait_rejoin")
    finish_all(cluster, [cluster.join("0").member])


def test_under_restart_a_lost_worker_ends_the_job_with_the_status_for_another_try(start_cluster):
    cluster = start_cluster(2, recovery="restart")
    joined = cluster.join_all("0", "1")
    cut(joined[1].member)
    assert joined[0].wait_aborted().is_retryable
    joined[0].member.close()
    assert cluster.wait_status() == 75
