"""Numbers in Prometheus's format, from the scheduler and from a worker."""

from __future__ import annotations

import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_helpers import DEADLINE_S
from prometheus_client.parser import text_string_to_metric_families
from security_helpers import authority, protection, worker_name
from simulated.memory import MemoryFabric, MemoryTransport

from graphsplit.cluster.scheduler.decisions import view
from graphsplit.cluster.status.metrics import status_metrics
from graphsplit.cluster.wire.messages import Heartbeat
from graphsplit.errors import ConfigurationError
from graphsplit.job.meter import Meter
from graphsplit.metrics_port import metric, serve_metrics
from graphsplit.root_cause import Location
from graphsplit.security.issue import fill_folder
from graphsplit.security.options import SecurityOptions
from graphsplit.security.protection import UNPROTECTED, Protection
from graphsplit.settings import ClusterSettings, Watching
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.wait import WaitPolicy

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
NO_FILES = SecurityOptions()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def fetch(port: int, scheme: str = "http", context: ssl.SSLContext | None = None) -> str:
    url = f"{scheme}://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, timeout=DEADLINE_S, context=context) as answer:
        return answer.read().decode()


def read(port: int) -> Samples:
    """All samples that somebody who scrapes would get."""
    families = text_string_to_metric_families(fetch(port))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def serve(look, watching: Watching, protected: Protection = UNPROTECTED, files=NO_FILES):
    return serve_metrics(look, watching, files, protected, offset=0, what="the metrics of a test")


def one() -> Iterator[Any]:
    yield metric("answer", "The answer.", 42.0)


def test_a_scheduler_serves_what_it_knows_of_its_job(start_cluster):
    port = free_port()
    cluster = start_cluster(2, watching=Watching(metrics_port=port))
    joined = cluster.join_all("0", "1")
    found = read(port)
    assert found["graphsplit_phase", (("phase", "running"),)] == 1
    assert found["graphsplit_phase", (("phase", "failed"),)] == 0
    assert found["graphsplit_generation", ()] == 1
    assert found["graphsplit_workers_connected", ()] == 2
    assert found["graphsplit_recoveries_total", ()] == 0
    assert found["graphsplit_refused_connections_total", ()] == 0
    assert 0 <= found["graphsplit_heartbeat_age_seconds", (("rank", "1"),)] < DEADLINE_S
    assert ("process_open_fds", ()) in found
    for future in [cluster.submit(each.member.finish) for each in joined]:
        future.result(DEADLINE_S)
    for each in joined:
        each.member.close()
    assert cluster.wait_status() == 0
    with pytest.raises(urllib.error.URLError):
        fetch(port)


def test_the_state_of_each_worker_is_a_sample(drive):
    scheduler = drive(num_workers=2).form()
    scheduler.now = 7.0
    scheduler.say(1, Heartbeat(3, "x", location=Location(step=5)))
    scheduler.now = 9.0
    found = {
        family.name: {sample.labels.get("rank"): sample.value for sample in family.samples}
        for family in status_metrics(view.status(scheduler.state.job, 9.0))
    }
    assert found["graphsplit_heartbeat_age_seconds"] == {"0": 9.0, "1": 2.0}
    assert found["graphsplit_worker_step"] == {"0": 0.0, "1": 5.0}


def test_a_worker_counts_steps_bytes_and_waiting():
    meter = Meter()
    assert list(meter.timed("train", iter([1, 2]))) == [1, 2]
    spec = ChannelSpec(plan=0, edge=0, source=0, destination=1, dtype=torch.float32,
                       shape=(None,), max_bytes=64)  # fmt: skip
    fabric = MemoryFabric()
    transport = MemoryTransport(fabric, generation=1, policy=WaitPolicy())
    sender = meter.traffic.sender(transport.open_sender(spec), spec)
    receiver = meter.traffic.receiver(transport.open_receiver(spec), spec)
    sender.announce()
    sender.hold()
    assert sender.has_room() and not receiver.is_ready()
    sender.send(torch.ones(3), step=0, microbatch=0)
    receiver.expect()
    assert receiver.is_ready()
    assert receiver.receive(step=0, microbatch=0).tolist() == [1, 1, 1]
    sender.send(None, step=1, microbatch=0)
    assert receiver.receive(step=1, microbatch=0) is None
    port = free_port()
    stop = serve(lambda: meter.metrics(4), Watching(metrics_port=port))
    found = read(port)
    stop()
    assert found["graphsplit_sent_bytes_total", (("peer", "1"),)] == 12
    assert found["graphsplit_sent_messages_total", (("peer", "1"),)] == 2
    assert found["graphsplit_received_bytes_total", (("peer", "0"),)] == 12
    assert found["graphsplit_waiting_seconds_total", (("peer", "0"),)] > 0
    assert found["graphsplit_step_seconds_count", (("mode", "train"),)] == 1
    assert found["graphsplit_step_seconds_bucket", (("le", "300.0"), ("mode", "train"))] == 1
    assert found["graphsplit_generation", ()] == 4


def test_a_step_that_fails_is_not_counted():
    meter = Meter()

    def fails() -> Iterator[int]:
        yield 1
        raise ValueError

    with pytest.raises(ValueError):
        list(meter.timed("train", fails()))
    assert next(meter.metrics(1)).samples == []


def test_without_a_port_nothing_is_served_or_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    serve(one, Watching())()
    with pytest.raises(ConfigurationError, match=r"pip install 'graphsplit\[metrics\]'"):
        serve(one, Watching(metrics_port=free_port()))


def test_a_port_in_use_is_named():
    port = free_port()
    stop = serve(one, Watching(metrics_port=port))
    with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port} .*in use"):
        serve(one, Watching(metrics_port=port))
    stop()


def test_beyond_loopback_a_token_is_not_enough():
    watching = Watching(metrics_host="0.0.0.0", metrics_port=free_port())
    for protected in (UNPROTECTED, Protection(token=b"a token that only this job knows")):
        with pytest.raises(ConfigurationError, match="a job token does not protect them"):
            serve(one, watching, protected)
    serve(one, watching, Protection(trusts_network=True))()


def test_under_tls_only_holders_of_a_certificate_are_answered(tmp_path: Path):
    authority().write(tmp_path)
    fill_folder(tmp_path, num_workers=1, hosts=[], days=1)
    files = SecurityOptions(
        *(str(tmp_path / f) for f in ("ca.pem", "worker-0.pem", "worker-0.key"))
    )
    port = free_port()
    stop = serve(one, Watching(metrics_port=port), protection(worker_name(0)), files)
    context = ssl.create_default_context(cafile=files.tls_ca)
    context.check_hostname = False
    with pytest.raises((urllib.error.URLError, OSError)):
        fetch(port, "https", context)
    context.load_cert_chain(files.tls_cert, files.tls_key)
    assert "graphsplit_answer 42.0" in fetch(port, "https", context)
    stop()


def test_the_settings_of_all_processes_are_the_same():
    base = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_SCHED_PORT": "8118"}
    found = ClusterSettings.from_environ({**base, "GS_METRICS_PORT": "9100"})
    assert found is not None
    assert found.watching == replace(Watching(), metrics_port=9100)
    for wrong in ("0", "70000", "x"):
        with pytest.raises(ConfigurationError, match="GS_METRICS_PORT"):
            ClusterSettings.from_environ({**base, "GS_METRICS_PORT": wrong})
