"""All workers, as one of them sees them, and what they tell each other outside any plan.

Texts are JSON of our own making; tensors are bytes of a size that the receiver knows. Nothing is
unpickled, and no path comes from another worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch

from graphsplit.encoding import records
from graphsplit.encoding.fields import MessageError
from graphsplit.encoding.packed import Packed
from graphsplit.encoding.values import from_text
from graphsplit.errors import CheckpointError, ConfigurationError, FrameError, InvariantError
from graphsplit.job.stream import joined
from graphsplit.tensor_meta import ALIGNMENT, CPU, TensorMeta, begin_of, empty_beginning_at

_MAX_TEXT_BYTES = 1 << 30  # memory is taken for what has come, not for what is announced
_MAX_VALUE_BYTES = 1 << 40
_T = TypeVar("_T")


class WorkerGroup:
    """All workers, as one of them sees them. This one is alone: it sends and receives nothing.

    Every worker calls the same methods in one order.

    Attributes:
        rank: This worker.
        num_workers: How many there are.
    """

    rank: int = 0
    num_workers: int = 1

    def send(self, *pieces: torch.Tensor, to: Iterable[int]) -> None:
        """Send the bytes of tensors, as one message; those workers call ``receive`` meanwhile."""
        raise InvariantError("one process sends nothing")

    def receive(
        self, size_bytes: int, *, source: int, is_exact: bool = True
    ) -> Iterator[torch.Tensor]:
        """Take a message of one worker, piece by piece.

        Args:
            size_bytes: How large it is.
            source: The worker that calls ``send``.
            is_exact: Whether it is just that large; else it is at most.
        """
        raise InvariantError("one process receives nothing")

    def tick(self) -> None:
        """This worker is alive, and busy with its disk."""

    def name(self, rank: int) -> str:
        """One of them, as people know it."""
        return f"worker {rank}"

    def others(self, rank: int) -> list[int]:
        """All workers but one."""
        return [peer for peer in range(self.num_workers) if peer != rank]

    def receive_tensor(self, meta: TensorMeta, *, source: int) -> torch.Tensor:
        """Take a whole tensor from one worker."""
        octets = torch.empty(meta.size_bytes, dtype=torch.uint8)
        start = 0
        for piece in self.receive(meta.size_bytes, source=source):
            octets[start : start + piece.numel()] = piece
            start += piece.numel()
        return octets.view(meta.dtype).view(meta.shape)

    def send_laid_out(self, tensor: torch.Tensor, *, to: Iterable[int]) -> None:
        """Send a tensor, where it begins, and whether on an accelerator.

        Those workers call ``receive_laid_out`` meanwhile.
        """
        told = begin_of(tensor) + (0 if tensor.is_cpu else ALIGNMENT)
        self.send(tensor, torch.tensor([told], dtype=torch.uint8), to=to)

    def receive_laid_out(self, meta: TensorMeta, *, source: int) -> torch.Tensor:
        """Take a tensor in the layout of ``meta``; it begins in memory where the sender's does.

        Where ``meta`` says nothing else, it is on this worker's accelerator if the sender's is.

        Raises:
            ConfigurationError: This worker has none.
        """
        octets = self.receive_tensor(
            TensorMeta(torch.uint8, (meta.size_bytes + 1,), (1,)), source=source
        )
        received = octets[:-1].view(meta.dtype).view(meta.shape)
        for dim, stride in enumerate(meta.strides):
            if stride == 0 and meta.shape[dim] > 1:  # one element for all of the dimension
                received = received.narrow(dim, 0, 1)
        own, told = replace(meta, shape=tuple(received.shape)), int(octets[-1])
        if told >= ALIGNMENT and own.device == CPU:
            here = torch.accelerator.current_accelerator()
            if here is None:
                raise ConfigurationError(
                    f"{self.name(source)} sent a value that is on an accelerator, and this worker "
                    f"has none\n  Fix: give each worker one, or let several share one."
                )
            own = replace(own, device=str(here))
        made = empty_beginning_at(own, told % ALIGNMENT)
        return made.copy_(received).expand(meta.shape)

    def broadcast(
        self, tensor: torch.Tensor | None, meta: TensorMeta, *, source: int
    ) -> torch.Tensor:
        """Give every worker a tensor that one worker has.

        Args:
            tensor: The tensor, on ``source``; ignored elsewhere.
            meta: Its dtype, shape and strides, known to all workers.
            source: The worker that has it.

        Returns:
            The tensor itself on ``source``; elsewhere a new one with the same bits and strides.
        """
        if self.rank == source:
            assert tensor is not None
            if tensor.dtype != meta.dtype or tuple(tensor.shape) != meta.shape:
                given = TensorMeta.of(tensor)
                raise FrameError(f"a value is {given}; all workers expect {meta}")
            self.send_laid_out(tensor, to=self.others(source))
            return tensor
        return self.receive_laid_out(meta, source=source)

    def receive_text(self, *, source: int) -> str:
        """Take a text from one worker.

        Raises:
            FrameError: It is none.
        """
        try:
            return joined(self.receive(_MAX_TEXT_BYTES, source=source, is_exact=False)).decode()
        except UnicodeDecodeError as error:
            raise FrameError(f"{self.name(source)} sent no text: {error}") from None

    def gather(self, text: str) -> list[str]:
        """Every worker's text, on worker 0; elsewhere nothing."""
        if self.rank != 0:
            self.send(_octets(text), to=(0,))
            return []
        return [text, *(self.receive_text(source=peer) for peer in self.others(0))]

    def share(self, text: str, *, source: int = 0) -> str:
        """One worker's text, on all; ignored elsewhere."""
        if self.rank != source:
            return self.receive_text(source=source)
        if self.num_workers > 1:
            self.send(_octets(text), to=self.others(source))
        return text

    def exchange(self, text: str) -> list[str]:
        """Every worker's text, on all."""
        return [self.share(text, source=source) for source in range(self.num_workers)]

    def share_first(self, text: str, problem: str, *, what: str) -> str:
        """The text of the lowest worker that has one, on all.

        Args:
            text: This worker's; empty where it has none.
            problem: Why it has none, where that is known.
            what: What it is, for errors.

        Raises:
            CheckpointError: Nobody has one; the first reason, the same on all workers.
        """
        seen = self.exchange("1" if text else "")
        if "1" not in seen:
            told = [found for found in self.exchange(problem) if found]
            raise CheckpointError(told[0] if told else f"nobody sees {what} any more")
        return self.share(text, source=seen.index("1"))

    def share_value(self, value: Any, *, source: int, what: str) -> Any:
        """Give every worker a nested value that one worker has.

        Args:
            value: The value, on ``source``; ignored elsewhere.
            source: The worker that has it.
            what: What it is, for errors.

        Returns:
            The value; tensors in it are copies, on every worker.
        """
        if self.rank == source:
            packed = Packed.of(value, what=what)
            self.send(*packed.pieces(), to=self.others(source))
            return packed.value()
        return self.receive_value(source=source, what=what)

    def receive_value(self, *, source: int, what: str) -> Any:
        """Take a nested value from one worker, of which ``Packed`` made the message.

        Raises:
            FrameError: It is none.
        """
        came = self.receive(_MAX_VALUE_BYTES, source=source, is_exact=False)
        return Packed.read(list(came), what=f"{what}, which {self.name(source)} sent,").value()

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


def _octets(text: str) -> torch.Tensor:
    content = bytearray(text.encode())
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()


def read_record(kind: type[_T], text: str, *, what: str) -> _T:
    """The dataclass that another worker told, as ``records.to_text`` writes it.

    Raises:
        FrameError: It is none; names the field.
    """
    try:
        return records.from_text(kind, text, what=what)
    except MessageError as error:
        raise FrameError(str(error)) from None


def read_message(text: str) -> dict[str, Any]:
    """The object that another worker told.

    Raises:
        FrameError: It is none.
    """
    try:
        return from_text(text, what="a message between workers")
    except CheckpointError as error:
        raise FrameError(str(error)) from None
