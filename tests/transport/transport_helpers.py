"""Workers that are threads of this process, joined by each of the transports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest
import torch
from simulated.memory import MemoryFabric, MemoryTransport

from graphsplit.failure import AbortSignal
from graphsplit.transport.base import ChannelSpec, Receiver, Sender, Transport
from graphsplit.transport.grpc.pull import Puller
from graphsplit.transport.hub import Hub
from graphsplit.transport.wait import WaitPolicy

T = TypeVar("T")
DEADLINE_S = 20.0
KINDS = ("memory", "shm", "grpc", "gloo")


def start(call: Callable[[], T]) -> Future[T]:
    """Run a call on a thread; ask the future for its result."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def note_pulled(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Returns a list of all messages that destinations pull from now on."""
    pulled: list[bytes] = []
    take = Puller._take

    def noting(self: Puller, data: bytes) -> bytes:
        pulled.append(data)
        return take(self, data)

    monkeypatch.setattr(Puller, "_take", noting)
    return pulled


def spec_of(
    dtype: torch.dtype = torch.float32,
    shape: tuple[int | None, ...] = (4,),
    *,
    max_bytes: int = 4096,
    depth: int = 2,
    edge: int = 0,
    plan: int = 0,
    source: int = 0,
    destination: int = 1,
) -> ChannelSpec:
    """A channel from worker 0 to worker 1."""
    return ChannelSpec(plan, edge, source, destination, dtype, shape, max_bytes, depth)


class Workers:
    """The transports of one job, one for each worker."""

    def __init__(self, kind: str, count: int, deadline_s: float, **policy: Any) -> None:
        self.kind = kind
        self.aborts = [AbortSignal() for _ in range(count)]
        policies = [WaitPolicy(abort, deadline_s, **policy) for abort in self.aborts]
        if kind == "memory":
            fabric = MemoryFabric()
            self.transports: list[Transport] = [
                MemoryTransport(fabric, generation=1, policy=policy) for policy in policies
            ]
            return
        hubs = [Hub(bind_host="127.0.0.1", mode=kind) for _ in range(count)]  # type: ignore[arg-type]
        peers = [hub.endpoints for hub in hubs]
        self.transports = [
            hub.connect(rank=rank, job="job", generation=1, peers=peers, policy=policies[rank])
            for rank, hub in enumerate(hubs)
        ]

    def open(self, spec: ChannelSpec) -> tuple[Sender, Receiver]:
        """Both ends of a channel."""
        sender = self.transports[spec.source].open_sender(spec)
        return sender, self.transports[spec.destination].open_receiver(spec)

    def close(self) -> None:
        """Close all transports, each on its own thread, as workers do."""
        for future in [start(transport.close) for transport in self.transports]:
            future.result(DEADLINE_S)


MakeWorkers = Callable[..., Workers]
