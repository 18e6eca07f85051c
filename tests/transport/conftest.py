"""Fixtures: the workers of a job, and a check that nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphsplit.transport.shm import region

sys.path.insert(0, str(Path(__file__).parent))

from transport_helpers import DEADLINE_S, KINDS, MakeWorkers, Workers


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The transport under test."""
    return str(request.param)


@pytest.fixture
def make(kind: str) -> Iterator[MakeWorkers]:
    """Makes the workers of a job, and closes them after the test."""
    made: list[Workers] = []

    def make_workers(count: int = 2, *, deadline_s: float = DEADLINE_S, **policy: Any) -> Workers:
        made.append(Workers(kind, count, deadline_s, **policy))
        return made[-1]

    yield make_workers
    for workers in made:
        workers.close()


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads, mappings or file descriptors behind."""
    before = _held()
    yield
    request.node.funcargs.clear()
    for attempt in range(2000):
        if attempt == 50:
            # An exception that a test caught may hold on to a frame; that is no leak.
            gc.collect()
        leaks = [name for name, count in _held().items() if count > before[name]]
        if not leaks:
            return
        time.sleep(0.01)
    pytest.fail(f"left behind: {leaks}, before {before}, after {_held()}", pytrace=False)


def _held() -> dict[str, int]:
    return {
        "threads": threading.active_count(),
        "mappings": region.num_mapped,
        "descriptors": _num_descriptors(),
    }


def _num_descriptors() -> int:
    """Open descriptors, without those that gRPC keeps for its own polling."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        count += "eventpoll" not in target and "eventfd" not in target
    return count


@pytest.fixture
def ticks() -> itertools.count[int]:
    """A counter for progress."""
    return itertools.count()
