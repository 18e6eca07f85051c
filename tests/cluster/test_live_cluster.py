from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest
from cluster_helpers import DEADLINE_S, wait_until
from quiet_time import quiet_time

from graphsplit.cluster.member.member import Member, NodeIdentity
from graphsplit.cluster.scheduler.server import serve
from graphsplit.cluster.wire.limits import MAX_TEXT_BYTES
from graphsplit.errors import (
    ClusterError,
    ConfigurationError,
    JobFailedError,
    PlanMismatchError,
    RegistrationRefusedError,
)
from graphsplit.failure import AbortSignal, FailureCause
from graphsplit.settings import ClusterSettings


def finish_all(cluster, joined):
    for future in [cluster.submit(one.member.finish) for one in joined]:
        future.result(DEADLINE_S)
    for one in joined:
        one.member.close()


@pytest.mark.parametrize("order", ["01234", "43210", "20413"])
def test_five_workers_form_a_job_in_any_order_and_finish_it(start_cluster, order):
    cluster = start_cluster(5)
    joined = cluster.join_all(*order)
    assert [one.member.rank for one in joined] == [0, 1, 2, 3, 4]
    assert {one.member.num_workers for one in joined} == {5}
    assert len({one.member.plan.job for one in joined}) == 1
    assert len({one.member.plan.seed for one in joined}) == 1
    assert {one.member.generation for one in joined} == {1}
    peers = joined[0].member.peers
    assert [peer.endpoints["grpc"] for peer in peers] == [f"127.0.0.1:1{n}" for n in range(5)]
    finish_all(cluster, joined)
    assert cluster.wait_status() == 0
    assert all(one.abort.cause is None for one in joined)


def test_names_without_numbers_share_out_the_ranks(start_cluster):
    cluster = start_cluster(3)
    joined = cluster.join_all("", "b", "1")
    assert [one.member.rank for one in joined] == [0, 1, 2]
    assert joined[1].member.peers[1].node_id == "1"
    finish_all(cluster, joined)
    assert cluster.wait_status() == 0


def test_surplus_and_duplicate_workers_are_refused_and_the_job_goes_on(start_cluster):
    cluster = start_cluster(2)
    joined = cluster.join_all("0", "1")
    with pytest.raises(RegistrationRefusedError, match="the job has 2 workers, and all of them"):
        cluster.join("extra")
    with pytest.raises(RegistrationRefusedError, match="rank 1 is already held by the worker at"):
        cluster.join("1")
    with pytest.raises(RegistrationRefusedError, match="it asks for rank 2"):
        cluster.join("2")
    finish_all(cluster, joined)
    assert cluster.wait_status() == 0


def test_a_worker_with_another_version_is_refused_before_the_job_has_formed(start_cluster):
    cluster = start_cluster(2)
    first = cluster.submit(cluster.join, "0")
    wait_until(lambda: any("registered" in line for line in cluster.log), "no registration")
    with pytest.raises(RegistrationRefusedError) as caught:
        cluster.join("1", identity=NodeIdentity(versions={"torch": "2.12.0"}))
    assert "has torch 2.12.0, but worker '0'" in str(caught.value)
    second = cluster.join("1")
    finish_all(cluster, [first.result(DEADLINE_S), second])
    assert cluster.wait_status() == 0


def test_barriers_and_agreements_bring_all_workers_together(start_cluster):
    cluster = start_cluster(3)
    joined = cluster.join_all("0", "1", "2")

    def meet(one):
        one.member.barrier("start")
        one.member.agree("plan 0", "the same\ntext")
        one.member.barrier("start")

    for future in [cluster.submit(meet, one) for one in joined]:
        future.result(DEADLINE_S)
    finish_all(cluster, joined)
    assert cluster.wait_status() == 0


def test_a_disagreement_shows_everyone_the_first_differing_line(start_cluster):
    cluster = start_cluster(3)
    joined = cluster.join_all("0", "1", "2")
    filler = "a line that is the same everywhere\n" * 25_000
    texts = [filler + "conv1 on 3", filler + "conv1 on 3", filler + "conv1 on 4"]
    futures = [
        cluster.submit(one.member.agree, "plan 0", text)
        for one, text in zip(joined, texts, strict=True)
    ]
    for future in futures:
        with pytest.raises(PlanMismatchError) as caught:
            future.result(DEADLINE_S)
        assert "workers 0 and 2 disagree about 'plan 0': line 25001 is" in str(caught.value)
        assert "worker 0: conv1 on 3\n  worker 2: conv1 on 4" in str(caught.value)
    for one in joined:
        assert one.wait_aborted().kind == "disagreement"
        one.member.close()
    assert cluster.wait_status() == 1


