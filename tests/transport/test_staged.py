"""Values on devices, by transports of host memory; a CPU stands for the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transport_helpers import Workers, spec_of

from graphsplit.transport.hub import Router
from graphsplit.transport.staged import StagedReceiver, StagedSender, moved, staged

ON_DEVICE = replace(spec_of(), device="cuda:0", lends=True)


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(4, 1).expand(4, 3),
        torch.randn(4, 6)[:, ::2],
        torch.randn(0, 3),
        torch.randn(()),
        torch.randn(5).as_strided((3, 3), (1, 1)),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.tensor([True, False]),
        torch.randn(3).to(torch.float8_e4m3fn),
    ],
)
def test_a_copy_on_another_device_has_the_bits_and_the_strides(value: torch.Tensor) -> None:
    copy = moved(value, "cpu")
    assert (copy.dtype, copy.shape, copy.stride()) == (value.dtype, value.shape, value.stride())
    assert copy.data_ptr() != value.data_ptr() or not value.numel()
    words = torch.uint8 if value.dtype.itemsize == 1 else value.dtype
    assert torch.equal(copy.view(words), value.resolve_conj().resolve_neg().view(words))


def test_a_copy_has_no_history() -> None:
    assert not moved(torch.ones(2, requires_grad=True) * 2, "cpu").requires_grad


def test_host_memory_lends_nothing_of_a_device() -> None:
    sent = staged(ON_DEVICE)
    assert (sent.device, sent.lends) == ("cpu", False)
    assert staged(sent) is sent


@pytest.mark.parametrize("name", ["memory", "nccl"])
def test_only_nccl_takes_values_where_they_are(name: str) -> None:
    ends: list[Any] = []
    for rank, transport in enumerate(Workers("memory", 2, 5.0).transports):
        router = Router(rank, {name: transport}, route=lambda *_: (name, ""), num_workers=2)
        ends.append(router.open_sender(ON_DEVICE) if rank == 0 else router.open_receiver(ON_DEVICE))
    is_staged = [isinstance(ends[0], StagedSender), isinstance(ends[1], StagedReceiver)]
    assert is_staged == [name != "nccl"] * 2


def test_a_value_that_is_missing_is_missing_at_the_other_end() -> None:
    one, other = Workers("memory", 2, 5.0).open(staged(ON_DEVICE))
    sender, receiver = StagedSender(one), StagedReceiver(other, "cpu")
    assert sender.has_room() and not receiver.is_ready()
    sender.send(None, step=0, microbatch=0)
    sender.send(torch.arange(4.0), step=1, microbatch=0)
    assert receiver.receive(step=0, microbatch=0) is None
    received = receiver.receive(step=1, microbatch=0)
    assert received is not None and torch.equal(received, torch.arange(4.0))
