"""What both planes do with gRPC."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from graphsplit.errors import ConfigurationError
from graphsplit.security.grpc_ports import ANY_PORT, first_metadata, free_ports
from graphsplit.transport.hub import Hub


class Call:
    """A call that ends, and may never tell that its metadata will not come."""

    def __init__(self, metadata: tuple[tuple[str, bytes], ...] | None, *, has_ended: bool) -> None:
        self._metadata = metadata
        self._has_ended = has_ended
        self._told = threading.Event()
        self._callbacks: list[Callable[[], None]] = []

    def initial_metadata(self) -> tuple[tuple[str, bytes], ...] | None:
        if self._metadata is None:
            self._told.wait(60)
        return self._metadata

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self._callbacks.append(callback)
        return not self._has_ended

    def end(self) -> None:
        for callback in self._callbacks:
            callback()

    def close(self) -> None:
        self._told.set()


def test_only_free_ports_of_a_range_are_taken() -> None:
    assert list(free_ports("127.0.0.1", ANY_PORT)) == [0]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert port not in list(free_ports("127.0.0.1", (port, port)))
        ports = (min(port, 65_533), min(port, 65_533) + 2)
        found = list(free_ports("127.0.0.1", ports))
        assert set(found) <= set(range(ports[0], ports[1] + 1)) - {port}
    assert list(free_ports("127.0.0.1", (port, port))) == [port]
    assert list(free_ports("192.0.2.1", (port, port))) == []


def test_a_worker_listens_on_a_port_of_its_range_or_says_that_none_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    first = Hub(bind_host="127.0.0.1", mode="grpc", ports=(port, port))
    assert first.endpoints["grpc"] == f"127.0.0.1:{port}"
    with pytest.raises(ConfigurationError, match=rf"from {port} to {port},.*(\n.*)two ports for"):
        Hub(bind_host="127.0.0.1", mode="grpc", ports=(port, port))
    first.close()


def test_what_the_other_end_says_first_is_waited_for() -> None:
    assert first_metadata(Call((("key", b"value"),), has_ended=False)) == (("key", b"value"),)


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_call_that_ends_without_metadata_is_not_waited_for(has_ended: bool) -> None:
    call = Call(None, has_ended=has_ended)
    ending = threading.Timer(0.05, call.end)
    ending.start()
    assert first_metadata(call) == ()
    ending.join()
    call.close()
