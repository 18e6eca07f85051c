"""``graphsplit status``: asked of a live scheduler, over its own port and under its protection."""

from __future__ import annotations

import json
import socket
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from cluster_helpers import DEADLINE_S, wait_until
from security_helpers import SCHEDULER_NAME, protection, worker_name

from graphsplit.cli import status as status_command
from graphsplit.cli.commands import main
from graphsplit.cluster.scheduler import server as scheduler_module
from graphsplit.cluster.status.client import fetch_status
from graphsplit.cluster.status.job_status import JobStatus, StatusRequest, WorkerStatus
from graphsplit.cluster.status.table import status_object, status_table
from graphsplit.cluster.wire.rpc import SERVICE, STATUS_METHOD
from graphsplit.encoding import records
from graphsplit.encoding.fields import MessageError
from graphsplit.errors import ClusterError
from graphsplit.root_cause import FailureCause, Location
from graphsplit.security.options import SecurityOptions
from graphsplit.security.protection import UNPROTECTED, Protection

TOKEN = "a token that only this job knows"
AT = Location(step=4, edge=7, waits_for=0, waits_what="relu (conv1): worker 0 -> worker 1")
STATUS = JobStatus(
    job="ab" * 16,
    phase="recovering",
    generation=2,
    num_workers=4,
    seconds=7320.4,
    workers=(
        WorkerStatus(0, "0", "alpha", 17, progress=812, heard_s=0.44,
                     position="between steps, after step 3",
                     location=Location(source="train.py:9"),
                     training="epoch 2 of 5, step 3 of 28, loss 0.3142, 12.3 steps/s"),
        WorkerStatus(1, "1", "beta", 18, progress=830, position="train step 4", location=AT),
        WorkerStatus(3, "3", "beta", 19, "finished", meets_at="the end of the job", heard_s=11.2),
    ),
    cause=FailureCause("lost", "lost: its connection broke", rank=2, host="beta", pid=9,
                       traceback="Traceback ..."),
    num_refused=3,
    num_recoveries=1,
    recovery="wait_rejoin",
)  # fmt: skip


def finish(cluster, joined):
    for future in [cluster.submit(one.member.finish) for one in joined]:
        future.result(DEADLINE_S)
    for one in joined:
        one.member.close()
    assert cluster.wait_status() == 0


def ask(cluster, protected=UNPROTECTED):
    return fetch_status("127.0.0.1", cluster.port, protected, timeout_s=DEADLINE_S)


def test_what_people_read(golden):
    golden("status.txt", status_table(STATUS))


def test_what_programs_read():
    found = json.loads(json.dumps(status_object(STATUS)))
    assert found["missing"] == [2]
    assert found["workers"][1]["waits_for"] == [0]
    assert found["workers"][1]["location"]["edge"] == 7
    assert found["cause"]["rank"] == 2 and "traceback" not in found["cause"]


def test_a_status_arrives_as_it_was_sent_and_nonsense_is_refused():
    assert records.from_text(JobStatus, records.to_text(STATUS)) == STATUS
    records.from_text(StatusRequest, records.to_text(StatusRequest()))
    for data in (b"\xff", b"\x0a\x01a", b"[]"):
        with pytest.raises(MessageError):
            records.from_text(StatusRequest, data)
        with pytest.raises(MessageError):
            records.from_text(JobStatus, data)

    def told(**changes: Any) -> JobStatus:
        return records.from_text(JobStatus, records.to_text(JobStatus("j", "p", 1, 1, **changes)))

    wrong = STATUS.workers[0].__class__(0, "0", "h", 1, state="asleep")
    with pytest.raises(MessageError, match="state"):
        told(workers=(wrong,))
    for seconds in ("nan", "inf", "-1"):
        with pytest.raises(MessageError, match=f"seconds is {seconds}"):
            told(seconds=float(seconds))


def test_a_job_can_be_asked_while_it_forms_and_while_it_runs(start_cluster):
    cluster = start_cluster(2)
    forming = ask(cluster)
    assert (forming.phase, forming.workers, forming.missing) == ("forming", (), [0, 1])
    joined = cluster.join_all("0", "1")
    position = joined[1].member.position
    position.location_source = lambda: Location(step=3, edge=7)
    position.text_source = lambda: "train step 3"
    position.waiting_source = lambda: (0, "relu: worker 0 -> worker 1")

    def is_known() -> bool:
        return ask(cluster).workers[1].location.waits_for == 0

    wait_until(is_known, "what it waits for")
    running = ask(cluster)
    assert (running.phase, running.missing) == ("running", [])
    assert running.job == joined[0].member.plan.job
    assert running.workers[1].position == "train step 3"
    assert running.workers[1].location.edge == 7
    assert "waits for worker 0: relu" in status_table(running)
    finish(cluster, joined)


