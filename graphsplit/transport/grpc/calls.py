"""The two calls of the data plane over gRPC: their names, who says that they begin, and how."""

from __future__ import annotations

from typing import Any

from graphsplit._proto import data_plane_pb2 as pb
from graphsplit.transport.session import Hello

SERVICE = "graphsplit.data_plane.DataPlane"
CARRY, PULL = f"/{SERVICE}/Carry", f"/{SERVICE}/Pull"
HELLO_KEY = "graphsplit-hello-bin"
DIAL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # A connection of its own for each call: a port allows one on each.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


def write_hello(hello: Hello) -> bytes:
    """A hello as it travels. Its job and its token do not: they are proved."""
    return pb.Hello(
        generation=hello.generation,
        source=hello.source,
        destination=hello.destination,
    ).SerializeToString()


def hello_of(context: Any) -> Hello | None:
    """The hello in a call's metadata, or None if there is none."""
    raw = dict(context.invocation_metadata()).get(HELLO_KEY, b"")
    try:
        message = pb.Hello.FromString(raw)
    except Exception:
        # protobuf's DecodeError; whatever it is, a stranger sent it.
        return None
    return Hello("", message.generation, message.source, message.destination)