def test_a_disagreement_far_down_a_long_text_is_found_too(start_cluster):
    cluster = start_cluster(2)
    joined = cluster.join_all("0", "1")
    line = "a line that is the same everywhere\n"
    filler = line * (MAX_TEXT_BYTES // len(line) + 10)
    futures = [
        cluster.submit(one.member.agree, "plan 0", filler + last)
        for one, last in zip(joined, ["conv1 on 3", "conv1 on 4"], strict=True)
    ]
    first = MAX_TEXT_BYTES // len(line) + 1
    for future in futures:
        with pytest.raises(PlanMismatchError) as caught:
            future.result(DEADLINE_S)
        assert f"'plan 0, from line {first}': line 11 is the first" in str(caught.value)
        assert "worker 0: conv1 on 3\n  worker 1: conv1 on 4" in str(caught.value)
    for one in joined:
        one.wait_aborted()
        one.member.close()
    assert cluster.wait_status() == 1


def test_an_exception_on_one_worker_ends_the_job_on_all_and_names_it(start_cluster):
    cluster = start_cluster(3)
    joined = cluster.join_all("0", "1", "2")
    waiting = cluster.submit(joined[0].member.barrier, "never")
    try:
        raise ValueError("the loss is nan")
    except ValueError as error:
        cause = joined[1].member.failures.cause_of(error)
    started = quiet_time()
    joined[1].member.failures.report(cause)
    joined[1].member.close()
    for one in (joined[0], joined[2]):
        heard = one.wait_aborted()
        assert one.aborted_at - started < 2
        assert (heard.kind, heard.rank) == ("exception", 1)
        assert heard.message == "ValueError: the loss is nan"
        assert "test_live_cluster.py" in heard.traceback
        one.member.close()
    with pytest.raises(JobFailedError, match="the loss is nan"):
        waiting.result(DEADLINE_S)
    assert cluster.wait_status() == 1
    assert any("the job failed: worker 1" in line for line in cluster.log)


def test_progress_of_the_others_is_known(start_cluster):
    cluster = start_cluster(2)
    joined = cluster.join_all("0", "1")
    joined[1].member.position.progress = 41
    wait_until(lambda: joined[0].member.progress(1) == 41, "no progress was heard of")
    assert joined[1].member.progress(1) == 41
    finish_all(cluster, joined)
    assert cluster.wait_status() == 0


def test_a_worker_that_never_comes_ends_the_job_and_is_named(start_cluster):
    cluster = start_cluster(2, topo_timeout_s=1.5)
    with pytest.raises(JobFailedError, match="1 of 2 workers registered, missing ranks 1"):
        cluster.join("0")
    assert cluster.wait_status() == 1


def test_without_a_scheduler_a_worker_says_where_it_looked_and_how_long(monkeypatch):
    monkeypatch.setattr("graphsplit.cluster.member.connection._FIRST_REPORT_S", 0.0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = ClusterSettings(
        role="MS_WORKER",
        num_workers=2,
        scheduler_port=port,
        topo_timeout_s=0.6,
        retry_lower_s=0.1,
        retry_upper_s=0.1,
    )
    lines: list[str] = []
    started = quiet_time()
    with pytest.raises(ClusterError, match=rf"no scheduler answers at 127.0.0.1:{port} .*tried"):
        Member.join(
            settings,
            endpoints={},
            identity=NodeIdentity(),
            abort=AbortSignal(),
            log=lines.append,
        )
    assert quiet_time() - started < 3
    assert len(lines) == 1
    assert f"no scheduler at 127.0.0.1:{port} after 0 s" in lines[0]


def test_an_abort_ends_the_search_for_a_scheduler():
    abort = AbortSignal()
    settings = ClusterSettings(role="MS_WORKER", num_workers=2, scheduler_port=1)
    timer = threading.Timer(0.2, abort.set, [FailureCause("interrupted", "stop")])
    timer.start()
    with pytest.raises(JobFailedError, match="stop"):
        Member.join(
            settings, endpoints={}, identity=NodeIdentity(), abort=abort, log=lambda line: None
        )
    timer.join()


def test_a_second_scheduler_on_the_same_port_is_refused(start_cluster):
    cluster = start_cluster(1)
    with pytest.raises(ConfigurationError) as caught:
        serve(replace(cluster.settings, scheduler_port=cluster.port), log=lambda line: None)
    assert f"cannot listen on 127.0.0.1:{cluster.port}" in str(caught.value)
    assert "MS_SCHED_PORT" in str(caught.value)
    finish_all(cluster, cluster.join_all("0"))
    assert cluster.wait_status() == 0


def test_the_scheduler_listens_on_its_address_only(start_cluster):
    cluster = start_cluster(1)
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", cluster.port), timeout=2):
        pass
    finish_all(cluster, cluster.join_all("0"))


def test_noise_from_strangers_does_not_disturb_the_job(start_cluster):
    import grpc

    cluster = start_cluster(1)
    with socket.create_connection(("127.0.0.1", cluster.port), timeout=2) as link:
        link.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    with grpc.insecure_channel(f"127.0.0.1:{cluster.port}") as channel:
        session = channel.stream_stream("/graphsplit.cluster.v1.Cluster/Session")
        assert len(list(session(iter([b"\xff" * 1000]), timeout=DEADLINE_S))) == 1
        with pytest.raises(grpc.RpcError) as caught:
            list(session(iter([bytes(5 << 20)]), timeout=DEADLINE_S))
        # Refused as too large; or closed before that was seen, by who watches strangers.
        if caught.value.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            closed = "proved nothing: it sent more than 64 KiB"
            wait_until(lambda: any(closed in line for line in cluster.log), str(caught.value))
    finish_all(cluster, cluster.join_all("0"))
    assert cluster.wait_status() == 0


def test_a_member_leaves_no_thread_behind(start_cluster):
    cluster = start_cluster(1)
    before = set(threading.enumerate())
    for one in (joined := cluster.join_all("0")):
        one.member.barrier("x")
    finish_all(cluster, joined)
    joined[0].member.close()
    # The pool's own threads are not the member's.
    wait_until(
        lambda: all(
            thread.name.startswith("ThreadPoolExecutor")
            for thread in set(threading.enumerate()) - before
        ),
        "a thread was left",
    )
    with pytest.raises(ClusterError, match="has left the cluster"):
        joined[0].member.barrier("too late")
