"""The sending side of gRPC streams: one stream per destination."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import grpc
import torch

from graphsplit._proto import data_plane_pb2 as pb
from graphsplit.errors import TransportError
from graphsplit.transport._grpc_listener import CHUNK_BYTES, HELLO_KEY, SERVICE
from graphsplit.transport.base import ChannelSpec, Sender
from graphsplit.transport.frame import MESSAGE, Frame, FrameEncoder, describe
from graphsplit.transport.layout import pack
from graphsplit.transport.session import TICK_S, AbortWatch, Session
from graphsplit.transport.wait import Wait

FLUSH_S = 5.0
"""How long ``close`` gives a healthy peer to take what was sent already."""

_PAYLOAD_TAG = bytes([pb.Chunk.PAYLOAD_FIELD_NUMBER << 3 | 2])
_OPTIONS = (("grpc.enable_http_proxy", 0),)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _chunks(prefix: bytes, header: bytes, address: int, size_bytes: int) -> Iterator[bytes]:
    """The serialized ``Chunk`` messages of one value, copied out of its memory once.

    A protobuf message may be written field by field, so the payload needs no message of its own.
    ``prefix`` holds the channel's fields.
    """
    first = prefix + pb.Chunk(header=header).SerializeToString()
    if size_bytes == 0:
        yield first
    for start in range(0, size_bytes, CHUNK_BYTES):
        size = min(CHUNK_BYTES, size_bytes - start)
        piece = (ctypes.c_char * size).from_address(address + start)
        fields = first if start == 0 else prefix
        yield b"".join((fields, _PAYLOAD_TAG, _varint(size), piece))


class GrpcSender(Sender):
    """The sending end of a channel. May send as long as it has credit from the receiver."""

    def __init__(self, spec: ChannelSpec, outbound: Outbound, watch: AbortWatch, generation: int):
        self.spec = spec
        self.closed = False
        self.granted = 0
        self._outbound = outbound
        self._watch = watch
        self._encoder = FrameEncoder(spec, generation=generation)
        self._prefix = pb.Chunk(plan=spec.plan, edge=spec.edge).SerializeToString()
        self._num_sent = 0

    def has_credit(self) -> bool:
        """True if ``send`` would return at once."""
        return self._num_sent < self.granted

    def send(
        self, value: torch.Tensor | None, *, step: int, microbatch: int, quiet: bool = False
    ) -> None:
        """See ``Sender.send``."""
        frame = self._encoder.frame_of(value)
        if self.closed or not self.has_credit() or self._outbound.broken is not None:
            self._outbound.wait(self._watch, describe(self.spec), self)
        header = MESSAGE.pack(self._num_sent, step, microbatch) + frame.raw
        self._num_sent += 1
        self._outbound.put(self._copied(value, frame, header))

    def _copied(self, value: torch.Tensor | None, frame: Frame, header: bytes) -> list[bytes]:
        if value is None or frame.layout is None:
            return list(_chunks(self._prefix, header, 0, 0))
        memory = value.detach()
        # Conjugation and negation may be pending in a value, and are not in its memory yet.
        if not frame.layout.is_dense or memory.is_conj() or memory.is_neg():
            memory, _ = pack(memory)
        return list(_chunks(self._prefix, header, memory.data_ptr(), frame.payload_bytes))


class Outbound:
    """The stream to one destination. Thread-safe."""

    def __init__(self, peer: int, target: str, session: Session) -> None:
        self.peer = peer
        self.broken: str | None = None
        self._changed = threading.Condition()
        self._senders: dict[tuple[int, int], GrpcSender] = {}
        # Credits of channels that this worker has not opened yet.
        self._early: dict[tuple[int, int], int] = {}
        self._closed_plans: set[int] = set()
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        carry = self._channel.stream_stream(
            f"/{SERVICE}/Carry", response_deserializer=pb.Credit.FromString
        )
        hello = session.hello_to(peer)
        message = pb.Hello(
            job=hello.job,
            generation=hello.generation,
            source=hello.source,
            destination=hello.destination,
            token=hello.token,
        )
        self._call = carry(
            iter(self._queue.get, None),
            metadata=[(HELLO_KEY, message.SerializeToString())],
            wait_for_ready=True,
        )
        name = f"graphsplit-grpc-credits-{peer}"
        self._thread = threading.Thread(target=self._read_credits, name=name, daemon=True)
        self._thread.start()

    def add(self, sender: GrpcSender) -> None:
        """Open a channel. The receiver's first credit may be here already."""
        with self._changed:
            early = self._early.pop((sender.spec.plan, sender.spec.edge), 0)
            sender.granted += early
            self._senders[sender.spec.plan, sender.spec.edge] = sender

    def remove_plan(self, plan: int) -> None:
        """Close the channels of a plan."""
        with self._changed:
            for key in [key for key in self._senders if key[0] == plan]:
                self._senders.pop(key).closed = True
            self._closed_plans.add(plan)
            self._changed.notify_all()

    def put(self, chunks: list[bytes]) -> None:
        """Write to the stream, in order, without waiting."""
        for chunk in chunks:
            self._queue.put(chunk)

    def notify(self) -> None:
        """Make every thread that waits for this destination look around."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, watch: AbortWatch, what: str, sender: GrpcSender) -> None:
        """Wait until a sender has credit."""
        wait = Wait(watch.policy, peer=self.peer, what=what)
        with self._changed:
            while not (sender.closed or sender.has_credit() or self.broken is not None):
                wait.check()
                self._changed.wait(TICK_S)
        if sender.closed:
            raise TransportError(f"{what}: the channel was closed")
        if self.broken is not None:
            watch.raise_broken(f"{what}: worker {self.peer}: {self.broken}")

    def close(self, *, flush: bool) -> None:
        """End the stream; with ``flush``, only after the peer has read all of it."""
        self._queue.put(None)
        if flush:
            self._thread.join(FLUSH_S)
        self._call.cancel()
        self._thread.join()
        self._channel.close()

    def _read_credits(self) -> None:
        reason = "closed its end"
        try:
            for credit in self._call:
                self._grant(credit)
        except grpc.RpcError as error:
            reason = f"{self._call.code().name.lower()}: {self._call.details() or error}"
        with self._changed:
            self.broken = reason
            self._changed.notify_all()
        # Lets grpc's own thread, which waits for the next chunk, end.
        self._queue.put(None)

    def _grant(self, credit: pb.Credit) -> None:
        key = credit.plan, credit.edge
        with self._changed:
            sender = self._senders.get(key)
            if sender is None and credit.plan in self._closed_plans:
                return
            if sender is None:
                self._early[key] = self._early.get(key, 0) + credit.messages
                return
            sender.granted += credit.messages
            self._changed.notify_all()
