"""Shared memory: who is let in, what is mapped, and what remains after a kill."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transport_helpers import DEADLINE_S, Workers, spec_of, start

from graphsplit.errors import TransportError
from graphsplit.transport.hub import Hub
from graphsplit.transport.session import Session
from graphsplit.transport.shm.links import encode_hello, listen
from graphsplit.transport.shm.region import SharedRegion, adopt_region, create_region
from graphsplit.transport.shm.slots import LEND_BYTES
from graphsplit.transport.shm.transport import SharedMemoryTransport, channel_bytes
from graphsplit.transport.wait import WaitPolicy

TOKENS = ("0" * 32, "1" * 32)
SESSION = Session("job", 1, 1, TOKENS)
HELLO = Session("job", 1, 0, TOKENS).hello_to(1)
NAME = f"graphsplit-test-{os.getpid()}"


@pytest.fixture
def victim() -> Iterator[SharedMemoryTransport]:
    """Worker 1 of a job of two, to be approached by hand."""
    transport = SharedMemoryTransport(
        listen(NAME), session=SESSION, names=(None, NAME), policy=WaitPolicy(deadline_s=DEADLINE_S)
    )
    yield transport
    transport.close()


@pytest.fixture
def stranger() -> Iterator[socket.socket]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(DEADLINE_S)
    yield connection
    connection.close()


def bell() -> int:
    return create_region("bell", 4096)[1]


def knock(stranger: socket.socket, packet: bytes, *fds: int) -> bytes:
    stranger.connect("\0" + NAME)
    return say(stranger, packet, *fds)


def say(stranger: socket.socket, packet: bytes, *fds: int) -> bytes:
    socket.send_fds(stranger, [packet], list(fds))
    for fd in fds:
        os.close(fd)
    answer, received, _, _ = socket.recv_fds(stranger, 4096, 1)
    for fd in received:
        os.close(fd)
    return answer


@pytest.mark.parametrize(
    ("packet", "answer"),
    [
        (encode_hello(HELLO), b"GSW1"),
        (encode_hello(replace(HELLO, job="other")), b"GSR1job: this worker belongs to another one"),
        (encode_hello(replace(HELLO, generation=2)), b"GSR1generation: expected 1, got 2"),
        (encode_hello(replace(HELLO, source=2)), b"GSR1source: expected a rank below 2, got 2"),
        (encode_hello(replace(HELLO, source=-1)), b"GSR1source: expected a rank below 2, got -1"),
        (encode_hello(replace(HELLO, destination=0)), b"GSR1destination: this is worker 1"),
        (encode_hello(replace(HELLO, token="2" * 32)), b"GSR1source: this is not worker 0"),
        (encode_hello(replace(HELLO, token="\xff" * 16)), b"GSR1source: this is not worker 0"),
        (b"GET / HTTP/1.1", b"GSR1no hello"),
        (b"GSH1", b"GSR1no hello"),
    ],
)
def test_only_members_are_let_in(
    victim: SharedMemoryTransport, stranger: socket.socket, packet: bytes, answer: bytes
) -> None:
    assert knock(stranger, packet, bell()).startswith(answer)


def test_a_second_connection_of_one_source_is_refused(
    victim: SharedMemoryTransport, stranger: socket.socket
) -> None:
    assert knock(stranger, encode_hello(HELLO), bell()) == b"GSW1"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as second:
        second.settimeout(DEADLINE_S)
        assert b"connected already" in knock(second, encode_hello(HELLO), bell())


def test_a_hello_without_a_bell_or_with_a_bad_one_is_refused(
    victim: SharedMemoryTransport, stranger: socket.socket
) -> None:
    assert knock(stranger, encode_hello(HELLO)) == b"GSR1no bell"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as second:
        second.settimeout(DEADLINE_S)
        fd = os.memfd_create("bell")
        os.ftruncate(fd, 4096)
        assert b"sealed against shrinking" in knock(second, encode_hello(HELLO), fd)


def channel(plan: int, edge: int) -> bytes:
    return struct.pack("<4sqq", b"GSC1", plan, edge)


@pytest.mark.parametrize("fault", ["too small", "too large", "not sealed", "a pipe"])
def test_memory_that_could_fault_is_refused(
    victim: SharedMemoryTransport, stranger: socket.socket, fault: str
) -> None:
    knock(stranger, encode_hello(HELLO), bell())
    size = channel_bytes(spec_of())
    if fault == "a pipe":
        fd, other = os.pipe()
        os.close(other)
    elif fault == "not sealed":
        fd = os.memfd_create("channel")
        os.ftruncate(fd, size)
    else:
        _, fd = create_region("channel", size + (64 if fault == "too large" else -64))
    socket.send_fds(stranger, [channel(0, 0)], [fd])
    os.close(fd)
    with pytest.raises(TransportError, match=r"expected .* got"):
        victim.open_receiver(spec_of())


@pytest.mark.parametrize("packet", [b"noise", channel(0, 0)])
def test_breaking_the_protocol_ends_the_link(
    victim: SharedMemoryTransport, stranger: socket.socket, packet: bytes
) -> None:
    knock(stranger, encode_hello(HELLO), bell())
    stranger.send(packet)  # Without the memory that belongs to it.
    with pytest.raises(TransportError, match="broke the protocol"):
        victim.open_receiver(spec_of())


def test_a_refused_source_is_told_why() -> None:
    hubs = [Hub(bind_host="127.0.0.1", mode="shm") for _ in range(2)]
    peers = [hub.endpoints for hub in hubs]
    policy = WaitPolicy(deadline_s=DEADLINE_S)
    transports = [
        hub.connect(rank=rank, job="job", generation=rank, peers=peers, policy=policy)
        for rank, hub in enumerate(hubs)
    ]
    with pytest.raises(TransportError, match="refused this worker: generation: expected 1, got 0"):
        sender = transports[0].open_sender(spec_of(depth=1))
        for step in range(2):
            sender.send(None, step=step, microbatch=0)
    for transport in transports:
        transport.close()


def test_memory_that_is_not_there_is_an_error_not_a_signal() -> None:
    with pytest.raises(TransportError, match="shared memory"):
        create_region("huge", 1 << 62)
    region, fd = create_region("small", 4096)
    os.close(fd)
    beyond = SharedRegion.__new__(SharedRegion)
    beyond.address, beyond.size_bytes = region.address + (1 << 46), 4096
    with pytest.raises(TransportError, match="Fix: give the job more memory"):
        beyond.reserve(0, 4096)


def test_memory_that_is_never_used_is_never_taken() -> None:
    region, fd = create_region("channel", 1 << 30)
    region.reserve(0, 4096)
    assert os.fstat(fd).st_blocks * 512 == 4096
    assert adopt_region(fd, 1 << 30, what="test").size_bytes == 1 << 30


CHILD = """
import json, os, sys, torch
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.hub import Hub
from graphsplit.transport.wait import WaitPolicy

