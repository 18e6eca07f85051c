"""Memory is used again only when nobody sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transport_helpers import DEADLINE_S, Workers, spec_of

from graphsplit.transport import pool as pool_module
from graphsplit.transport.pool import POOLED_BYTES, MemoryPool

SIZE = POOLED_BYTES


def test_memory_that_was_let_go_is_given_again() -> None:
    pool = MemoryPool()
    address = pool.take(SIZE).data_ptr()
    assert pool.take(SIZE).data_ptr() == address


def saved_for_backward(memory: torch.Tensor) -> object:
    value = memory.view(torch.float32)
    value.fill_(1)
    return torch.nn.Parameter(torch.ones(1)) * value


HOLDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "the value": lambda memory: memory,
    "a view": lambda memory: memory[5:9],
    "a tensor over its memory": lambda memory: torch.empty(0, dtype=torch.uint8).set_(
        memory.untyped_storage()
    ),
    "its storage": lambda memory: memory.untyped_storage(),
    "an array of numpy": lambda memory: memory.numpy()[3:],
    "a memoryview of that": lambda memory: memoryview(memory.numpy().data),
    "DLPack": lambda memory: torch.utils.dlpack.to_dlpack(memory),  # type: ignore[attr-defined]
    "backward": saved_for_backward,
    "a detached value": lambda memory: memory.detach(),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_memory_that_somebody_sees_is_not_given(name: str) -> None:
    pool = MemoryPool()
    memory = pool.take(SIZE)
    address = memory.data_ptr()
    holder = HOLDERS[name](memory)
    del memory
    other = pool.take(SIZE)
    assert other.data_ptr() != address
    del holder
    assert pool.take(SIZE).data_ptr() == address


def test_memory_that_other_processes_may_see_by_now_is_not_given() -> None:
    pool = MemoryPool()
    memory = pool.take(SIZE)
    memory.share_memory_()
    address = memory.data_ptr()
    del memory
    assert pool.take(SIZE).data_ptr() != address


def test_memory_that_has_another_size_by_now_is_not_given() -> None:
    pool = MemoryPool()
    memory = torch.empty(0, dtype=torch.uint8).set_(pool.take(SIZE).untyped_storage())
    memory.resize_(3 * SIZE)
    del memory
    assert pool.take(SIZE).untyped_storage().nbytes() == SIZE


def test_a_pool_is_bounded_and_lets_go_of_sizes_that_do_not_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "MOST_BYTES", 4 * SIZE)
    pool = MemoryPool()
    for number in range(20):
        pool.take(SIZE + number)
        assert pool._held_bytes <= 4 * SIZE
    held = [pool.take(SIZE) for _ in range(9)]
    assert len({memory.data_ptr() for memory in held}) == 9 and pool._held_bytes <= 4 * SIZE
    pool.clear()
    assert pool._held_bytes == 0


@pytest.mark.parametrize("kind", ["gloo", "grpc"])
@pytest.mark.parametrize("lends", [True, False])
def test_large_values_of_a_step_get_memory_of_earlier_ones(kind: str, lends: bool) -> None:
    workers = Workers(kind, 2, DEADLINE_S)
    shape = (4 * SIZE // 4,)
    sender, receiver = workers.open(replace(spec_of(shape=shape, max_bytes=4 * SIZE), lends=lends))
    kept = []
    for step in range(6):
        sender.send(torch.full(shape, float(step)), step=step, microbatch=0)
        received = receiver.receive(step=step, microbatch=0)
        assert received is not None and not received._is_view() and not received.is_inference()
        kept.append(received[3:7] if step % 2 else received)
        assert torch.equal(received, torch.full(shape, float(step)))
        del received
    for step, value in enumerate(kept):
        assert torch.equal(value, torch.full(value.shape, float(step)))
    pool = receiver._incoming._pool  # type: ignore[attr-defined]
    assert (pool._held_bytes > 0) == lends
    workers.close()
    assert pool._held_bytes == 0
