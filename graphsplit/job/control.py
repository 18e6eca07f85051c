"""Messages outside any plan: step tickets, and tensors in chunks.

Every pair of workers has two channels that need no plan: one for tickets (one small message) and
one for bulk (a tensor in chunks of a fixed size, so that no memory is set aside for the largest).
They are opened when first used.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch

from graphsplit.errors import FrameError
from graphsplit.tensor_meta import TensorMeta
from graphsplit.transport.base import ChannelSpec, Receiver, Sender, Transport

_NO_PLAN = -1
_TICKET_BYTES = 64 * 1024
_CHUNK_BYTES = 1024 * 1024
_TICKET, _BULK = 0, 1


class ControlChannels:
    """Tickets and bulk transfers of one worker. Used by one thread.

    All workers call the methods that name several workers in the same order.
    """

    def __init__(self, transport: Transport, rank: int, num_workers: int) -> None:
        self._transport = transport
        self.rank = rank
        self.num_workers = num_workers
        self._senders: dict[tuple[int, int], Sender] = {}
        self._receivers: dict[tuple[int, int], Receiver] = {}
        self._sent: dict[tuple[int, int], int] = {}
        self._received: dict[tuple[int, int], int] = {}
        # Always the same memory: a channel is quicker with values that are laid out alike.
        self._ticket = torch.empty(0, dtype=torch.uint8)

    def send_ticket(self, data: bytes, *, quiet: Container[int] = ()) -> None:
        """Send a small message to every other worker.

        Args:
            data: The message.
            quiet: Workers that something else will wake, soon after.

        Raises:
            FrameError: It is larger than 64 KiB.
        """
        if len(data) > _TICKET_BYTES:
            raise FrameError(
                f"a step ticket takes {len(data)} bytes; at most {_TICKET_BYTES} are allowed\n"
                f"  Fix: a batch of this many parts cannot be described; group them into tensors."
            )
        if self._ticket.numel() != len(data):
            self._ticket = torch.empty(len(data), dtype=torch.uint8)
        self._ticket.numpy().data[:] = data
        for peer in range(self.num_workers):
            if peer != self.rank:
                self._send(peer, _TICKET, self._ticket, quiet=peer in quiet)

    def receive_ticket(self, source: int) -> bytes:
        """Wait for the next ticket of a worker."""
        return self._receive(source, _TICKET).numpy().tobytes()

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
            octets = _octets(tensor.detach(), meta)
            for start in range(0, octets.numel(), _CHUNK_BYTES):
                for peer in range(self.num_workers):
                    if peer != source:
                        self._send(peer, _BULK, octets[start : start + _CHUNK_BYTES])
            return tensor
        result = torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype)
        octets = torch.empty(meta.size_bytes, dtype=torch.uint8)
        for start in range(0, octets.numel(), _CHUNK_BYTES):
            piece = octets[start : start + _CHUNK_BYTES]
            chunk = self._receive(source, _BULK)
            if chunk.numel() != piece.numel():
                raise FrameError(
                    f"a chunk from worker {source} has {chunk.numel()} bytes; expected "
                    f"{piece.numel()}"
                )
            piece.copy_(chunk)
        return result.copy_(octets.view(meta.dtype).view(meta.shape))

    def send(self, tensor: torch.Tensor, *, destination: int) -> None:
        """Give one worker a tensor's bytes, in row-major order; it calls ``receive`` meanwhile."""
        octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
        for start in range(0, octets.numel(), _CHUNK_BYTES):
            self._send(destination, _BULK, octets[start : start + _CHUNK_BYTES])

    def receive(self, size_bytes: int, *, source: int) -> Iterator[torch.Tensor]:
        """Take the bytes that one worker sends, chunk by chunk; no more is held at a time.

        Args:
            size_bytes: How many bytes are expected. Memory is taken for what came, not for this.
            source: The worker that calls ``send``.

        Raises:
            FrameError: A chunk has another size.
        """
        for start in range(0, size_bytes, _CHUNK_BYTES):
            chunk = self._receive(source, _BULK)
            expected = min(_CHUNK_BYTES, size_bytes - start)
            if chunk.numel() != expected:
                raise FrameError(
                    f"a chunk from worker {source} has {chunk.numel()} bytes; expected {expected}"
                )
            yield chunk

    def _spec(self, source: int, destination: int, kind: int) -> ChannelSpec:
        return ChannelSpec(
            plan=_NO_PLAN,
            edge=2 * (source * self.num_workers + destination) + kind,
            source=source,
            destination=destination,
            dtype=torch.uint8,
            shape=(None,),
            max_bytes=_TICKET_BYTES if kind == _TICKET else _CHUNK_BYTES,
            label=f"{'step tickets' if kind == _TICKET else 'chunks'}: worker {source} -> worker "
            f"{destination}",
        )

    def _send(self, peer: int, kind: int, message: torch.Tensor, *, quiet: bool = False) -> None:
        key = (peer, kind)
        if key not in self._senders:
            self._senders[key] = self._transport.open_sender(self._spec(self.rank, peer, kind))
        number = self._sent.get(key, 0)
        self._sent[key] = number + 1
        self._senders[key].send(message, step=number, microbatch=0, quiet=quiet)

    def _receive(self, peer: int, kind: int) -> torch.Tensor:
        key = (peer, kind)
        if key not in self._receivers:
            spec = self._spec(peer, self.rank, kind)
            self._receivers[key] = self._transport.open_receiver(spec)
        number = self._received.get(key, 0)
        self._received[key] = number + 1
        message = self._receivers[key].receive(step=number, microbatch=0)
        if message is None:
            raise FrameError(f"an empty message from worker {peer} on a control channel")
        return message


def _octets(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    if tensor.dtype != meta.dtype or tuple(tensor.shape) != meta.shape:
        raise FrameError(f"a value is {TensorMeta.of(tensor)}; all workers expect {meta}")
    return tensor.contiguous().view(-1).view(torch.uint8)