hub = Hub(bind_host="127.0.0.1", mode="shm")
print(json.dumps(hub.endpoints), flush=True)
peers = json.loads(sys.stdin.readline())
policy = WaitPolicy(deadline_s=20)
transport = hub.connect(rank=1, job="job", generation=1, peers=peers, policy=policy)
there = ChannelSpec(0, 0, 0, 1, torch.float32, (64, 64), 1 << 16)
back = ChannelSpec(0, 1, 1, 0, torch.float32, (64, 64), 1 << 16)
sender, receiver = transport.open_sender(back), transport.open_receiver(there)
for step in range(int(sys.argv[1])):
    value = receiver.receive(step=step, microbatch=0)
    sender.send(value.t() * 2, step=step, microbatch=0)
print("done", flush=True)
sys.stdin.readline()
transport.close()
"""


@pytest.mark.real_processes
@pytest.mark.parametrize("ending", ["orderly", "killed"])
def test_two_processes_exchange_values_and_notice_the_end(ending: str) -> None:
    import json

    command = [sys.executable, "-c", CHILD, "500"]
    segments = os.listdir("/dev/shm")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        hub = Hub(bind_host="127.0.0.1", mode="shm")
        peers = [hub.endpoints, json.loads(child.stdout.readline())]
        child.stdin.write(json.dumps(peers) + "\n")
        child.stdin.flush()
        policy = WaitPolicy(deadline_s=DEADLINE_S)
        transport = hub.connect(rank=0, job="job", generation=1, peers=peers, policy=policy)
        spec = spec_of(shape=(64, 64), max_bytes=1 << 16)
        sender = transport.open_sender(spec)
        receiver = transport.open_receiver(replace(spec, edge=1, source=1, destination=0))
        for step in range(500):
            value = torch.randn(64, 64)
            sender.send(value, step=step, microbatch=0)
            received = receiver.receive(step=step, microbatch=0)
            assert received is not None and torch.equal(received, value.t() * 2)
        waiting = start(lambda: receiver.receive(step=500, microbatch=0))
        assert child.stdout.readline() == "done\n"
        if ending == "killed":
            child.send_signal(signal.SIGKILL)
        else:
            child.stdin.close()
        with pytest.raises(TransportError, match="worker 1: closed the connection"):
            waiting.result(DEADLINE_S)
        transport.close()
    assert os.listdir("/dev/shm") == segments


def test_values_published_before_the_bell_of_the_peer_is_known_are_not_lost() -> None:
    workers = Workers("shm", 2, DEADLINE_S)
    senders = [workers.transports[0].open_sender(spec_of(edge=edge)) for edge in range(20)]
    for edge, sender in enumerate(senders):
        sender.send(torch.full((4,), float(edge)), step=0, microbatch=0)
    for edge in range(20):
        received = workers.transports[1].open_receiver(spec_of(edge=edge))
        value = received.receive(step=0, microbatch=0)
        assert value is not None and value[0] == edge
    workers.close()


def test_values_of_many_layouts_take_turns_in_the_same_slots() -> None:
    workers = Workers("shm", 2, DEADLINE_S)
    large = LEND_BYTES // 4
    spec = replace(spec_of(shape=(None,), max_bytes=LEND_BYTES, depth=3), lends=True)
    sender, receiver = workers.open(spec)
    for step, size in enumerate([4, 0, large, 4, 7, large, 1, 2, 3, 4, 5, 6, 7, 8, 9, large, 4]):
        value = torch.arange(size, dtype=torch.float32) + step if size else None
        sender.send(value, step=step, microbatch=0)
        received = receiver.receive(step=step, microbatch=0)
        if value is None:
            assert received is None
        else:
            assert received is not None and torch.equal(received, value)
    workers.close()
