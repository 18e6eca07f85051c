"""The worker's end of the control stream, without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from graphsplit.cluster.member import session as sessions
from graphsplit.cluster.member.session import MemberSession
from graphsplit.cluster.wire.codec import open_worker
from graphsplit.cluster.wire.messages import Failed, Fence, Heartbeat, Register
from graphsplit.cluster.wire.rpc import PURPOSE
from graphsplit.failure import FailureCause
from graphsplit.security.handshake import Listener
from graphsplit.security.protection import Protection
from graphsplit.settings import ClusterSettings

TOKEN = b"0123456789abcdef"


class SlowScheduler:
    """A channel to a scheduler that proves itself only once it is told to."""

    def __init__(self) -> None:
        self.may_prove = threading.Event()
        self.is_over = threading.Event()
        self.requests: Iterator[bytes] = iter(())

    def stream_stream(self, method: str) -> Any:
        def call(requests: Iterator[bytes], metadata: Any) -> SlowScheduler:
            self.requests = requests
            self.listener = Listener(TOKEN, PURPOSE, metadata)
            return self

        return call

    def initial_metadata(self) -> Any:
        assert self.may_prove.wait(10)
        return self.listener.metadata()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return True

    def __iter__(self) -> Iterator[bytes]:
        assert self.is_over.wait(10)
        return iter(())

    def cancel(self) -> None:
        self.is_over.set()

    def close(self) -> None:
        self.is_over.set()


def test_what_is_said_early_waits_until_this_worker_has_proved_itself(
    monkeypatch: pytest.MonkeyPatch, registration: Any
):
    """A worker that comes back may have a failure to report before it is let in again."""
    scheduler = SlowScheduler()
    monkeypatch.setattr(sessions, "open_channel", lambda *_, **__: scheduler)
    first = registration("0")
    session = MemberSession(
        ClusterSettings("MS_WORKER", num_workers=1, scheduler_port=1),
        protection=Protection(None, TOKEN),
        first=first,
        fence=Fence,
        beat=lambda: Heartbeat(0, ""),
        on_message=lambda *_: None,
        on_end=lambda *_: None,
    )
    session.start()
    session.send(Failed(FailureCause("lost", "a link broke")))
    scheduler.may_prove.set()
    assert scheduler.listener.accepts(next(scheduler.requests))
    assert isinstance(open_worker(next(scheduler.requests))[1], Register)
    assert isinstance(open_worker(next(scheduler.requests))[1], Failed)
    session.close(timeout_s=0.1)
