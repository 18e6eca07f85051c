"""The same work written by hand, with nothing around it: how close graphsplit is to this machine.

Channels are a count and some bytes of a file that all processes map. Who waits looks at the count,
and yields its core, until it has changed. There is no header, no check, no room to wait for, no
wake-up and no ticket; nobody notices a process that is lost. LeNet's layers are cut by hand, for
one placement, one batch size and one optimizer. Nothing of this is meant to be used: it is a limit
for processes of Python and torch. That a value is there before its count is left to the processor,
so it has to be an x86.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, torch.Tensor]
LAYERS = ("conv1", "conv2", "fc1", "fc2", "fc3")
_LINE, _PAGE = 64, 4096
_copy = ctypes.PyDLL(None).memmove
_copy.argtypes, _copy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None


def is_possible() -> bool:
    """Whether this machine can do it."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


@contextmanager
def shared_file(num_channels: int, channel_bytes: int) -> Iterator[str]:
    """A file with room for some channels, in memory where the system has such files."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.truncate(num_channels * _stride(channel_bytes))
        yield file.name


def _stride(channel_bytes: int) -> int:
    return _PAGE + -(-channel_bytes // _PAGE) * _PAGE


class BareChannel:
    """One direction between two processes: a count, and behind it the last value's bytes.

    Args:
        path: A ``shared_file``.
        index: Which of its channels.
        shape: Of every value, float32.
    """

    def __init__(self, path: str, index: int, shape: Sequence[int], channel_bytes: int) -> None:
        with Path(path).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        begin = index * _stride(channel_bytes)
        self._words = memoryview(memory)[begin : begin + _LINE].cast("Q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory, begin + _PAGE))
        self._shape, self._size = tuple(shape), 4 * math.prod(shape)
        assert self._size <= channel_bytes
        self._count = 0
        self._value = torch.zeros(self._shape)

    def prepare(self) -> None:
        """Take memory for the value that is received next, and touch it."""
        self._value = torch.zeros(self._shape)

    def send(self, value: torch.Tensor) -> None:
        """Copy a contiguous value in. The one before must have been received."""
        _copy(self._address, value.data_ptr(), self._size)
        self._count += 1
        self._words[0] = self._count

    def receive(self) -> torch.Tensor:
        """Wait for the next value, and copy it to what ``prepare`` has taken."""
        value, words, count, give_way = self._value, self._words, self._count, os.sched_yield
        target = value.data_ptr()
        while words[0] == count:
            give_way()
        _copy(target, self._address, self._size)
        self._count = count + 1
        return value


class LeNetByHand:
    """One layer of LeNet with its optimizer, in one of five processes.

    Args:
        net: The whole network; only this process's layer is used.
        layer: Its name.
        batches: What is trained on, for the shapes.
        path: A ``shared_file`` for ``NUM_CHANNELS`` channels of ``CHANNEL_BYTES``.
    """

    NUM_CHANNELS, CHANNEL_BYTES = 2 * (len(LAYERS) - 1), 1 << 20

    def __init__(self, net: nn.Module, layer: str, batches: Sequence[Batch], path: str) -> None:
        self.layer: nn.Module = getattr(net, layer)
        self._optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.01, momentum=0.9)
        self._forward = stages(net)[layer]
        self._position = LAYERS.index(layer)
        value, shapes = batches[0][0], []
        with torch.no_grad():
            for stage in stages(net).values():
                value = stage(value)
                shapes.append(value.shape)

        def channel(cut: int, *, backward: bool) -> BareChannel | None:
            if not 0 <= cut < len(LAYERS) - 1:
                return None
            return BareChannel(path, 2 * cut + backward, shapes[cut], self.CHANNEL_BYTES)

        before, behind = self._position - 1, self._position
        self._values, self._gradients_out = (channel(before, backward=b) for b in (False, True))
        self._results, self._gradients = (channel(behind, backward=b) for b in (False, True))

    def train(self, batches: Sequence[Batch]) -> None:
        """A step for every batch; all five processes call it."""
        step = self._step_apart if self._position == LAYERS.index("conv2") else self._step
        for images, target in batches:
            self._optimizer.zero_grad()
            step(images, target)
            self._optimizer.step()

    def _received(self, images: torch.Tensor) -> torch.Tensor:
        if self._values is None:
            return images
        self._values.prepare()
        return self._values.receive().requires_grad_(True)

    def _step(self, images: torch.Tensor, target: torch.Tensor) -> None:
        value = self._received(images)
        result = self._forward(value)
        if self._results is None or self._gradients is None:
            F.cross_entropy(result, target).backward()
        else:
            self._gradients.prepare()
            self._results.send(result)
            result.backward(self._gradients.receive())
        if self._gradients_out is not None:
            assert value.grad is not None
            self._gradients_out.send(value.grad)

    def _step_apart(self, images: torch.Tensor, target: torch.Tensor) -> None:
        """As ``_step``, but the gradients of the weights after that of the value has gone."""
        assert self._results is not None
        assert self._gradients is not None
        assert self._gradients_out is not None
        weight, bias = self.layer.weight, self.layer.bias
        value = self._received(images).detach()
        with torch.no_grad():
            convolved = F.conv2d(value, weight, bias)
        convolved.requires_grad_(True)
        result = F.max_pool2d(F.relu(convolved), 2)
        self._gradients.prepare()
        self._results.send(result)
        result.backward(self._gradients.receive())

        def gradients(*mask: bool) -> Sequence[torch.Tensor]:
            return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
                *(convolved.grad, value, weight.detach(), [len(bias)]),
                *([1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask),
            )

        self._gradients_out.send(gradients(True, False, False)[0])
        _, weight.grad, bias.grad = gradients(False, True, True)


def stages(net: nn.Module) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The functions that the layers' processes compute, in order."""
    return {
        "conv1": lambda x: F.max_pool2d(F.relu(net.conv1(x)), 2),
        "conv2": lambda x: F.max_pool2d(F.relu(net.conv2(x)), 2),
        "fc1": lambda x: F.relu(net.fc1(torch.flatten(x, 1))),
        "fc2": lambda x: F.relu(net.fc2(x)),
        "fc3": net.fc3,
    }


def digest(module: nn.Module) -> str:
    """Of all bits of a module's parameters."""
    found = hashlib.sha256()
    for parameter in module.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


@contextmanager
def on_core(number: int) -> Iterator[None]:
    """Let this thread run on one core alone, of those it may run on; that of a number."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(allowed)[number % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
