"""A peer from which nothing comes back, without a word about it: a cut cable, a power cut."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from transport_helpers import DEADLINE_S, spec_of, start

from graphsplit.errors import TransportError
from graphsplit.failure import AbortSignal, FailureCause
from graphsplit.security.grpc_ports import keepalive
from graphsplit.transport.base import Transport
from graphsplit.transport.grpc import outbound
from graphsplit.transport.grpc.stream_end import Patience, end_of, is_silence
from graphsplit.transport.hub import Hub
from graphsplit.transport.wait import WaitPolicy

_CAUSE = FailureCause("lost", "the network was cut")
SILENCE_S = 1.0
SILENT = r"worker 0: nothing came back from it for 1 s \(see MS_NODE_TIMEOUT\)"


class Cable:
    """Connections to an address go through it, until it is cut; nobody is told of that."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._door = socket.create_server(("127.0.0.1", 0))
        self._is_cut = threading.Event()
        self._sockets = [self._door]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)
        self.address = "{}:{}".format(*self._door.getsockname())

    def _start(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._door.accept()
                host, _, port = self._target.rpartition(":")
                far = socket.create_connection((host, int(port)))
                self._sockets += [near, far]
                self._start(lambda a=near, b=far: self._carry(a, b))  # type: ignore[misc]
                self._start(lambda a=far, b=near: self._carry(a, b))  # type: ignore[misc]

    def _carry(self, source: socket.socket, destination: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if not self._is_cut.is_set():
                    destination.sendall(data)
            if not self._is_cut.is_set():
                destination.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        self._is_cut.set()

    def close(self) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(DEADLINE_S)


class Pair:
    """Two workers. What worker 1 opens to worker 0, and the other way round, goes by a cable."""

    def __init__(self, kind: str) -> None:
        self.aborts = [AbortSignal(), AbortSignal()]
        hubs = [
            Hub(bind_host="127.0.0.1", mode=kind, silence_s=SILENCE_S)  # type: ignore[arg-type]
            for _ in range(2)
        ]
        self.cables = [Cable(hub.endpoints["grpc"]) for hub in hubs]
        peers = [
            {**hub.endpoints, "grpc": cable.address}
            for hub, cable in zip(hubs, self.cables, strict=True)
        ]
        self.transports: list[Transport] = [
            hub.connect(
                rank=rank, job="job", generation=1, peers=peers,
                policy=WaitPolicy(self.aborts[rank], DEADLINE_S),
            )
            for rank, hub in enumerate(hubs)
        ]  # fmt: skip

    def cut(self) -> None:
        for cable in self.cables:
            cable.cut()

    def close(self) -> None:
        for transport in self.transports:
            transport.close()
        for cable in self.cables:
            cable.close()


@pytest.fixture(params=["grpc", "gloo"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.close()


def test_both_ends_notice_that_nothing_comes_back(pair: Pair):
    """Long before the deadline of a wait, though both could still send."""
    receivers = []
    for source in (0, 1):
        spec = spec_of(edge=source, source=source, destination=1 - source)
        sender = pair.transports[source].open_sender(spec)
        receivers.append(pair.transports[1 - source].open_receiver(spec))
        sender.send(torch.ones(4), step=0, microbatch=0)
        assert receivers[-1].receive(step=0, microbatch=0) is not None
    pair.cut()
    waits = [start(lambda end=end: end.receive(step=1, microbatch=0)) for end in receivers]
    told = []
    for wait in waits:
        with pytest.raises(TransportError) as found:
            wait.result(DEADLINE_S)
        told.append(str(found.value))
    # Gloo's own connection is not cut here: one end may see that the other one gave it up.
    assert any(re.search(r"worker \d: nothing came back from it for 1 s", text) for text in told), (
        told
    )
    for abort in pair.aborts:  # as the job then does
        abort.set(_CAUSE)


def send_to(address: str) -> None:
    """A worker sends to an address at which nobody answers, and gives up."""
    hub = Hub(bind_host="127.0.0.1", mode="grpc", silence_s=SILENCE_S)
    peers = [{"token": "0" * 32, "grpc": address}, hub.endpoints]
    abort = AbortSignal()
    policy = WaitPolicy(abort, DEADLINE_S)
    transport = hub.connect(rank=1, job="job", generation=1, peers=peers, policy=policy)
    sender = transport.open_sender(spec_of(source=1, destination=0))
    with pytest.raises(TransportError, match=SILENT):
        sender.send(torch.ones(4), step=0, microbatch=0)
    abort.set(_CAUSE)
    transport.close()


def test_a_peer_that_cannot_be_reached_at_all_is_noticed():
    """Its port takes connections, as the kernel of a frozen process does, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        send_to("{}:{}".format(*mute.getsockname()))


def test_a_pair_that_cannot_connect_is_named_long_before_it_fails_the_job(
    monkeypatch: pytest.MonkeyPatch,
):
    """A port whose kernel answers no more, as behind a firewall that drops what comes."""
    monkeypatch.setattr(outbound, "LATE_S", 0.1)
    monkeypatch.setattr(outbound, "_PROBE_S", 0.1)
    said: list[str] = []
    monkeypatch.setattr(outbound, "say", lambda line, **_: said.append(line))
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        address = "{}:{}".format(*full.getsockname())
        send_to(address)
    (line,) = said
    assert line.startswith("this worker reaches the scheduler, and cannot reach worker 0 at ")
    assert f"{address} (timed out)\n  Fix: open the ports between the two" in line


def test_a_peer_that_is_only_slow_is_not_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outbound, "LATE_S", 0.1)
    said: list[str] = []
    monkeypatch.setattr(outbound, "say", lambda line, **_: said.append(line))
    test_a_peer_that_cannot_be_reached_at_all_is_noticed()
    assert not said


@pytest.mark.parametrize(
    "detail",
    [
        "recvmsg:Connection timed out (110)",
        "ping timeout",
        "keepalive timeout",
        "failed to connect to all addresses; last error: UNKNOWN: Timeout occurred: FD Shutdown",
        "sendmsg: No route to host (113)",
    ],
)
def test_words_of_grpc_that_mean_silence(detail: str):
    assert is_silence(detail)
    assert "nothing came back from it for 4 s" in end_of("UNAVAILABLE", detail, 4).reason


@pytest.mark.parametrize("detail", ["Connection refused (111)", "Socket closed", "Stream removed"])
def test_words_of_grpc_that_mean_something_else(detail: str):
    assert not is_silence(detail)
    assert end_of("UNAVAILABLE", detail, 4).reason == f"unavailable: {detail}"


def test_whoever_answers_is_waited_for_however_often_it_refuses():
    patience = Patience(4)
    assert not patience.is_over("connect: timed out", 0, 3)
    assert not patience.is_over("Connection refused (111)", 3, 9)
    assert not patience.is_over("connect: timed out", 9, 12)
    assert patience.is_over("connect: timed out", 12, 13)


@pytest.mark.parametrize(("silence_s", "interval_ms"), [(0.1, 500), (30, 3_000), (3_600, 10_000)])
def test_pings_come_several_times_in_the_silence_that_is_permitted(
    silence_s: float, interval_ms: int
):
    options = dict(keepalive(silence_s))
    assert options["grpc.keepalive_time_ms"] == interval_ms
    # A ping may have been answered just before: with the next one it is as long as is permitted.
    unanswered_ms = max(1_000, int(silence_s * 1_000) - interval_ms)
    assert options["grpc.keepalive_timeout_ms"] == unanswered_ms
    # The other end, which waits longer, must not take them for an attack.
    patient = dict(keepalive(silence_s, patience=2))
    assert patient["grpc.http2.min_ping_interval_without_data_ms"] == interval_ms // 2
    assert patient["grpc.keepalive_timeout_ms"] == 2 * unanswered_ms
