"""What both ends of the control stream must know about gRPC. Imports no gRPC itself."""

from __future__ import annotations

from graphsplit.cluster import limits
from graphsplit.security.grpc_ports import server_limits

SERVICE = "graphsplit.cluster.v1.Cluster"
METHOD = "Session"
STATUS_METHOD = "Status"
# What a handshake under the job's token is for, on this plane.
PURPOSE = b"control plane"

Options = list[tuple[str, int]]

_KEEPALIVE_INTERVAL_MS = 10_000
_MAX_METADATA_BYTES = 8 << 10
_MAX_PING_STRIKES = 100


def format_address(host: str, port: int) -> str:
    """``host:port`` as gRPC wants it, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def server_options(*, num_workers: int, node_timeout_s: float) -> Options:
    """Options of the scheduler's server."""
    return [
        *server_limits(
            max_connections=max_connections(num_workers), max_metadata_bytes=_MAX_METADATA_BYTES
        ),
        ("grpc.max_receive_message_length", limits.MAX_WORKER_MESSAGE_BYTES),
        ("grpc.max_send_message_length", limits.MAX_SCHEDULER_MESSAGE_BYTES),
        # Workers ping as often as the scheduler does; that is no attack. Floods of pings are.
        ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_INTERVAL_MS // 2),
        ("grpc.http2.max_ping_strikes", _MAX_PING_STRIKES),
        *_keepalive(node_timeout_s),
    ]


def channel_options(*, node_timeout_s: float) -> Options:
    """Options of a worker's channel."""
    return [
        # The scheduler is inside the cluster; a proxy for the web would only be in the way.
        ("grpc.enable_http_proxy", 0),
        # Each attempt has a connection of its own, never one shared with another channel.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.max_receive_message_length", limits.MAX_SCHEDULER_MESSAGE_BYTES),
        ("grpc.max_send_message_length", limits.MAX_WORKER_MESSAGE_BYTES),
        *_keepalive(node_timeout_s),
    ]


def max_connections(num_workers: int) -> int:
    """How many streams may be open at once: all workers, and room to refuse others politely."""
    return 4 * num_workers + 16


def _keepalive(node_timeout_s: float) -> Options:
    # Pings notice a connection whose other end is gone without a word (a cable, a power cut).
    return [
        ("grpc.keepalive_time_ms", _KEEPALIVE_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", max(1_000, int(node_timeout_s * 1_000))),
        ("grpc.http2.max_pings_without_data", 0),
    ]
