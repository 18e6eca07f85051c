"""The gRPC server of a worker: a port that is known early and served late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc

from graphsplit._proto import data_plane_pb2 as pb
from graphsplit.errors import ConfigurationError

CHUNK_BYTES = 1 << 20
SERVICE = "graphsplit.data_plane.DataPlane"
GRACE_S = 1.0
HELLO_KEY = "graphsplit-hello-bin"
_OPTIONS = (
    # With port reuse two processes could listen on one address, each getting half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 2 * CHUNK_BYTES),
    ("grpc.max_metadata_size", 16 * 1024),
)


class _DaemonThreads(ThreadPoolExecutor):
    """Runs each call on a daemon thread, so that an open stream never keeps a process alive."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="graphsplit-grpc-stream", daemon=True).start()
        return future


class GrpcListener:
    """A bound port. Nothing is served before ``serve``, when the members of the job are known.

    Attributes:
        address: ``host:port``, for peers to dial.
    """

    def __init__(self, bind_host: str) -> None:
        host = f"[{bind_host}]" if ":" in bind_host else bind_host
        self._is_serving = False
        self._server = grpc.server(_DaemonThreads(), options=_OPTIONS)
        try:
            port = self._server.add_insecure_port(f"{host}:0")
        except RuntimeError:
            port = 0
        if port == 0:
            self.close()
            raise ConfigurationError(
                f"cannot listen on {bind_host!r} for values from other workers\n"
                f"  Fix: MS_WORKER_IP must be an address of this machine"
            )
        self.address = f"{host}:{port}"

    def serve(self, carry: Callable[[Iterator[pb.Chunk], Any], Iterator[pb.Credit]]) -> None:
        """Start to take streams."""
        handler = grpc.stream_stream_rpc_method_handler(
            carry,
            request_deserializer=pb.Chunk.FromString,
            response_serializer=pb.Credit.SerializeToString,
        )
        generic = grpc.method_handlers_generic_handler(SERVICE, {"Carry": handler})
        self._server.add_generic_rpc_handlers((generic,))
        self._server.start()
        self._is_serving = True

    def close(self) -> None:
        """Close the port; streams that do not end by themselves are broken after a moment."""
        if not self._is_serving:
            # Only a server that has run closes its port.
            self._server.start()
        self._is_serving = True
        self._server.stop(grace=GRACE_S).wait()
