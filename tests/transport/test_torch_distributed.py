"""Links over ``torch.distributed``: who and what is believed, and what travels together."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_helpers import DEADLINE_S, Workers, spec_of, start

from graphsplit.errors import FrameError, TransportError
from graphsplit.transport.frame import MESSAGE, FrameEncoder
from graphsplit.transport.hub import Hub
from graphsplit.transport.torch.link import TorchLink
from graphsplit.transport.torch.rendezvous import Rendezvous
from graphsplit.transport.torch.transport import TorchTransport
from graphsplit.transport.torch.wire import (
    MESSAGE_BYTES,
    MESSAGE_TAG,
    PAYLOAD_TAG,
    MessageBuffer,
    RecordKind,
    WireRecord,
)
from graphsplit.transport.torch.writer import Writer
from graphsplit.transport.wait import WaitPolicy

SPEC = spec_of(depth=1)


@pytest.fixture
def workers() -> Any:
    """Two workers over Gloo."""
    made = Workers("gloo", 2, DEADLINE_S)
    yield made
    made.close()


def test_the_default_process_group_is_the_users(workers: Workers) -> None:
    assert not dist.is_initialized()
    sender, receiver = workers.open(SPEC)
    sender.send(torch.ones(4), step=0, microbatch=0)
    assert receiver.receive(step=0, microbatch=0) is not None
    assert not dist.is_initialized()


def test_values_of_all_sizes_pass_each_other_in_any_order(workers: Workers) -> None:
    sizes = [4, 70_000, 16, 300_000]
    specs = [
        spec_of(shape=(size,), edge=edge, max_bytes=4 * size) for edge, size in enumerate(sizes)
    ]
    ends = [workers.open(spec) for spec in specs]
    for step in range(2):
        for (sender, _), size in zip(ends, sizes, strict=True):
            sender.send(torch.full((size,), float(step)), step=step, microbatch=0)
    for step in range(2):
        for (_, receiver), size in reversed(list(zip(ends, sizes, strict=True))):
            value = receiver.receive(step=step, microbatch=0)
            assert value is not None and value.shape == (size,) and value[-1] == step


@pytest.mark.parametrize("keeps", [True, False])
def test_a_value_is_copied_unless_nobody_writes_to_it(workers: Workers, keeps: bool) -> None:
    spec = replace(spec_of(shape=(100_000,), max_bytes=400_000), keeps=keeps)
    sender, receiver = workers.open(spec)
    value = torch.arange(100_000.0)
    expected, lies_at = value.clone(), value.data_ptr()
    sender.send(value, step=0, microbatch=0)
    ((payload, _),) = sender._under_way  # type: ignore[attr-defined]
    assert (payload.data_ptr() == lies_at) == keeps
    if not keeps:
        value.zero_()
    del value, payload
    others = [torch.zeros(100_000) for _ in range(4)]
    received = receiver.receive(step=0, microbatch=0)
    assert (
        received is not None and torch.equal(received, expected) and not any(map(torch.any, others))
    )


def test_a_large_value_under_way_when_its_plan_is_closed_does_not_hold_up_others(
    workers: Workers,
) -> None:
    sender, receiver = workers.open(spec_of(plan=0))
    late, _ = workers.open(spec_of(shape=(100_000,), max_bytes=400_000, plan=1))
    sender.send(torch.ones(4), step=0, microbatch=0)
    assert receiver.receive(step=0, microbatch=0) is not None
    workers.transports[1].close_plan(1)
    late.send(torch.ones(100_000), step=0, microbatch=0)
    sender.send(torch.ones(4), step=1, microbatch=0)
    assert receiver.receive(step=1, microbatch=0) is not None


class _FakeGloo:
    """Notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        self.sent.append((tag, tensors[0].numel()))
        return type("Work", (), {"wait": lambda self, timeout: True})()


def test_records_that_may_wait_travel_with_the_next() -> None:
    gloo, writer = _FakeGloo(), Writer()
    writer.start(gloo, 1, WireRecord(RecordKind.PROOF, header=b"p"))
    gloo.sent.clear()
    value = torch.ones(16)
    small = WireRecord(RecordKind.SMALL, header=b"h" * 72, payload_bytes=64)
    for hold in (True, True, False):
        writer.put(small, address=value.data_ptr(), hold=hold)
    assert len(gloo.sent) == 1 and gloo.sent[0][0] == MESSAGE_TAG
    writer.put(small, address=value.data_ptr(), hold=True)
    writer.put_large(
        WireRecord(RecordKind.LARGE, header=b"h", payload_bytes=1 << 20), torch.empty(1 << 20)
    )
    assert [tag for tag, _ in gloo.sent] == [MESSAGE_TAG, MESSAGE_TAG, PAYLOAD_TAG, PAYLOAD_TAG]


records = st.builds(
    WireRecord,
    kind=st.sampled_from([RecordKind.CREDIT, RecordKind.SMALL, RecordKind.LARGE, RecordKind.BYE]),
    plan=st.integers(-(2**63), 2**63 - 1),
    edge=st.integers(-(2**63), 2**63 - 1),
    number=st.integers(0, 2**32 - 1),
    header=st.binary(max_size=200),
    payload_bytes=st.integers(0, 5000),
)


