"""The contract of ``Transport``, which every implementation passes."""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from concurrent import futures
from typing import Any

import pytest
import torch
from simulated import memory
from transport_helpers import DEADLINE_S, MakeWorkers, spec_of, start

from graphsplit.errors import FrameError, JobFailedError, ReceiveTimeoutError, TransportError
from graphsplit.failure import FailureCause
from graphsplit.job.control import ControlChannels
from graphsplit.transport import credit
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.dtypes import CODE_OF, carrier_of
from graphsplit.transport.shm import region
from graphsplit.transport.shm import transport as shm_transport

CAUSE = FailureCause(kind="exception", message="division by zero", rank=3)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape, strides and values."""
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


def test_every_wake_up_comes_without_the_help_of_the_clock(
    make: MakeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = make()
    there = workers.open(spec_of(depth=1))
    back = workers.open(spec_of(edge=1, source=1, destination=0))
    for module in (memory, shm_transport, credit):
        monkeypatch.setattr(module, "TICK_S", 10 * DEADLINE_S)

    def echo() -> None:
        for step in range(200):
            back[0].send(there[1].receive(step=step, microbatch=0), step=step, microbatch=0)

    echoing = start(echo)
    for step in range(200):
        there[0].send(torch.ones(4), step=step, microbatch=0)
        receiving = start(functools.partial(back[1].receive, step=step, microbatch=0))
        assert receiving.result(DEADLINE_S) is not None
    echoing.result(DEADLINE_S)


def test_values_arrive_in_the_order_they_were_sent(make: MakeWorkers) -> None:
    sender, receiver = make().open(spec_of())

    def send_all() -> None:
        for step in range(20):
            sender.send(torch.full((4,), float(step)), step=step, microbatch=step % 3)

    sending = start(send_all)
    for step in range(20):
        value = receiver.receive(step=step, microbatch=step % 3)
        assert value is not None and value.tolist() == [step] * 4
    sending.result(DEADLINE_S)


def test_workers_that_all_send_before_they_receive_do_not_wait_for_each_other(
    make: MakeWorkers,
) -> None:
    groups = [ControlChannels(t, rank, 3) for rank, t in enumerate(make(3).transports)]

    def talk(group: ControlChannels) -> list[int]:
        others = group.others(group.rank)
        group.ends(others)
        for peer in others:
            group.expect(peer)
        group.send(torch.tensor([group.rank], dtype=torch.uint8), to=others)
        return [int(next(group.receive(1, source=peer))) for peer in others]

    talks = [start(functools.partial(talk, group)) for group in groups]
    assert [one.result(DEADLINE_S) for one in talks] == [[1, 2], [0, 2], [0, 1]]


def test_whoever_gets_messages_makes_progress(make: MakeWorkers) -> None:
    ticks = [0, 0]

    def tick(rank: int) -> None:
        ticks[rank] += 1

    groups = [
        ControlChannels(transport, rank, 2, functools.partial(tick, rank))
        for rank, transport in enumerate(make(2).transports)
    ]
    sums = [start(lambda group=group: [group.share("x") for _ in range(5)]) for group in groups]
    assert [one.result(DEADLINE_S) for one in sums] == [["x"] * 5] * 2
    assert ticks[1] >= 5


def test_send_waits_at_the_depth_and_goes_on_when_a_value_is_taken(make: MakeWorkers) -> None:
    sender, receiver = make().open(spec_of(depth=3))
    value = torch.zeros(4)
    for step in range(3):
        sender.send(value, step=step, microbatch=0)
    fourth = start(lambda: sender.send(value, step=3, microbatch=0))
    with pytest.raises(futures.TimeoutError):
        fourth.result(0.2)
    receiver.receive(step=0, microbatch=0)
    fourth.result(DEADLINE_S)


def test_a_full_channel_does_not_delay_another(make: MakeWorkers) -> None:
    workers = make()
    full, _ = workers.open(spec_of(depth=1, edge=0))
    sender, receiver = workers.open(spec_of(edge=1))
    full.send(None, step=0, microbatch=0)
    blocked = start(lambda: full.send(None, step=1, microbatch=0))
    for step in range(5):
        sender.send(torch.ones(4), step=step, microbatch=0)
        assert receiver.receive(step=step, microbatch=0) is not None
    assert not blocked.done()
    workers.aborts[0].set(CAUSE)
    with pytest.raises(JobFailedError):
        blocked.result(DEADLINE_S)


def test_both_directions_and_a_third_worker(make: MakeWorkers) -> None:
    workers = make(3)
    pairs = list(itertools.permutations(range(3), 2))
    specs = [spec_of(edge=i, source=a, destination=b) for i, (a, b) in enumerate(pairs)]
    ends = [workers.open(spec) for spec in specs]
    for number, (sender, _) in enumerate(ends):
        sender.send(torch.full((4,), float(number)), step=0, microbatch=0)
    for number, (_, receiver) in enumerate(ends):
        value = receiver.receive(step=0, microbatch=0)
        assert value is not None and value[0] == number


def test_a_sender_that_waits_for_credit_holds_nothing_back(make: MakeWorkers) -> None:
    workers = make()
    first, first_end = workers.open(spec_of(edge=0))
    second, second_end = workers.open(spec_of(edge=1, depth=1))
    second.send(torch.zeros(4), step=0, microbatch=0)
    first.hold()
    first.send(torch.ones(4), step=0, microbatch=0)
    blocked = start(lambda: second.send(torch.ones(4), step=1, microbatch=0))
    assert first_end.receive(step=0, microbatch=0) is not None
    for step in range(2):
        assert second_end.receive(step=step, microbatch=0) is not None
    blocked.result(DEADLINE_S)


def test_values_that_may_wait_for_the_next_arrive_in_order(make: MakeWorkers) -> None:
    workers = make()
    ends = [workers.open(spec_of(edge=edge, depth=3)) for edge in range(3)]
    order = [0, 1, 1, 2, 0, 1]
    for number, edge in enumerate(order):
        if number + 1 < len(order):
            ends[edge][0].hold()
        ends[edge][0].send(torch.full((4,), float(number)), step=number, microbatch=0)
    for edge in (2, 0, 1):
        for number in (number for number, one in enumerate(order) if one == edge):
            value = ends[edge][1].receive(step=number, microbatch=0)
            assert value is not None and value.tolist() == [number] * 4


def test_a_value_that_may_wait_arrives_although_no_other_follows(make: MakeWorkers) -> None:
    workers = make()
    sender, receiver = workers.open(spec_of())
    sender.hold()
    sender.send(torch.ones(4), step=0, microbatch=0)
    closing = start(workers.transports[0].close)
    assert receiver.receive(step=0, microbatch=0) is not None
    workers.close()
    closing.result(DEADLINE_S)


def test_none_is_a_value(make: MakeWorkers) -> None:
    sender, receiver = make().open(spec_of())
    for step, value in enumerate((None, torch.ones(4), None, None, torch.ones(4))):
        sender.send(value, step=step, microbatch=0)
        assert (receiver.receive(step=step, microbatch=0) is None) == (value is None)


def test_every_dtype_arrives_with_its_bits(make: MakeWorkers) -> None:
    workers = make()
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    for edge, dtype in enumerate(CODE_OF):
        raw = torch.arange(2 * 3 * dtype.itemsize, dtype=torch.uint8)
        value = (raw % 2 if dtype is torch.bool else raw).view(dtype).view(2, 3)
        sender, receiver = workers.open(spec_of(dtype, (2, 3), edge=edge))
        sender.send(value, step=0, microbatch=0)
        received = receiver.receive(step=0, microbatch=0)
        assert received is not None and received.dtype is dtype
        carrier = carrier_of(dtype)
        assert torch.equal(
            received.view(carrier).contiguous().view(torch.uint8),
            value.view(carrier).contiguous().view(torch.uint8),
        ), dtype


BASE = torch.arange(240.0)
SHAPES = {
    "contiguous": BASE.view(10, 24),
    "transposed": BASE.view(10, 24).t(),
    "expanded": BASE[:6].expand(4, 6),
    "expanded in the middle": BASE[:12].view(3, 1, 4).expand(3, 5, 4),
    "expanded scalar": torch.tensor(2.5).expand(7, 3),
    "every second column": BASE.view(10, 24)[:, ::2],
    "one column": BASE.view(10, 24)[:, 3:4],
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one channel, channels last": torch.randn(2, 1, 4, 5).to(memory_format=torch.channels_last),
    "permuted slice": BASE.view(2, 5, 4, 6).permute(2, 0, 3, 1)[1:3],
    "windows that overlap": BASE[:9].unfold(0, 3, 1),
    "interleaved": torch.as_strided(BASE, (2, 3), (3, 2)),
    "zero-dim": torch.tensor(3.5),
    "empty": torch.empty(0, 5),
    "empty, odd strides": torch.empty_strided((3, 0, 2), (7, 9, 1)),
    "not aligned": BASE[3:17],
    "not aligned, gaps": BASE.view(10, 24)[1:, 1::3],
    "16 dimensions": BASE[:16].view(*[1] * 12, 2, 2, 2, 2).transpose(-1, 0),
    "huge stride of a dimension of one": torch.as_strided(BASE, (1, 4), (2**62, 1)),
    "size one, expanded": BASE[:4].view(4, 1).as_strided((4, 1), (1, 0)),
    "pending conjugation": torch.randn(4, 3, dtype=torch.complex64).conj(),
    "pending conjugation, transposed": torch.randn(4, 3, dtype=torch.complex64).conj().t(),
    "pending conjugation, gaps": torch.randn(4, 6, dtype=torch.complex64).conj()[:, ::2],
    "pending negation": torch.randn(5, dtype=torch.complex64).conj().imag,
}


def test_strides_and_alignment_arrive_unchanged(make: MakeWorkers) -> None:
    workers = make()
    for edge, (name, value) in enumerate(SHAPES.items()):
        sender, receiver = workers.open(spec_of(value.dtype, tuple(value.shape), edge=edge))
        for step in range(3):
            sender.send(value, step=step, microbatch=0)
            received = receiver.receive(step=step, microbatch=0)
            assert received is not None and same(received, value), name
            if value.numel():
                assert received.data_ptr() % 64 == value.data_ptr() % 64, name


def test_layouts_may_change_from_message_to_message(make: MakeWorkers) -> None:
    sender, receiver = make().open(spec_of(shape=(4, 4)))
    square = torch.arange(16.0).view(4, 4)
    values = [square, square.t(), None, square[:1].expand(4, 4), square, square.t(), None]
    for step, value in enumerate(values * 2):
        sender.send(value, step=step, microbatch=0)
        received = receiver.receive(step=step, microbatch=0)
        if value is None:
            assert received is None
        else:
            assert received is not None and same(received, value)


def test_one_dimensional_values_of_any_length(make: MakeWorkers) -> None:
    sender, receiver = make().open(spec_of(torch.uint8, (None,), max_bytes=1000))
    for step, length in enumerate((0, 1, 999, 17, 1000)):
        sender.send(torch.arange(length).to(torch.uint8), step=step, microbatch=0)
        received = receiver.receive(step=step, microbatch=0)
        assert received is not None and received.shape == (length,)
    with pytest.raises(TransportError, match="at most 1000, got 1001"):
        sender.send(torch.zeros(1001, dtype=torch.uint8), step=5, microbatch=0)


def test_a_value_modified_after_the_send_arrives_as_it_was(make: MakeWorkers) -> None:
    sender, receiver = make().open(spec_of())
    value = torch.zeros(4)
    sender.send(value, step=0, microbatch=0)
    value.fill_(9)
    received = receiver.receive(step=0, microbatch=0)
    assert received is not None and received.tolist() == [0] * 4


def test_a_received_value_is_writable_and_private(make: MakeWorkers) -> None:
    sender, receiver = make().open(spec_of(depth=1))
    sender.send(torch.zeros(4), step=0, microbatch=0)
    first = receiver.receive(step=0, microbatch=0)
    assert first is not None
    first.add_(1)
    sender.send(torch.full((4,), 5.0), step=1, microbatch=0)
    second = receiver.receive(step=1, microbatch=0)
    assert second is not None and first.tolist() == [1] * 4 and second.tolist() == [5] * 4
    assert not first._is_view()


def test_autograd_history_does_not_travel(make: MakeWorkers) -> None:
    workers = make()
    sender, receiver = workers.open(spec_of())
    leaf = torch.ones(4, requires_grad=True)
    for step, value in enumerate((leaf * 2, leaf, torch.nn.Parameter(torch.ones(4)))):
        sender.send(value, step=step, microbatch=0)
        received = receiver.receive(step=step, microbatch=0)
        assert received is not None and not received.requires_grad
        received.requires_grad_()
        received.sum().backward()  # type: ignore[no-untyped-call]


def test_inference_mode_and_grad_mode_may_alternate(make: MakeWorkers) -> None:
    with torch.inference_mode():
        sender, receiver = make().open(spec_of())
        sender.send(torch.ones(4), step=0, microbatch=0)
        assert receiver.receive(step=0, microbatch=0) is not None
    for step in range(1, 4):
        sender.send(torch.ones(4), step=step, microbatch=0)
        received = receiver.receive(step=step, microbatch=0)
        assert received is not None and not received.is_inference()


def test_64_mib_arrive(make: MakeWorkers) -> None:
    size = 16 << 20
    sender, receiver = make().open(spec_of(shape=(size,), max_bytes=4 * size, depth=1))
    value = torch.arange(size, dtype=torch.float32)
    sending = start(lambda: sender.send(value, step=0, microbatch=0))
    received = receiver.receive(step=0, microbatch=0)
    sending.result(DEADLINE_S)
    assert received is not None and torch.equal(received, value)


def test_a_receive_ends_at_the_deadline(make: MakeWorkers) -> None:
    # Over Gloo the two meet within it, on a busy machine too.
    _, receiver = make(deadline_s=1.0).open(spec_of())
    with pytest.raises(ReceiveTimeoutError, match=r"nothing for 1 s, and worker 0 made no"):
        receiver.receive(step=0, microbatch=0)


def test_a_send_ends_at_the_deadline(make: MakeWorkers) -> None:
    # Within it the two meet, or the first one would not be sent.
    sender, _ = make(deadline_s=1.0).open(spec_of(depth=1))
    sender.send(None, step=0, microbatch=0)
    with pytest.raises(ReceiveTimeoutError, match="worker 1 made no progress"):
        sender.send(None, step=1, microbatch=0)


def test_a_peer_that_makes_progress_is_waited_for(
    make: MakeWorkers, ticks: itertools.count[int]
) -> None:
    long_after_the_deadline = threading.Event()

    def progress(rank: int) -> int:
        tick = next(ticks)
        if tick == 12:
            long_after_the_deadline.set()
        return tick

    sender, receiver = make(deadline_s=0.1, progress=progress).open(spec_of())
    receiving = start(lambda: receiver.receive(step=0, microbatch=0))
    assert long_after_the_deadline.wait(DEADLINE_S)
    sender.send(torch.ones(4), step=0, microbatch=0)
    assert receiving.result(DEADLINE_S) is not None


def test_an_abort_ends_a_blocked_receive_and_a_blocked_send(
    make: MakeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = make()
    sender, receiver = workers.open(spec_of(depth=1, edge=0))
    _, idle = workers.open(spec_of(edge=1))
    sender.send(None, step=0, microbatch=0)
    for module in (memory, shm_transport, credit):
        monkeypatch.setattr(module, "TICK_S", 10 * DEADLINE_S)
    blocked: list[futures.Future[Any]] = [
        start(lambda: sender.send(None, step=1, microbatch=0)),
        start(lambda: idle.receive(step=0, microbatch=0)),
    ]
    # Both know the cause before either end closes, which the other one might see first.
    first, second = workers.aborts
    first._wakers.insert(0, lambda: second.set(CAUSE))
    first.set(CAUSE)
    for future in blocked:
        with pytest.raises(JobFailedError, match="division by zero"):
            future.result(DEADLINE_S)
    del receiver


def test_the_wrong_step_or_microbatch_is_refused(make: MakeWorkers) -> None:
    sender, receiver = make().open(spec_of())
    sender.send(None, step=7, microbatch=2)
    with pytest.raises(FrameError, match="expected step 8, microbatch 2, got step 7, microbatch 2"):
        receiver.receive(step=8, microbatch=2)
    with pytest.raises(FrameError, match="expected step 7, microbatch 1, got step 7, microbatch 2"):
        receiver.receive(step=7, microbatch=1)
    assert receiver.receive(step=7, microbatch=2) is None


def test_ends_that_disagree_on_a_channel_of_one_size_are_found(make: MakeWorkers) -> None:
    workers = make()
    sender = workers.transports[0].open_sender(spec_of(torch.float32, (4, 2)))
    receiver = workers.transports[1].open_receiver(spec_of(torch.float32, (2, 4)))
    sender.send(torch.zeros(4, 2), step=0, microbatch=0)
    with pytest.raises(FrameError, match=r"shape: expected \(2, 4\), got \(4, 2\)"):
        receiver.receive(step=0, microbatch=0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(4, dtype=torch.int64), "dtype: expected torch.float32, got torch.int64"),
        (torch.zeros(5), r"shape: expected \(4,\), got \(5,\)"),
        (torch.zeros(4, 1), r"shape: expected \(4,\), got \(4, 1\)"),
        (torch.zeros(8000).as_strided((4,), (2000,)), "bytes with its strides: expected at most"),
        (torch.zeros(4).to_sparse(), "memory: expected a strided CPU tensor"),
        (torch.zeros(4, device="meta"), "memory: expected a strided CPU tensor"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_where_it_is_sent(
    make: MakeWorkers, value: torch.Tensor, message: str
) -> None:
    sender, receiver = make().open(spec_of())
    with pytest.raises(TransportError, match=message):
        sender.send(value, step=0, microbatch=0)
    sender.send(torch.ones(4), step=0, microbatch=0)
    assert receiver.receive(step=0, microbatch=0) is not None


def test_quantized_values_are_refused_when_the_channel_is_opened(make: MakeWorkers) -> None:
    with pytest.raises(TransportError, match=r"torch\.qint8 cannot be sent"):
        make().transports[0].open_sender(spec_of(torch.qint8))


def test_what_was_sent_arrives_although_the_sender_has_closed(make: MakeWorkers) -> None:
    workers = make()
    sender, receiver = workers.open(spec_of())
    sender.send(torch.ones(4), step=0, microbatch=0)
    closing = start(workers.transports[0].close)
    assert receiver.receive(step=0, microbatch=0) is not None
    closing.result(DEADLINE_S)
    with pytest.raises(TransportError, match="worker 0"):
        receiver.receive(step=1, microbatch=0)


def test_a_broken_link_reports_the_root_cause_if_it_is_known(make: MakeWorkers) -> None:
    workers = make()
    _, receiver = workers.open(spec_of())
    receiving = start(lambda: receiver.receive(step=0, microbatch=0))
    workers.aborts[1].set(CAUSE)
    workers.transports[0].close()
    with pytest.raises(JobFailedError, match="division by zero"):
        receiving.result(DEADLINE_S)


def test_closing_twice_and_after_an_abort_is_safe(make: MakeWorkers) -> None:
    workers = make()
    workers.open(spec_of())
    workers.aborts[0].set(CAUSE)
    workers.close()
    workers.close()


def test_a_closed_channel_ends_the_waits_and_refuses_more(make: MakeWorkers) -> None:
    workers = make()
    sender, receiver = workers.open(spec_of(plan=5))
    receiving = start(lambda: receiver.receive(step=0, microbatch=0))
    workers.transports[1].close_plan(5)
    with pytest.raises(TransportError):
        receiving.result(DEADLINE_S)
    workers.transports[0].close_plan(5)
    with pytest.raises(TransportError):
        sender.send(torch.ones(4), step=0, microbatch=0)


def test_closing_a_plan_frees_it_and_leaves_others_open(make: MakeWorkers) -> None:
    workers = make()
    sender, receiver = workers.open(spec_of(plan=0))
    if workers.kind == "shm":
        # The peer's bell is mapped a moment after the channel is opened.
        assert sender._link.ready.wait(DEADLINE_S)  # type: ignore[attr-defined]
    before = region.num_mapped
    specs = [spec_of(plan=1, edge=edge, max_bytes=1 << 20) for edge in range(8)]
    for spec in specs:
        workers.open(spec)[0].send(torch.ones(4), step=0, microbatch=0)
    never_received: ChannelSpec = spec_of(plan=1, edge=9)
    workers.transports[0].open_sender(never_received)
    for transport in workers.transports:
        transport.close_plan(1)
    assert region.num_mapped == before
    sender.send(torch.ones(4), step=0, microbatch=0)
    assert receiver.receive(step=0, microbatch=0) is not None
