"""The gRPC server of a worker: a port that is known early and served late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc

from graphsplit.errors import ConfigurationError
from graphsplit.logs import say
from graphsplit.security.connections import ConnectionWatch
from graphsplit.security.grpc_ports import (
    ANY_PORT,
    add_port,
    free_ports,
    keepalive,
    server_limits,
)
from graphsplit.security.protection import UNPROTECTED, Protection, require_protection
from graphsplit.settings import MAX_WORKERS, NODE_TIMEOUT_S
from graphsplit.transport.grpc.calls import CARRY, PULL
from graphsplit.transport.grpc.chunk import MAX_MESSAGE_BYTES

GRACE_S = 1.0
PROVE_S = 10.0
"""The time that a source has to prove that it is a member of the job."""
_MAX_METADATA_BYTES = 8 << 10
# gRPC tells only the end that has opened a stream why it broke; so that one is to notice first.
_PATIENCE = 2.0


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


Answer = Callable[[bytes, Any], Iterator[bytes]]
"""Serves a ``Pull``: given its request and its context, all that is sent to who has called."""


class _EachStream(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Finds the handler of a call: a new one for each, because messages are taken by it."""

    def __init__(self, accept: Callable[[], Any], answer: Answer) -> None:
        self._accept = accept
        self._answer = answer

    def service(self, handler_call_details: Any) -> Any:
        """See ``grpc.GenericRpcHandler``."""
        if handler_call_details.method == PULL:
            return grpc.unary_stream_rpc_method_handler(self._answer)
        return self._accept() if handler_call_details.method == CARRY else None


class GrpcListener:
    """A bound port. Nothing is served before ``serve``, when the members of the job are known.

    Args:
        bind_host: The address to listen on.
        protection: What protects the streams.
        num_workers: How many workers the job has: bounds how many streams may be open.
        silence_s: How long nothing may come back from a peer.
        ports: The first and the last port that may be taken; 0: any.

    Attributes:
        address: ``host:port``, for peers to dial.
        protection: As it was given.
        silence_s: As it was given.
    """

    def __init__(
        self,
        bind_host: str,
        *,
        protection: Protection = UNPROTECTED,
        num_workers: int = MAX_WORKERS,
        silence_s: float = NODE_TIMEOUT_S,
        ports: tuple[int, int] = ANY_PORT,
    ) -> None:
        require_protection(bind_host, protection, what="this worker")
        self.protection = protection
        self.silence_s = silence_s
        host = f"[{bind_host}]" if ":" in bind_host else bind_host
        self._is_serving = False
        self._connections: ConnectionWatch | None = None
        max_streams = 2 * num_workers + 16
        # Strangers have as many places beside those of members: see ConnectionWatch.
        options = [
            *server_limits(max_connections=2 * max_streams, max_metadata_bytes=_MAX_METADATA_BYTES),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            *keepalive(silence_s, patience=_PATIENCE),
        ]
        # Each stream has threads of its own, so their number is bounded before one is started.
        self._server = grpc.server(
            _DaemonThreads(), options=options, maximum_concurrent_rpcs=max_streams
        )
        added = (add_port(self._server, f"{host}:{one}", protection)
                 for one in free_ports(bind_host, ports))  # fmt: skip
        port = next(filter(None, added), 0)
        if port == 0:
            self.close()
            among = "" if ports == ANY_PORT else f", on a port from {ports[0]} to {ports[1]},"
            raise ConfigurationError(
                f"cannot listen on {bind_host!r}{among} for values from other workers\n"
                f"  Fix: MS_WORKER_IP must be an address of this machine; GS_WORKER_PORTS, a range "
                f"with two ports for each worker of a machine"
            )
        self.address = f"{host}:{port}"
        self._connections = ConnectionWatch(
            port, num_workers, partial(say, event="refused", level="warning")
        )

    def serve(self, accept: Callable[[], Any], answer: Answer) -> None:
        """Start to take streams: ``accept`` makes a handler for each; ``answer`` serves pulls."""
        self._server.add_generic_rpc_handlers((_EachStream(accept, answer),))
        self._server.start()
        self._is_serving = True

    def prove(self, context: Any) -> None:
        """The peer of this call has proved that it is a member of the job."""
        assert self._connections is not None
        self._connections.prove(context.peer())

    def close(self) -> None:
        """Close the port; streams that do not end by themselves are broken after a moment."""
        if not self._is_serving:
            # Only a server that has run closes its port.
            self._server.start()
        self._is_serving = True
        self._server.stop(grace=GRACE_S).wait()
        if self._connections is not None:
            self._connections.close()