@given(st.lists(records, max_size=8))
def test_records_read_back_as_they_were_written(written: list[WireRecord]) -> None:
    buffer = MessageBuffer()
    for record in written:
        buffer.write(record)
    assert buffer.written().numel() == buffer.used
    assert [record for record, _ in buffer.read()] == written


@settings(max_examples=300)
@given(st.binary(min_size=1, max_size=400), st.integers(0, 2**32 - 1))
def test_no_message_is_believed_beyond_its_end(noise: bytes, count: int) -> None:
    buffer = MessageBuffer()
    octets = torch.frombuffer(bytearray(count.to_bytes(4, "little")), dtype=torch.uint8)
    buffer.memory[:4] = octets
    buffer.memory[64 : 64 + len(noise)] = torch.frombuffer(bytearray(noise), dtype=torch.uint8)
    try:
        for record, address in buffer.read():
            inline = record.payload_bytes if record.kind is RecordKind.SMALL else 0
            assert address + inline <= buffer.address + MESSAGE_BYTES
    except FrameError:
        pass


class Attacker:
    """A member that does not keep to the protocol: worker 0, at its end of the group."""

    def __init__(self, victim: Any) -> None:
        hubs = [Hub(bind_host="127.0.0.1", mode="gloo") for _ in range(2)]
        peers = [hub.endpoints for hub in hubs]
        policy = WaitPolicy(deadline_s=DEADLINE_S)
        self.routers = [
            hub.connect(rank=rank, job="job", generation=1, peers=peers, policy=policy)
            for rank, hub in enumerate(hubs)
        ]
        self.receiver: Any = self.routers[1].open_receiver(SPEC)
        mine: TorchTransport = self.routers[0]._transports["gloo"]  # type: ignore[attr-defined]
        meeting = Rendezvous(mine._meetings, session=mine._session, peer=1, num_workers=2)
        meeting.swap_nonces()
        device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        self.out, self.into = meeting.gloo_groups(device)
        self.proof = WireRecord(RecordKind.PROOF, header=meeting.proof(0, 1))
        self.held: list[Any] = [meeting.store, device, victim]

    def say(self, *records: WireRecord) -> None:
        """Send a message."""
        buffer = MessageBuffer()
        for record in records:
            buffer.write(record)
        self.held.append((buffer, self.out.send([buffer.written()], 1, MESSAGE_TAG)))

    def prove(self, proof: bytes) -> None:
        """Say who this is on the way back."""
        said = torch.frombuffer(bytearray(proof), dtype=torch.uint8)
        self.held.append((said, self.into.send([said], 1, MESSAGE_TAG)))
        heard = torch.empty_like(said)
        self.held.append((heard, self.out.recv([heard], 1, MESSAGE_TAG)))

    def close(self) -> None:
        """Leave, and close the victim."""
        nothing = torch.empty(1, dtype=torch.uint8)
        for group in (self.out, self.into):
            with pytest.raises(RuntimeError):
                group.recv([nothing], 1, 9).wait(timedelta(milliseconds=1))
        del group
        self.out = self.into = None
        self.held.clear()
        for future in [start(router.close) for router in self.routers]:
            future.result(DEADLINE_S)


@pytest.fixture
def attacker() -> Any:
    """Worker 0, which does as it likes, and worker 1 with one open channel."""
    made = Attacker(None)
    yield made
    made.close()


def header(sequence: int = 0, generation: int = 1) -> bytes:
    frame = FrameEncoder(SPEC, generation=generation).frame_of(torch.ones(4))
    return MESSAGE.pack(sequence, 0, 0) + frame.raw


VALUE = WireRecord(RecordKind.SMALL, 0, 0, 0, header(), 16)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([WireRecord(RecordKind.PROOF, header=b"?" * 32)], "a stranger answered in its place"),
        ([VALUE], "a stranger answered in its place"),
        ([None, VALUE._replace(edge=7)], "plan 0, edge 7, which is not open"),
        ([None, VALUE._replace(header=header(generation=2))], "generation: expected 1, got 2"),
        ([None, VALUE._replace(header=header(1))], "sequence number: expected 0, got 1"),
        ([None, VALUE._replace(payload_bytes=32)], "announced 32 bytes of payload; expected 16"),
        ([None, VALUE, VALUE._replace(header=header(1))], "at most 1 messages under way"),
        ([None, VALUE._replace(kind=RecordKind.DEVICE)], "what is on a device"),
        ([None, None], "said twice who it is"),
    ],
)
def test_what_the_plan_does_not_expect_breaks_the_link(
    attacker: Attacker, said: list[WireRecord | None], reason: str
) -> None:
    attacker.prove(attacker.proof.header)
    for record in said:
        attacker.say(record or attacker.proof)
    broken(attacker, reason)


