"""Where a worker is: the error of a step in which an operation has raised, and its waits."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch

from graphsplit.cluster.member.identity import ReportedPosition
from graphsplit.failure import AbortSignal
from graphsplit.job.data_plane import DataPlane
from graphsplit.root_cause import NOWHERE
from graphsplit.runtime.whereabouts import step_failed
from graphsplit.settings import ClusterSettings
from graphsplit.transport.wait import Wait


def test_only_an_error_that_values_decide_names_the_way_to_catch_it() -> None:
    try:
        torch.linalg.cholesky(-torch.eye(2))
    except RuntimeError as error:
        told = str(step_failed(error, "here", NOWHERE, (), None))
    assert told.endswith("keep that code whole with gs.opaque.")
    assert "gs.opaque" not in str(step_failed(IndexError("x"), "here", NOWHERE, (), None))


def test_a_wait_is_told_by_the_rank_that_the_scheduler_knows() -> None:
    """Where worker 0 is away the others are numbered anew: 1 would seem to wait for itself."""
    position, abort = ReportedPosition(), AbortSignal()
    member: Any = SimpleNamespace(
        **{"abort": abort, "progress": lambda rank: 0, "position": position, "seats": (1, 2)},
        **{"rank": 0, "plan": SimpleNamespace(job="ab"), "generation": 2, "peers": ()},
    )
    hub: Any = SimpleNamespace(connect=lambda policy, **others: policy)
    policy: Any = DataPlane(ClusterSettings("MS_WORKER", 2, 1), "").connect(hub, member)
    assert position.waiting_source() is None
    wait = Wait(policy, peer=1, what="a value")
    assert position.waiting_source() == (2, "a value")
    del wait


def test_who_stands_still_for_long_tells_the_lines_that_led_there() -> None:
    """A worker that hangs in code which no signal interrupts shows its stack by this alone."""
    position, told = ReportedPosition(), []

    def hangs() -> None:
        for _ in range(10):
            told.append(position.sample().source)

    hangs()
    line = r"tests/runtime/test_whereabouts.py:\d+, in "
    assert all(re.fullmatch(f"{line}hangs", source) for source in told[:9])
    assert re.match(f"{line}hangs, from {line}test_who_stands_still", told[9])
    assert len(told[9].split(", from ")) <= 8
    position.waiting_source = lambda: (0, "a value")
    assert ", from " not in position.sample().source
    position.waiting_source = lambda: None
    position.progress += 1
    assert position.sample().source == ""
    assert ", from " not in position.sample().source
