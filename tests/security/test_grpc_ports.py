"""What both planes do with gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from graphsplit.security.grpc_ports import first_metadata


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