def test_a_stranger_at_the_end_that_values_go_to_breaks_the_link(attacker: Attacker) -> None:
    attacker.prove(b"?" * 32)
    attacker.say(attacker.proof)
    broken(attacker, "a stranger answered in its place")


def broken(attacker: Attacker, reason: str) -> None:
    """Wait until the victim's link is, and for which reason."""
    incoming = attacker.receiver._incoming
    deadline = time.monotonic() + DEADLINE_S
    while incoming.broken is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(FrameError, match=reason):
        for _ in range(2):
            attacker.receiver.receive(step=0, microbatch=0)


def test_gloo_takes_values_on_devices_through_host_memory(workers: Workers) -> None:
    sender = workers.transports[0].open_sender(replace(spec_of(), device="cuda:0"))
    receiver = workers.transports[1].open_receiver(spec_of())
    sender.send(torch.arange(4.0), step=0, microbatch=0)  # copied, wherever it is
    received = receiver.receive(step=0, microbatch=0)
    assert received is not None and torch.equal(received, torch.arange(4.0))


def test_closing_while_the_peer_has_not_come_does_not_wait_for_it() -> None:
    made = Workers("gloo", 2, DEADLINE_S)
    receiver = made.transports[1].open_receiver(SPEC)
    receiving = start(lambda: receiver.receive(step=0, microbatch=0))
    made.close()
    with pytest.raises(TransportError):
        receiving.result(DEADLINE_S)
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("graphsplit-torch") for name in names)


def test_closing_while_two_connect_leaves_no_thread() -> None:
    # Gloo's connecting cannot be stopped: a peer that left halfway kept the other's thread in it.
    for attempt in range(30):
        made = Workers("gloo", 2, DEADLINE_S)
        made.open(SPEC)
        time.sleep(attempt / 1500)  # up to the whole time that connecting takes
        made.close()
        names = [thread.name for thread in threading.enumerate()]
        assert not any(name.startswith("graphsplit-torch") for name in names), attempt


def test_a_value_before_there_is_a_link_is_an_error_and_not_lost() -> None:
    with pytest.raises(TransportError, match="without credit"):
        Writer().put(WireRecord(RecordKind.SMALL, payload_bytes=4))


def test_who_waits_reads_and_the_thread_reads_for_who_does_not(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = []
    take = TorchLink._take_value

    def noting(self: TorchLink, *given: Any) -> None:
        readers.append(threading.current_thread().name)
        take(self, *given)

    monkeypatch.setattr(TorchLink, "_take_value", noting)
    sender, receiver = workers.open(SPEC)
    back, other = workers.open(spec_of(edge=1, source=1, destination=0))

    def echo() -> None:
        for step in range(100):
            back.send(receiver.receive(step=step, microbatch=0), step=step, microbatch=0)

    echoing = threading.Thread(target=echo, name="program 1")
    echoing.start()
    for step in range(100):
        sender.send(torch.ones(4), step=step, microbatch=0)
        assert other.receive(step=step, microbatch=0) is not None
    echoing.join(DEADLINE_S)
    by_programs = sum(not name.startswith("graphsplit-torch") for name in readers)
    assert by_programs > 20, readers  # of 200; the rest on a busy machine
    readers.clear()
    sender.send(torch.ones(4), step=100, microbatch=0)
    deadline = time.monotonic() + DEADLINE_S
    while not receiver.is_ready() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert [name.rpartition("-")[0] for name in readers] == ["graphsplit-torch"]


def warmed_up(workers: Workers) -> tuple[Any, Any]:
    """A channel whose next receive is read by who waits."""
    sender, receiver = workers.open(SPEC)
    for step in range(2):
        sender.send(torch.ones(4), step=step, microbatch=0)
        assert receiver.receive(step=step, microbatch=0) is not None
    return sender, receiver


def test_a_signal_is_handled_while_the_main_thread_reads(workers: Workers) -> None:
    _, receiver = warmed_up(workers)

    def handle(*_: Any) -> None:
        raise InterruptedError("by a signal")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(InterruptedError):
            receiver.receive(step=2, microbatch=0)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_reader_finds_within_a_second_that_its_channel_was_closed(workers: Workers) -> None:
    _, receiver = warmed_up(workers)
    receiving = start(lambda: receiver.receive(step=2, microbatch=0))
    time.sleep(0.1)
    workers.transports[1].close_plan(SPEC.plan)
    with pytest.raises(TransportError, match="the channel was closed"):
        receiving.result(DEADLINE_S)


def test_what_a_reader_in_inference_mode_files_for_others_is_no_inference_tensor(
    workers: Workers,
) -> None:
    sender, receiver = warmed_up(workers)
    first, mine = workers.open(spec_of(edge=1))
    sender.send(torch.ones(4), step=2, microbatch=0)
    first.send(torch.ones(4), step=0, microbatch=0)
    with torch.inference_mode():
        assert mine.receive(step=0, microbatch=0) is not None
    received = receiver.receive(step=2, microbatch=0)
    assert received is not None and not received.is_inference()