def test_a_worker_that_makes_no_progress_tells_its_line(start_cluster):
    cluster = start_cluster(1)
    (one,) = cluster.join_all("0")

    def line() -> str:
        return ask(cluster).workers[0].location.source

    wait_until(lambda: "test_status.py" in line() or "cluster_helpers.py" in line(), "no line")
    finish(cluster, [one])


def test_a_job_with_a_token_tells_only_those_who_know_it(start_cluster):
    cluster = start_cluster(1, security=SecurityOptions(job_token=TOKEN))
    assert ask(cluster, Protection(token=TOKEN.encode())).phase == "forming"
    with pytest.raises(ClusterError, match=r"PERMISSION_DENIED.*no job token"):
        ask(cluster)
    with pytest.raises(ClusterError, match="does not know the job's token"):
        ask(cluster, Protection(token=b"another token than this one"))
    # Somebody who does not wait for the scheduler's proof, and invents one of their own.
    channel = grpc.insecure_channel(f"127.0.0.1:{cluster.port}")
    call = channel.stream_stream(f"/{SERVICE}/{STATUS_METHOD}")(
        iter([b"x" * 32, records.to_text(StatusRequest()).encode()]),
        metadata=(("graphsplit-nonce-bin", b"n" * 32),),
    )
    with pytest.raises(grpc.RpcError, match="does not know the job's token"):
        next(call)
    channel.close()
    assert ask(cluster, Protection(token=TOKEN.encode())).num_refused >= 2
    assert TOKEN not in "".join(cluster.log)
    joined = cluster.join_all("0")
    finish(cluster, joined)


def test_under_tls_any_certificate_of_the_job_may_ask_and_no_other(start_cluster, monkeypatch):
    monkeypatch.setattr(
        scheduler_module, "load_protection", lambda *_, **__: protection(SCHEDULER_NAME)
    )
    cluster = start_cluster(1)
    assert ask(cluster, protection(worker_name(0))).phase == "forming"
    for wrong in (UNPROTECTED, protection(worker_name(0), signed_by="theirs")):
        with pytest.raises(ClusterError, match="no status from"):
            ask(cluster, wrong)
    monkeypatch.setattr(
        "graphsplit.cluster.member.member.load_protection",
        lambda *_, **__: protection(worker_name(0)),
    )
    finish(cluster, cluster.join_all("0"))


def test_the_command_prints_a_table_or_an_object(start_cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # no job of another test lends its token
    for name in ("GS_JOB_TOKEN", "GS_JOB_TOKEN_FILE", "GS_TLS_CA"):
        monkeypatch.delenv(name, raising=False)
    cluster = start_cluster(1)
    address = f"127.0.0.1:{cluster.port}"
    shown = CliRunner().invoke(main, ["status", address])
    assert shown.exit_code == 0, shown.output
    assert "forming, generation 1, 0 of 1 workers" in shown.output
    monkeypatch.setenv("MS_SCHED_PORT", str(cluster.port))
    shown = CliRunner().invoke(main, ["status", "--json"])
    assert json.loads(shown.output)["phase"] == "forming"
    monkeypatch.delenv("MS_SCHED_PORT")
    jobs = [("127.0.0.1", port) for port in (cluster.port, 1, cluster.port)]  # one has ended
    monkeypatch.setattr(status_command, "local_jobs", lambda: jobs)
    shown = CliRunner().invoke(main, ["status"])
    assert shown.output.count("forming, generation 1, 0 of 1 workers") == 2, shown.output
    finish(cluster, cluster.join_all("0"))


def test_nobody_there_is_said_and_has_a_status(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # where jobs of this machine are known
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shown = CliRunner().invoke(main, ["status", f"127.0.0.1:{port}"])
    assert shown.exit_code == 1
    assert f"no status from 127.0.0.1:{port}: UNAVAILABLE" in shown.output
    monkeypatch.delenv("MS_SCHED_PORT", raising=False)
    for wrong in ("nonsense", "host:0", "host:99999", "a:b:1"):
        shown = CliRunner().invoke(main, ["status", wrong])
        assert shown.exit_code == 2
        assert "expected an address such as" in shown.output
    shown = CliRunner().invoke(main, ["status"])
    assert shown.exit_code == 1
    assert "no job that 'graphsplit run' started runs on this machine" in shown.output
