"""The ends of channels whose hops are measured: ours, and what they are measured against.

Gloo's own send and receive, plain gRPC streams, and bare copies. All move float32 tensors between
the main threads of processes, into fresh memory, as graphsplit does, and the peers as far as that
is possible without copies in Python: no headers, no checks, no credit. Each worker sends to the
next one of a ring, and receives from the one before; two that are a ring play ping-pong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import grpc
import torch
import torch.distributed as dist
from by_hand import BareChannel
from common_cluster import free_port
from gloo_by_hand import GlooByHand
from grpc.experimental import ChannelOptions

from graphsplit.security.protection import UNPROTECTED, Protection
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.endpoints import Mode
from graphsplit.transport.hub import Hub
from graphsplit.transport.wait import WaitPolicy

Send = Callable[[torch.Tensor, int], None]
Receive = Callable[[torch.Tensor, int], torch.Tensor]


def nothing() -> None:
    """Most ends have nothing to announce."""


@dataclass(frozen=True)
class Ends:
    """One worker's ends.

    Attributes:
        send: Sends a value, with its number.
        receive: Receives the value with a number, which is like the given one.
        close: Leaves.
        announce: Tells the receiver that a value is about to come.
    """

    send: Send
    receive: Receive
    close: Callable[[], object]
    announce: Callable[[], None] = nothing


def our_ends(
    mode: Mode,
    rank: int,
    link: Connection,
    sizes: Sequence[int],
    *,
    num_workers: int = 2,
    protection: Protection = UNPROTECTED,
) -> Ends:
    """Through one of our transports, by channels as a plan's edges have them, one for each size."""
    hub = Hub(bind_host="127.0.0.1", mode=mode, protection=protection, num_workers=num_workers)
    link.send(hub.endpoints)
    peers = link.recv()
    transport = hub.connect(rank=rank, job="hop", generation=1, peers=peers, policy=WaitPolicy())
    sends, receives = {}, {}
    for number, size in enumerate(sizes):
        specs = [
            ChannelSpec(
                *(0, number * num_workers + source, source, (source + 1) % num_workers),
                *(torch.float32, (size // 4,), size),
                lends=True,
                keeps=True,
            )
            for source in range(num_workers)
        ]
        sends[size] = transport.open_sender(specs[rank])
        receives[size] = transport.open_receiver(specs[rank - 1])

    def send(value: torch.Tensor, step: int) -> None:
        sends[value.nbytes].send(value, step=step, microbatch=0)

    def receive(value: torch.Tensor, step: int) -> torch.Tensor:
        received = receives[value.nbytes].receive(step=step, microbatch=0)
        if received is None:
            raise SystemExit("a value was lost")
        return received

    return Ends(send, receive, transport.close, sends[sizes[0]].announce)


_METHOD = "/hop/Stream"
_UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def gloo_ends(rank: int, link: Connection, *, num_workers: int = 2) -> Ends:
    """The same through ``torch.distributed``, into fresh memory as ours."""
    link.send(free_port())
    address = f"tcp://127.0.0.1:{link.recv()[0]}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_workers)

    def send(value: torch.Tensor, step: int) -> None:
        dist.send(value, (rank + 1) % num_workers)

    def receive(value: torch.Tensor, step: int) -> torch.Tensor:
        received = torch.empty_like(value)
        dist.recv(received, (rank - 1) % num_workers)
        return received

    return Ends(send, receive, dist.destroy_process_group)


def hand_gloo_ends(rank: int, link: Connection) -> Ends:
    """The same on Gloo by hand, with header, credit and cancellation: see ``GlooByHand``."""
    link.send(free_port())
    store = dist.TCPStore("127.0.0.1", link.recv()[0], 2, is_master=rank == 0)
    found = GlooByHand(store, rank)
    return Ends(found.send, found.receive, found.abort)


def bare_ends(rank: int, num_workers: int, path: str, size: int) -> Ends:
    """The same by bare copies, into memory that is fresh, and taken before the value comes."""
    edges = rank, (rank - 1) % num_workers
    out, into = (BareChannel(path, edge, (size // 4,), size) for edge in edges)
    return Ends(
        lambda value, step: out.send(value),
        lambda value, step: into.receive(),
        nothing,
        into.prepare,
    )


class _Server:
    """One bidirectional stream; its requests are read by whoever calls ``receive``."""

    def __init__(self) -> None:
        self.outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._requests: Any = None
        self._has_stream = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(2), options=_UNLIMITED)
        handler = grpc.stream_stream_rpc_method_handler(self._stream)
        service = grpc.method_handlers_generic_handler("hop", {"Stream": handler})
        self._server.add_generic_rpc_handlers((service,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def _stream(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        self._requests = requests
        self._has_stream.set()
        yield from iter(self.outgoing.get, None)

    def receive(self) -> bytes:
        """The next message of the client."""
        self._has_stream.wait()
        return bytes(next(self._requests))

    def close(self) -> None:
        """End the stream."""
        self.outgoing.put(None)
        self._server.stop(1.0).wait()


def _into_fresh_memory(data: bytes) -> torch.Tensor:
    """One copy: a message cannot be written to, and a received value can."""
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


def _sending(queue: SimpleQueue[bytes | None]) -> Send:
    return lambda value, step: queue.put(value.numpy().tobytes())


def plain_grpc_ends(rank: int, link: Connection) -> Ends:
    """The same through one bidirectional stream of grpcio's, one message for a value."""

    def receiving(take: Callable[[], bytes]) -> Receive:
        return lambda value, step: _into_fresh_memory(take())

    if rank == 0:
        server = _Server()
        link.send(server.port)
        link.recv()
        return Ends(_sending(server.outgoing), receiving(server.receive), server.close)
    link.send(None)
    channel = grpc.insecure_channel(f"127.0.0.1:{link.recv()[0]}", options=_UNLIMITED)
    outgoing: SimpleQueue[bytes | None] = SimpleQueue()
    call = channel.stream_stream(_METHOD)(iter(outgoing.get, None))

    def close() -> None:
        outgoing.put(None)
        call.cancel()
        channel.close()

    return Ends(_sending(outgoing), receiving(lambda: next(call)), close)


def pulled_grpc_ends(rank: int, link: Connection) -> Ends:
    """The same, where each side asks the other one once for all that it will send.

    The thread that reads the answers polls for them itself. In a bidirectional stream a thread of
    grpc's polls, and wakes the one that reads.
    """
    outgoing: SimpleQueue[bytes | None] = SimpleQueue()
    arrived: SimpleQueue[bytes] = SimpleQueue()

    def serve(request: bytes, context: Any) -> Iterator[bytes]:
        return iter(outgoing.get, None)

    def take(data: bytes) -> bytes:
        arrived.put(data)
        return b"taken"  # None would be a message that could not be read

    server = grpc.server(ThreadPoolExecutor(2), options=_UNLIMITED)
    handler = grpc.unary_stream_rpc_method_handler(serve)
    service = grpc.method_handlers_generic_handler("hop", {"Stream": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    link.send(port)
    options = (*_UNLIMITED, (ChannelOptions.SingleThreadedUnaryStream, 1))
    channel = grpc.insecure_channel(f"127.0.0.1:{link.recv()[1 - rank]}", options=options)
    answers = channel.unary_stream(_METHOD, response_deserializer=take)(b"all")

    def read() -> None:
        with suppress(grpc.RpcError):  # it was cancelled
            for _ in answers:
                pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def close() -> None:
        outgoing.put(None)
        answers.cancel()
        reader.join()
        channel.close()
        server.stop(1.0).wait()

    return Ends(_sending(outgoing), lambda value, step: _into_fresh_memory(arrived.get()), close)
