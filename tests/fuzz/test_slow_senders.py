"""Connections that say nothing, or say it slowly, are closed; the port serves others meanwhile."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from security_helpers import SCHEDULER_NAME, protection
from session_fuzzer import DEADLINE_S, PREFACE, SETTINGS

from graphsplit.security import grpc_ports
from graphsplit.security.grpc_ports import add_port, server_limits
from graphsplit.security.protection import UNPROTECTED, Protection

# The header of a HEADERS frame of 4096 bytes on stream 1, and two bytes of them.
BEGUN_HEADERS = b"\x00\x10\x00\x01\x04\x00\x00\x00\x01\x82\x86"


@pytest.fixture(params=["tcp", "tls"])
def port(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port with the limits of both planes, in less time."""
    monkeypatch.setattr(grpc_ports, "_HANDSHAKE_TIMEOUT_MS", 300)
    monkeypatch.setattr(grpc_ports, "_MAX_IDLE_MS", 300)
    options = server_limits(max_connections=8, max_metadata_bytes=8 << 10)
    shown: Protection = UNPROTECTED if request.param == "tcp" else protection(SCHEDULER_NAME)
    server = grpc.server(ThreadPoolExecutor(1), options=options, maximum_concurrent_rpcs=8)
    number = add_port(server, "127.0.0.1:0", shown)
    server.start()
    yield number
    server.stop(0).wait()


@pytest.mark.parametrize(
    "said",
    [b"", PREFACE[:7], PREFACE, PREFACE + SETTINGS, PREFACE + SETTINGS + BEGUN_HEADERS],
    ids=["nothing", "half a preface", "a preface", "settings", "half of the headers"],
)
def test_a_slow_connection_is_closed(port: int, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as link:
        link.sendall(said)
        try:
            while link.recv(4096):
                pass
        except ConnectionResetError:
            pass


def test_more_connections_than_allowed_are_closed_at_once(port: int) -> None:
    links = [socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) for _ in range(100)]
    closed = 0
    for link in links:
        with link:
            try:
                while link.recv(4096):
                    pass
            except ConnectionResetError:
                pass
            closed += 1
    assert closed == 100
