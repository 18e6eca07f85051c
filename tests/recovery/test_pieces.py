"""Parts, streams, agreements and remembered results, each by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from recovery_features.calls import Late
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference
from simulated.memory import MemoryFabric, MemoryTransport
from torch import nn

import graphsplit as gs
from graphsplit.cluster.member.identity import ReportedPosition
from graphsplit.encoding import records
from graphsplit.encoding.packed import FlatTensors
from graphsplit.errors import (
    CheckpointError,
    ClusterError,
    ConfigurationError,
    FrameError,
    JobFailedError,
    StateError,
)
from graphsplit.failure import AbortSignal, FailureCause
from graphsplit.job.group import read_record
from graphsplit.job.script import ModelCall
from graphsplit.job.stream import (
    CHUNK_BYTES,
    HEADER,
    SNAPSHOTS,
    TOGETHER_BYTES,
    IncomingStream,
    OutgoingStream,
    channel_spec,
    send,
)
from graphsplit.recovery.agreement import START, Offer, choose
from graphsplit.recovery.log import Entry, kept
from graphsplit.recovery.results import Memory, Results, pack, unpack
from graphsplit.recovery.snapshot import replicator
from graphsplit.recovery.snapshot.disk import parse, text_of
from graphsplit.recovery.snapshot.shard import SnapshotShard
from graphsplit.transport.wait import WaitPolicy

assert threads_as_workers


def made_part() -> tuple[SnapshotShard, dict[str, torch.Tensor]]:
    tensors = {
        "plain": torch.randn(3, 4),
        "turned": torch.randn(4, 5).t(),
        "expanded": torch.ones(1).expand(7),
        "none": torch.empty(0, dtype=torch.int64),
        "complex": torch.randn(3, dtype=torch.complex64),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }
    flat = FlatTensors()
    flat.copy(tensors)
    return SnapshotShard({"number": 4, "models": [], "x": 1.5}, flat.memory, flat.slots), tensors


def test_a_part_comes_back_however_it_was_cut():
    part, tensors = made_part()
    octets = torch.cat(part.padded())
    for size in (1, 7, 4096):
        found = SnapshotShard.read(octets.split(size), what="a part")
        assert (found.number, found.values) == (4, part.values)
        for name, tensor in tensors.items():
            assert difference(tensor.contiguous(), found.tensor(name).contiguous()) is None
        assert found.tensor("turned").stride() == (1, 5)


@pytest.mark.parametrize("size", [0, 5, 20, 200])
def test_a_part_that_was_cut_off_is_refused(size: int):
    octets = torch.cat(made_part()[0].padded())
    with pytest.raises(FrameError, match="worker 3's part"):
        SnapshotShard.read([octets[:size]], what="worker 3's part")


def ends(limit: int) -> tuple[OutgoingStream, IncomingStream]:
    fabric, policy = MemoryFabric(), WaitPolicy(AbortSignal(), 5.0)
    spec = channel_spec(SNAPSHOTS, 0, 1, 2)
    sender = MemoryTransport(fabric, generation=1, policy=policy).open_sender(spec)
    receiver = MemoryTransport(fabric, generation=1, policy=policy).open_receiver(spec)
    return OutgoingStream(sender), IncomingStream(receiver, source=0, limit_bytes=limit)


def test_messages_of_any_length_pass_without_waiting():
    outgoing, incoming = ends(1 << 30)
    content = torch.arange(5 * CHUNK_BYTES // 8).view(torch.uint8)
    outgoing.put(1, 7, [content[:100], content[100:]])
    outgoing.put(2, 8)
    outgoing.put(3, 9, [content[:100], content[100:TOGETHER_BYTES]])
    found = []
    while len(found) < 3:
        outgoing.pump()
        found += [message for message in incoming.pump() if message is not None]
    assert [(m.kind, m.number) for m in found] == [(1, 7), (2, 8), (3, 9)]
    assert found[0].octets() == content.numpy().tobytes()
    assert found[2].octets() == content[:TOGETHER_BYTES].numpy().tobytes()
    outgoing.pump()
    assert outgoing.is_empty


def test_a_message_larger_than_allowed_is_refused_before_it_comes():
    outgoing, incoming = ends(1000)
    outgoing.put(1, 7, [torch.zeros(1001, dtype=torch.uint8)])
    outgoing.pump()
    with pytest.raises(FrameError, match="1001 bytes; at most 1000"):
        list(incoming.pump())


def test_more_bytes_than_were_announced_are_refused():
    outgoing, incoming = ends(1000)
    outgoing.put(1, 7, [torch.zeros(3, dtype=torch.uint8)])
    outgoing._queue.append(iter([torch.zeros(9, dtype=torch.uint8)]))
    outgoing._queue[0] = iter([next(outgoing._queue[0])[:24]])  # its header alone
    outgoing.pump()
    with pytest.raises(FrameError, match="announced a message of 3 bytes; 9 came"):
        list(incoming.pump())


def test_a_message_is_taken_as_it_comes_and_only_of_the_size_that_is_expected():
    outgoing, incoming = ends(0)
    content = torch.arange(2 * CHUNK_BYTES // 8).view(torch.uint8)
    for size in (0, 9, 2 * CHUNK_BYTES):
        send([outgoing], [content[:size]])
        pieces = list(incoming.receive(size, is_exact=True))
        assert torch.equal(torch.cat([content[:0], *pieces]), content[:size])
        assert all(piece.numel() <= CHUNK_BYTES for piece in pieces)
    send([outgoing], [content[:9]])
    with pytest.raises(FrameError, match="with 9 bytes; 8 are expected"):
        list(incoming.receive(8, is_exact=True))


def test_a_message_of_many_small_pieces_is_refused_and_nobody_sends_one():
    outgoing, incoming = ends(10**9)
    for sizes in ([1] * 5000, [TOGETHER_BYTES + 1, 1] * 5, [CHUNK_BYTES + 1, 1] * 3, [0, 7, 0]):
        content = [torch.full((size,), size % 251, dtype=torch.uint8) for size in sizes]
        outgoing.put(2, 0, content)
        found = None
        while found is None:
            outgoing.pump()
            found = next((message for message in incoming.pump() if message), None)
        assert found.octets() == torch.cat(content).numpy().tobytes()
    outgoing.put(2, 0, [torch.zeros(9, dtype=torch.uint8)])
    octets = next(outgoing._queue[0])
    outgoing._queue[0] = iter(octets.split(24 + 1))  # what is small comes at once, or not at all
    with pytest.raises(FrameError, match="a message of 9 bytes in more pieces"):
        for _ in range(2):
            outgoing.pump()
            list(incoming.pump())


@pytest.mark.parametrize("number", [None, -1, "4", True])
def test_a_part_without_a_number_is_refused(number: Any):
    part = made_part()[0]
    values = {**part.values, "number": number}
    octets = SnapshotShard(values, part.memory, part.slots).pieces()
    with pytest.raises(FrameError, match="worker 3's part has no number"):
        SnapshotShard.read(octets, what="worker 3's part")


def test_a_snapshot_on_disk_of_another_version_is_refused_with_both_numbers():
    text = text_of(3, {"lines": []})
    assert parse(text, what="it") == {"lines": []}
    with pytest.raises(CheckpointError, match=r"snapshot of version 1; .* reads version 6"):
        parse(text.replace('"version":6', '"version":1'), what="it")


def offer(own: tuple[int, ...] = (), held: tuple[int, ...] = (), **more: Any) -> Offer:
    told = records.to_text(Offer(False, own, held, can_start=False, **more))
    return read_record(Offer, told, what="an offer")


FRESH = Offer(is_fresh=True)


@pytest.mark.parametrize(
    ("offers", "number", "from_disk"),
    [
        ([offer((5, 6)), offer((5, 6), (5, 6)), offer((5, 6))], 6, False),
        ([FRESH, offer((5, 6), (5,)), offer((5, 6))], 5, False),  # 6 was not brought away
        ([offer((5,), (5,)), offer((5, 6)), FRESH], 5, False),
        ([Offer(False, can_start=True), FRESH, FRESH], START, False),
        ([offer((5,), disk=(3,), reaches=(3, 5)), FRESH, FRESH], 3, True),
        ([Offer(True, disk=(2, 4)), Offer(True, disk=(2,))], 4, True),
        ([FRESH, FRESH], START, False),
    ],
)
def test_the_newest_snapshot_of_which_all_parts_are_there_is_chosen(
    offers: list[Offer], number: int, from_disk: bool
):
    target = choose(offers)
    assert (target.number, target.from_disk) == (number, from_disk)


def among(*seats: int, **more: Any) -> Offer:
    return offer((5, 6), (5,), seats=seats, **more)


@pytest.mark.parametrize(
    ("offers", "seats", "number", "givers"),
    [
        ([among(0, 1, 2), among(0, 1, 2)], (0, 2), 5, (0, 1, 1)),  # 1 is lost; 2 holds its part
        ([among(0, 1, 2), among(0, 1, 2)], (1, 2), 5, (0, 0, 1)),  # 0 is lost; 1 holds its part
        ([among(0, 2), FRESH, among(0, 2)], (0, 1, 2), 6, (0, 2)),  # 1 comes
        ([among(0, 1), FRESH], (0, 2), 5, (0, 0)),  # 1 is lost, and 2 comes
        ([offer(whole=(7,)), FRESH, among(0, 2)], (0, 1, 2), 7, (0,)),  # it was among others
        ([Offer(False, owners={"0": {"w": 1}}), FRESH], (0, 2), START, ()),
    ],
)
def test_where_others_are_there_each_part_is_brought_by_who_has_it(
    offers: list[Offer], seats: tuple[int, ...], number: int, givers: tuple[int, ...]
):
    target = choose(offers, seats)
    assert (target.number, target.givers, target.owners) == (number, givers, {})


def test_two_lost_neighbours_are_named_where_the_others_would_go_on():
    with pytest.raises(ClusterError, match="cannot go on without workers 1, 2: one of them held"):
        choose([among(0, 1, 2, 3), among(0, 1, 2, 3)], (0, 3))


def test_nothing_left_to_go_on_from_names_the_neighbours():
    with pytest.raises(ClusterError, match=r"workers 1, 2: worker 1 was lost together with"):
        choose([offer((5,), (5,)), FRESH, FRESH])


@pytest.mark.parametrize("text", ["[]", "{}", '{"is_fresh": true}', '{"own": ["x"]}'])
def test_an_offer_that_is_none_is_refused(text: str):
    with pytest.raises(FrameError):
        read_record(Offer, text, what="an offer")


def test_results_come_back_with_their_bits():
    value = {"a": torch.randn(3, 2), "b": [1, 2.5, None], 3: torch.tensor(float("nan"))}
    assert difference(value, unpack(pack(value, what="it"), what="it")) is None


def test_another_call_than_before_is_named():
    results = Results()
    results.add_call(0, "train", 0, lambda: pack(None, what="train"))
    with pytest.raises(StateError, match=r"call 1 of the script is eval\(\).*was train\(\) of Mod"):
        Memory(results.lines).call(0, "eval", 0)


def test_a_kept_tensor_has_the_same_strides_and_its_own_memory():
    for tensor in (torch.randn(3, 4).t(), torch.randn(2).expand(3, 2), torch.randn(9)[::3]):
        copy = kept(tensor)
        assert copy.stride() == tensor.stride()
        assert difference(tensor.contiguous(), copy.contiguous()) is None
        assert copy.data_ptr() != tensor.data_ptr()


@pytest.mark.usefixtures("threads_as_workers")
def test_a_loader_that_ends_is_refused_before_training_begins():
    def script(rank: int) -> None:
        net = nn.Linear(2, 2)
        model = gs.Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
        model.train(1, iter([(torch.ones(1, 2), torch.ones(1, 2))]))

    with pytest.raises(ConfigurationError, match="train was given a list_iterator"):
        ThreadCluster(script, 1).run()


def test_a_call_that_runs_again_from_its_beginning_has_its_callbacks_as_they_were():
    late = Late()
    entry = Entry.of(0, ModelCall("train", lambda *_: None, (1, [], [late])), [])
    late.load_state_dict({"count": 1})
    entry.put_back()
    assert late.state_dict() == {}


def test_a_worker_with_little_holds_a_part_of_any_size():
    fabric, policy = MemoryFabric(), WaitPolicy(AbortSignal(), 5.0)
    first, second = (MemoryTransport(fabric, generation=1, policy=policy) for _ in range(2))
    abort = SimpleNamespace(add_waker=lambda wake: None, cause=None)
    position = ReportedPosition()
    member = SimpleNamespace(position=position)
    job = SimpleNamespace(rank=1, num_workers=2, transport=second, abort=abort, member=member)
    beside = replicator.Replicator(cast(Any, job), held=replicator.HeldCopies())
    beside._open()
    header = bytearray(HEADER.pack(replicator.PART, 3, 48 << 30))
    sender = first.open_sender(channel_spec(SNAPSHOTS, 0, 1, 2))
    sender.send(torch.frombuffer(header, dtype=torch.uint8), step=0, microbatch=0)
    assert beside._pump() and not beside.held.parts
    assert position.aside == 1, "what moves is progress"


def test_who_waits_for_a_snapshot_says_that_it_waits_for_all():
    position, told = ReportedPosition(), []
    stop = FailureCause("lost", "lost: the test ends it")

    class Ending(AbortSignal):
        def raise_if_set(self) -> None:
            told.append(position.sample())
            self.set(stop)
            super().raise_if_set()

    member = SimpleNamespace(position=position)
    job = SimpleNamespace(rank=1, num_workers=2, abort=Ending(), member=member)
    beside = replicator.Replicator(cast(Any, job), held=replicator.HeldCopies())
    with pytest.raises(JobFailedError):
        beside.wait_committed(0)
    assert told[0].awaits_all and "a snapshot" in told[0].waits_what
    assert not position.sample().awaits_all


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("pause_at", "expected"), [(0.0, 0.0), (0.002, 0.002), (60.0, replicator.PATIENCE_S)]
)
def test_computing_goes_first_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, pause_at: float, expected: float
) -> None:
    clock = Clock()
    monkeypatch.setattr(replicator, "time", clock)
    position = SimpleNamespace(
        waiting_source=lambda: (1, "a value") if clock.now >= pause_at else None
    )
    job = SimpleNamespace(
        rank=0,
        num_workers=2,
        abort=SimpleNamespace(add_waker=lambda wake: None, cause=None),
        member=SimpleNamespace(position=position),
    )
    beside = replicator.Replicator(cast(Any, job), held=replicator.HeldCopies())
    beside._let_computing_first()
    assert clock.now == pytest.approx(expected, abs=replicator.LOOK_S)
    beside._num_waiting = 1  # the computing thread waits for the snapshot itself
    before = clock.now
    beside._let_computing_first()
    assert clock.now == before
