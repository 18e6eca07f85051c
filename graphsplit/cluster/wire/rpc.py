"""The names and options of the control stream in gRPC. Imports no gRPC itself."""

from __future__ import annotations

import socket

from graphsplit.cluster.wire import limits
from graphsplit.security.grpc_ports import keepalive, server_limits
from graphsplit.text import cut_end, encodable

SERVICE = "graphsplit.cluster.v1.Cluster"
METHOD = "Session"
STATUS_METHOD = "Status"
# What a handshake under the job's token is for, on this plane.
PURPOSE = b"control plane"

Options = list[tuple[str, int]]

_MAX_METADATA_BYTES = 8 << 10
# The scheduler counts the silence of workers itself, and can say more of it than gRPC.
_PATIENCE = 2.0


def format_address(host: str, port: int) -> str:
    """``host:port`` as gRPC wants it, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def server_options(*, num_workers: int, silence_s: float) -> Options:
    """Options of the scheduler's server."""
    return [
        *server_limits(
            max_connections=max_connections(num_workers), max_metadata_bytes=_MAX_METADATA_BYTES
        ),
        ("grpc.max_receive_message_length", limits.MAX_WORKER_MESSAGE_BYTES),
        ("grpc.max_send_message_length", limits.MAX_SCHEDULER_MESSAGE_BYTES),
        *keepalive(silence_s, patience=_PATIENCE),
    ]


def channel_options(*, silence_s: float) -> Options:
    """Options of a worker's channel."""
    return [
        # The scheduler is inside the cluster; a proxy for the web would only be in the way.
        ("grpc.enable_http_proxy", 0),
        # Each attempt has a connection of its own, never one shared with another channel.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.max_receive_message_length", limits.MAX_SCHEDULER_MESSAGE_BYTES),
        ("grpc.max_send_message_length", limits.MAX_WORKER_MESSAGE_BYTES),
        *keepalive(silence_s),
    ]


def max_connections(num_workers: int) -> int:
    """How many streams may be open at once: all workers, and room to refuse others politely."""
    return 4 * num_workers + 32


def own_host() -> str:
    """The name of this machine."""
    return cut_end(encodable(socket.gethostname() or "unknown"), limits.MAX_HOST_CHARS)
