"""What gRPC itself writes to the scheduler's log, however many strangers connect."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from graphsplit.cluster.scheduler.grpc_lines import GrpcLines, limited_grpc_lines
from graphsplit.security.issue import fill_folder

LINE = (
    b"I0000 00:00:1764060275.123456   20461 ssl_transport_security.cc:1850] Handshake failed with "
    b"error SSL_ERROR_SSL: WRONG_VERSION_NUMBER\n"
)
NUM_CONNECTIONS = 10_000


def test_of_grpcs_lines_some_are_shown_and_the_others_counted() -> None:
    lines = GrpcLines(0.0)
    assert lines.shown(LINE * 1_000, 0.0) == LINE * 20
    assert lines.shown(LINE, 2.0) == LINE[:-1] + b" (and 980 more before it)\n"


def test_all_other_lines_are_shown_as_they_come() -> None:
    lines = GrpcLines(0.0)
    mine = b"Traceback (most recent call last):\n  I0000: not gRPC's\n\n"
    assert lines.shown(mine * 100, 0.0) == mine * 100
    assert lines.shown(b"without an ", 0.0) == b"" and lines.shown(b"end\n", 0.0) == (
        b"without an end\n"
    )
    assert lines.shown(b"the last", 0.0) == b"" and lines.rest() == b"the last"
    assert lines.shown(b"x" * 70_000, 0.0) == b"x" * 70_000 + b"\n"


def test_standard_error_is_as_before_when_it_ends(capfd: pytest.CaptureFixture[str]) -> None:
    with limited_grpc_lines():
        for _ in range(100):
            os.write(2, LINE)
        sys.stderr.write("a word of the scheduler's\n")
    os.write(2, LINE)
    said = capfd.readouterr().err
    assert said.count("Handshake failed") == 21
    assert "a word of the scheduler's\n" in said


@pytest.mark.real_processes
def test_ten_thousand_connections_write_little_into_a_schedulers_log(tmp_path: Path) -> None:
    from security_helpers import authority

    authority().write(tmp_path)
    fill_folder(tmp_path, num_workers=1, hosts=[], days=1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    files = {"GS_TLS_CA": "ca.pem", "GS_TLS_CERT": "scheduler.pem", "GS_TLS_KEY": "scheduler.key"}
    variables = {
        **{name: str(tmp_path / file) for name, file in files.items()},
        "MS_ROLE": "MS_SCHED",
        "MS_WORKER_NUM": "1",
        "MS_SCHED_PORT": str(port),
    }
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "graphsplit.cluster.scheduler"],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def knock(_: int) -> None:
        # Strangers that are too many are shown out at once.
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", port), 10) as one,
        ):
            one.sendall(b"GET / HTTP/1.1\r\n\r\n")

    with process:
        try:
            assert process.stdout is not None
            assert "listening" in process.stdout.readline()
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(knock, range(NUM_CONNECTIONS)))
        finally:
            process.terminate()
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "Handshake failed" in errors
    assert len(output) + len(errors) < 100_000
