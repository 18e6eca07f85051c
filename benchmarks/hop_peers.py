"""What a hop is measured against: Gloo's own send and receive, and plain gRPC streams.

Each peer moves float32 tensors between the main threads of two processes, into fresh memory, as
graphsplit does, and as far as that is possible without copies in Python: no headers, no checks, no
credit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import grpc
import torch
import torch.distributed as dist
from grpc.experimental import ChannelOptions

Send = Callable[[torch.Tensor, int], None]
Receive = Callable[[torch.Tensor, int], torch.Tensor]
Ends = tuple[Send, Receive, Callable[[], None]]

_METHOD = "/hop/Stream"
_UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def gloo_ends(rank: int, port: int) -> Ends:
    """The same through ``torch.distributed``, into fresh memory as ours."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)

    def send(value: torch.Tensor, step: int) -> None:
        dist.send(value, 1 - rank)

    def receive(value: torch.Tensor, step: int) -> torch.Tensor:
        received = torch.empty_like(value)
        dist.recv(received, 1 - rank)
        return received

    return send, receive, dist.destroy_process_group


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
        return _sending(server.outgoing), receiving(server.receive), server.close
    channel = grpc.insecure_channel(f"127.0.0.1:{link.recv()}", options=_UNLIMITED)
    outgoing: SimpleQueue[bytes | None] = SimpleQueue()
    call = channel.stream_stream(_METHOD)(iter(outgoing.get, None))

    def close() -> None:
        outgoing.put(None)
        call.cancel()
        channel.close()

    return _sending(outgoing), receiving(lambda: next(call)), close


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
    channel = grpc.insecure_channel(f"127.0.0.1:{link.recv()}", options=options)
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

    return _sending(outgoing), lambda value, step: _into_fresh_memory(arrived.get()), close
