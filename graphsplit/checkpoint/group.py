"""The few exchanges between workers that saving and loading need.

Texts are JSON of our own making, read by ``values.from_text``; tensors are bytes of a size that
the receiver knows. Nothing is unpickled, and no path comes from another worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphsplit.checkpoint.layout import (
    meta_from_json,
    meta_to_json,
    octets_of,
    plain_meta,
)
from graphsplit.checkpoint.values import decode, encode, from_text, to_text
from graphsplit.errors import CheckpointError, FrameError
from graphsplit.job.control import ControlChannels
from graphsplit.tensor_meta import TensorMeta

_LENGTH_BYTES = 8
_MAX_TEXT_BYTES = 1 << 30  # memory is taken for what has come, not for what is announced


class Group(ABC):
    """All workers, as one of them sees them. Every worker calls the same methods in one order.

    Attributes:
        rank: This worker.
        num_workers: How many there are.
    """

    rank: int = 0
    num_workers: int = 1

    @abstractmethod
    def send(self, tensor: torch.Tensor, *, destination: int) -> None:
        """Send a tensor's bytes to one worker, which calls ``receive`` meanwhile."""

    @abstractmethod
    def receive(self, size_bytes: int, *, source: int) -> Iterator[torch.Tensor]:
        """Take a tensor's bytes from one worker, piece by piece."""

    def tick(self) -> None:  # noqa: B027  only needed where others wait
        """This worker is alive, and busy with its disk."""

    def receive_tensor(self, meta: TensorMeta, *, source: int) -> torch.Tensor:
        """Take a whole tensor from one worker."""
        octets = torch.empty(meta.size_bytes, dtype=torch.uint8)
        start = 0
        for piece in self.receive(meta.size_bytes, source=source):
            octets[start : start + piece.numel()] = piece
            start += piece.numel()
        return octets.view(meta.dtype).view(meta.shape)

    def send_text(self, text: str, *, destination: int) -> None:
        """Send a text to one worker, which calls ``receive_text`` meanwhile."""
        content = bytearray(text.encode())
        length = bytearray(len(content).to_bytes(_LENGTH_BYTES, "little"))
        self.send(torch.frombuffer(length, dtype=torch.uint8), destination=destination)
        if content:
            self.send(torch.frombuffer(content, dtype=torch.uint8), destination=destination)

    def receive_text(self, *, source: int) -> str:
        """Take a text from one worker.

        Raises:
            FrameError: It is none.
        """
        length = b"".join(p.numpy().tobytes() for p in self.receive(_LENGTH_BYTES, source=source))
        size = int.from_bytes(length, "little")
        if size > _MAX_TEXT_BYTES:
            raise FrameError(f"worker {source} announces a text of {size} bytes")
        content = b"".join(p.numpy().tobytes() for p in self.receive(size, source=source))
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise FrameError(f"worker {source} sent no text: {error}") from None

    def gather(self, text: str) -> list[str]:
        """Every worker's text, on worker 0; elsewhere nothing."""
        if self.rank != 0:
            self.send_text(text, destination=0)
            return []
        return [text, *(self.receive_text(source=peer) for peer in range(1, self.num_workers))]

    def share(self, text: str, *, source: int = 0) -> str:
        """One worker's text, on all; ignored elsewhere."""
        if self.rank != source:
            return self.receive_text(source=source)
        for peer in range(self.num_workers):
            if peer != source:
                self.send_text(text, destination=peer)
        return text

    def exchange(self, text: str) -> list[str]:
        """Every worker's text, on all."""
        return [self.share(text, source=source) for source in range(self.num_workers)]

    def agree_none(self, problems: list[str]) -> None:
        """Raise the same error on every worker if any of them has problems.

        Raises:
            CheckpointError: Lists everybody's problems.
        """
        told = self.exchange("\n".join(problems))
        found = [
            f"worker {rank}: {text}" if self.num_workers > 1 else text
            for rank, text in enumerate(told)
            if text
        ]
        if found:
            raise CheckpointError("\n".join(found))


def read_message(text: str) -> dict[str, Any]:
    """The object that another worker told.

    Raises:
        FrameError: It is none.
    """
    try:
        return from_text(text, what="a message between workers")
    except CheckpointError as error:
        raise FrameError(str(error)) from None


class Alone(Group):
    """One process."""

    def send(self, tensor: torch.Tensor, *, destination: int) -> None:
        """There is nobody."""
        raise AssertionError("one process sends nothing")

    def receive(self, size_bytes: int, *, source: int) -> Iterator[torch.Tensor]:
        """There is nobody."""
        raise AssertionError("one process receives nothing")


class ControlGroup(Group):
    """The workers of a job, over its control channels.

    Args:
        control: The channels.
        tick: Shows the others that this worker is alive.
    """

    def __init__(self, control: ControlChannels, tick: Callable[[], None]) -> None:
        self._control = control
        self._tick = tick
        self.rank = control.rank
        self.num_workers = control.num_workers

    def tick(self) -> None:
        """See ``Group.tick``."""
        self._tick()

    def send(self, tensor: torch.Tensor, *, destination: int) -> None:
        """See ``Group.send``."""
        self._control.send(octets_of(tensor), destination=destination)

    def receive(self, size_bytes: int, *, source: int) -> Iterator[torch.Tensor]:
        """See ``Group.receive``."""
        return self._control.receive(size_bytes, source=source)

    def broadcast(
        self, tensor: torch.Tensor | None, meta: TensorMeta, *, source: int
    ) -> torch.Tensor:
        """One worker's tensor, on all; see ``ControlChannels.broadcast``."""
        return self._control.broadcast(tensor, meta, source=source)


def share_value(group: ControlGroup, value: Any, *, source: int, what: str) -> Any:
    """Give every worker a nested value that one worker has: its description, then every tensor.

    Args:
        group: All workers.
        value: The value, on ``source``; ignored elsewhere.
        source: The worker that has it.
        what: What it is, for errors.

    Returns:
        The value; tensors in it are copies, on every worker.
    """
    is_source = group.rank == source
    mine: dict[str, torch.Tensor] = {}
    described = ""
    if is_source:
        entries = encode(value, mine, path=what)
        metas = {name: meta_to_json(plain_meta(tensor)) for name, tensor in mine.items()}
        described = to_text({"entries": entries, "tensors": metas})
    found = read_message(group.share(described, source=source))
    tensors: dict[str, torch.Tensor] = {}
    for name, node in dict(found["tensors"]).items():
        meta = meta_from_json(node, what=name)
        tensor = group.broadcast(mine.get(name), meta, source=source)
        tensors[name] = tensor.detach().clone() if is_source else tensor
    return decode(found["entries"], tensors.__getitem__)
