"""Where there are accelerators, workers ask where values are; here it is the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kinds_of_loops
import loops
import pytest
import torch
import well_known_loops
from loop_helpers import Distribute, Loop, assert_same_bits, placed, raised
from recovery_helpers import threads_as_workers
from torch import nn

from graphsplit.distribute.network import Distributed
from graphsplit.distribute.workers import asking
from graphsplit.errors import ConfigurationError
from graphsplit.job.group import WorkerGroup
from graphsplit.tensor_meta import ALIGNMENT, TensorMeta

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")


@pytest.fixture
def an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)


def moving(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
    """Targets follow a value; values are moved to where they are, cast, and copied."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
    net = distribute(placed(net, [net[0], net[2]], ranks))
    for _ in range(2):
        outputs = net(torch.randn(4, 8))
        targets = torch.randint(0, 6, (4,)).to(outputs.device)
        assert not outputs.is_cuda and str(outputs.device) == "cpu"
        same, cast = outputs.to("cpu"), outputs.to("cpu", torch.float64)
        assert same is outputs and outputs.cpu() is outputs
        assert outputs.to(device=torch.device("cpu")) is outputs and outputs.to(targets).dtype
        copied = outputs.to("cpu", torch.float32, False, True)
        assert copied is not outputs and outputs.to("cpu", dtype=None) is outputs
        copied.detach().mul_(2)
        last = torch.channels_last
        yield outputs.detach().view(1, 2, 4, 3).to("cpu", memory_format=last).stride()
        loss = nn.functional.cross_entropy(outputs, targets) + cast.mean().to(torch.float32)
        loss.backward()
        yield loss.item(), cast.tolist(), outputs.to("cpu", copy=True).mul_(2).tolist()
        yield outputs.to(torch.zeros(1, dtype=torch.float16)).tolist()
    yield net.state_dict()


@pytest.mark.usefixtures("an_accelerator")
@pytest.mark.parametrize(
    "loop",
    [moving, loops.usual, loops.averaged, kinds_of_loops.moved, well_known_loops.old_names],
    ids=lambda one: one.__name__,
)
def test_loops_have_the_bits_of_one_process(loop: Loop) -> None:
    assert_same_bits(loop, 2)


@pytest.mark.usefixtures("an_accelerator")
def test_a_gradient_on_a_gpu_is_not_asked_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchanged(loop: Any, question: str, text: str) -> list[str]:
        return ["cuda:0"] * 2

    monkeypatch.setattr(asking, "exchange", exchanged)

    def clipped(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net = distribute(placed(nn.Sequential(nn.Linear(8, 6)), [], ranks))
        net(torch.randn(4, 8)).sum().backward()
        yield nn.utils.clip_grad_norm_(net.parameters(), 1.0)

    assert "as clip_grad_norm_ does" in raised(clipped)


def test_autocast_of_the_cpu_around_a_network_on_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def casting(distribute: Distribute, ranks: list[int]) -> Iterator[Any]:
        net = distribute(placed(nn.Sequential(nn.Linear(8, 6)), [], ranks))
        monkeypatch.setattr(Distributed, "_tensors", lambda net: {"0.weight": _OnGpu()})
        with torch.autocast("cpu", torch.bfloat16):
            yield net(torch.randn(4, 8))

    assert "with tensors on cuda:0, where it casts nothing" in raised(casting)


class _OnGpu:
    is_cpu = is_meta = False
    device = torch.device("cuda:0")


class _Group(WorkerGroup):
    def receive(self, size_bytes: int, **options: Any) -> Iterator[torch.Tensor]:
        yield torch.zeros(size_bytes - 1, dtype=torch.uint8)
        yield torch.tensor([ALIGNMENT + 16], dtype=torch.uint8)


def test_what_comes_from_an_accelerator_is_put_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    meta = TensorMeta(torch.float32, (2, 3), (3, 1))
    assert _Group().receive_laid_out(meta, source=1).is_meta


def test_what_comes_from_an_accelerator_needs_one_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    with pytest.raises(ConfigurationError, match="worker 1 sent a value that is on an accelerator"):
        _Group().receive_laid_out(TensorMeta(torch.float32, (2, 3), (3, 1)), source=1)
