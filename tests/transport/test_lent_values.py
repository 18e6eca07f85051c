"""Large values stay where the sender put them, for as long as somebody looks at them."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from transport_helpers import DEADLINE_S, Workers, spec_of, start

from graphsplit.errors import TransportError
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.shm import region
from graphsplit.transport.shm.slots import LEND_BYTES, num_spare

SHAPE = (LEND_BYTES // 4,)
LENDING = replace(spec_of(shape=SHAPE, max_bytes=LEND_BYTES), lends=True)


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers("shm", 2, DEADLINE_S)
    yield made
    made.close()


def value_of(number: int) -> torch.Tensor:
    return torch.full(SHAPE, float(number))


def exchange(workers: Workers, spec: ChannelSpec) -> Callable[[int], torch.Tensor]:
    sender, receiver = workers.open(spec)

    def send_and_receive(step: int) -> torch.Tensor:
        sender.send(value_of(step), step=step, microbatch=0)
        received = receiver.receive(step=step, microbatch=0)
        assert received is not None
        return received

    return send_and_receive


def test_a_lent_slot_is_not_written_to_until_its_value_is_let_go(workers: Workers) -> None:
    send_and_receive = exchange(workers, LENDING)
    held = [send_and_receive(step) for step in range(2 * num_spare(LENDING))]
    assert all(torch.equal(value, value_of(step)) for step, value in enumerate(held))
    assert len({value.data_ptr() for value in held}) == len(held)


def test_a_slot_that_was_let_go_is_the_next_to_be_used(workers: Workers) -> None:
    send_and_receive = exchange(workers, LENDING)
    addresses = {send_and_receive(step).data_ptr() for step in range(2 * num_spare(LENDING))}
    assert len(addresses) == 1


def test_more_values_than_there_are_slots_to_spare_never_block_the_sender(
    workers: Workers,
) -> None:
    sender, receiver = workers.open(LENDING)
    held = []
    for step in range(3 * num_spare(LENDING)):
        assert sender.has_room()
        sender.send(value_of(step), step=step, microbatch=0)
        held.append(receiver.receive(step=step, microbatch=0))
    assert len(held) == 3 * num_spare(LENDING)


def test_a_lent_value_may_be_modified_and_is_no_view(workers: Workers) -> None:
    received = exchange(workers, LENDING)(1)
    parameter = torch.ones(SHAPE, requires_grad=True)
    assert not received._is_view() and received._version in (0, 1)
    received.add_(parameter)
    received.sum().backward()
    assert parameter.grad is not None
    assert torch.equal(received.detach(), value_of(2))


def test_a_lent_value_outlives_its_channel_and_gives_its_memory_back(workers: Workers) -> None:
    sender, receiver = workers.open(LENDING)
    sender.send(value_of(3), step=0, microbatch=0)
    received = receiver.receive(step=0, microbatch=0)
    # The receiver's bell is mapped, too.
    assert sender._link.ready.wait(DEADLINE_S)  # type: ignore[attr-defined]
    mapped = region.num_mapped
    for transport in workers.transports:
        transport.close_plan(LENDING.plan)
    assert torch.equal(received, value_of(3))
    assert comes_down_to(mapped - 1)  # the sender's mapping is gone, the receiver's is not
    del received
    assert comes_down_to(mapped - 2)


def comes_down_to(num_mapped: int) -> bool:
    """Whether so many mappings are left; threads that end may hold on to some for a moment."""
    for _ in range(100):
        gc.collect()
        if region.num_mapped <= num_mapped:
            break
        time.sleep(0.01)
    return region.num_mapped == num_mapped


def test_a_peer_that_never_gives_a_slot_back_is_an_error(workers: Workers) -> None:
    sender, _ = workers.open(LENDING)
    for slot in sender._slots:  # type: ignore[attr-defined]
        sender._words[slot._lent_word] = 1  # type: ignore[attr-defined]
    with pytest.raises(TransportError, match="more slots are lent than there are to spare"):
        sender.send(value_of(0), step=0, microbatch=0)


def test_only_channels_that_may_lend_do(workers: Workers) -> None:
    assert num_spare(replace(LENDING, lends=False)) == 0
    assert num_spare(replace(LENDING, max_bytes=LEND_BYTES - 1)) == 0
    send_and_receive = exchange(workers, replace(LENDING, lends=False))
    first = send_and_receive(0)
    send_and_receive(1), send_and_receive(2)
    assert torch.equal(first, value_of(0))


def test_values_that_are_negated_where_they_are_read_arrive_negated(workers: Workers) -> None:
    negative = torch.randn(64, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    sender, receiver = workers.open(spec_of(shape=(64,)))
    sender.send(negative, step=0, microbatch=0)
    received = receiver.receive(step=0, microbatch=0)
    assert received is not None and torch.equal(received, negative.resolve_neg())


def test_an_announced_value_of_another_layout_arrives(workers: Workers) -> None:
    sender, receiver = workers.open(spec_of(shape=(8, 8)))
    for step, value in enumerate((torch.randn(8, 8), torch.randn(8, 8).t(), torch.randn(8, 8))):
        waiting = start(lambda step=step: receiver.receive(step=step, microbatch=0))  # type: ignore[misc]
        sender.announce()
        sender.send(value, step=step, microbatch=0)
        received = waiting.result(DEADLINE_S)
        assert received is not None and torch.equal(received, value)
        assert received.stride() == value.stride()


def _random_value(draw: random.Random, rows: int) -> torch.Tensor | None:
    whole = torch.randn(rows, 4 * draw.choice((1, 3, 64)))
    layouts: tuple[Callable[[], torch.Tensor | None], ...] = (
        lambda: whole,
        lambda: whole[:, ::2],
        lambda: whole.t(),
        lambda: whole[1:],
        lambda: whole[:1].expand(rows, -1),
        lambda: None,
    )
    return draw.choice(layouts)()


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("rows", [2, 700])
def test_random_values_that_are_held_for_random_times_keep_their_bits(
    workers: Workers, depth: int, rows: int
) -> None:
    draw = random.Random(depth)
    spec = spec_of(shape=(None, None), max_bytes=1 << 20, depth=depth)
    sender, receiver = workers.open(replace(spec, lends=True))
    values = [_random_value(draw, rows) for _ in range(120)]

    def send_all() -> None:
        for step, value in enumerate(values):
            if draw.random() < 0.3:
                sender.announce()
            sender.send(value, step=step, microbatch=0)

    sending = start(send_all)
    held: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
    for step, sent in enumerate(values):
        held.append((sent, receiver.receive(step=step, microbatch=0)))
        for kept, received in held[-40:]:
            assert (kept is None) == (received is None)
            assert kept is None or received is None or torch.equal(kept, received)
        held = [pair for pair in held if random.Random(step).random() < 0.9]
    sending.result(DEADLINE_S)
