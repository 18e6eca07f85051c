from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphsplit.cluster.scheduler.job.events import (
    Connected,
    Drop,
    Effect,
    Event,
    Exit,
    Log,
    Persist,
    Received,
    Refuse,
    Send,
    Tick,
)
from graphsplit.cluster.scheduler.job.image import JobImage
from graphsplit.cluster.scheduler.job.rules import JobIdentity, JobRules
from graphsplit.cluster.scheduler.state_machine import SchedulerState
from graphsplit.cluster.wire.messages import (
    Arrive,
    Departed,
    Formed,
    MeetingKind,
    Ready,
    Register,
    SchedulerMessage,
    Started,
    WorkerMessage,
)

sys.path.insert(0, str(Path(__file__).parent))

from cluster_helpers import LiveCluster

JOB = JobIdentity(job="ab" * 16, seed=4711)
RULES = JobRules(num_workers=5, topo_timeout_s=1800, node_timeout_s=30, receive_timeout_s=300)


def registration(name: str = "0", **changes: object) -> Register:
    base = Register(
        node_id=name,
        incarnation=f"life-{name}",
        role="MS_WORKER",
        num_workers=5,
        wished_rank=int(name) if name.isdigit() else None,
        host=f"host-{name}",
        pid=100 + (int(name) if name.isdigit() else 50),
        endpoints={"grpc": f"10.0.0.{name}:4711"},
        versions={"graphsplit": "0.1.0", "torch": "2.13.0", "python": "3.11"},
        script_digest="d" * 64,
        num_threads=1,
        cpu_capability="AVX2",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


class Driver:
    """Feeds a scheduler's state under a fake clock and sorts what it wants done.

    Worker ``rank`` sits on node ``rank`` unless a test says otherwise.
    """

    def __init__(self, rules: JobRules) -> None:
        self.now = 0.0
        self.rules = rules
        self.state = SchedulerState(rules, JOB, self.now)
        self.log: list[str] = []
        self.sent: dict[int, list[SchedulerMessage]] = {}
        self.refused: dict[int, str] = {}
        self.exit: Exit | None = None
        self.images: list[JobImage] = []
        self.dropped: list[int] = []
        self.num_departed = 0

    def feed(self, event: Event) -> list[Effect]:
        effects = self.state.handle(event, self.now)
        for effect in effects:
            match effect:
                case Send():
                    if effect.node == 0 and isinstance(effect.message, Departed):
                        self.num_departed += 1
                    self.sent.setdefault(effect.node, []).append(effect.message)
                case Refuse():
                    self.refused[effect.node] = effect.reason
                case Drop():
                    self.dropped.append(effect.node)
                case Persist():
                    self.images.append(effect.image)
                case Log():
                    self.log.append(effect.line)
                case Exit():
                    assert self.exit is None, "a job ends once"
                    self.exit = effect
        return effects

    def say(self, node: int, message: WorkerMessage, *, generation: int | None = None) -> None:
        """A worker of the present generation says something."""
        present = self.state.job.generation.number if generation is None else generation
        self.feed(Received(node, message, present))

    def arrive(self, node: int, kind: MeetingKind, name: str = "", digest: str = "") -> None:
        """A worker comes to its next meeting."""
        self.say(node, Arrive(kind, name, digest, self.num_departed + 1))

    def register(self, node: int, new: Register) -> None:
        self.feed(Connected(node))
        changes = {"num_workers": self.rules.num_workers, "recovery": self.rules.recovery}
        self.say(node, replace(new, **changes))  # type: ignore[arg-type]

    def answer_plan(self) -> None:
        """Every worker that was told a plan is ready for it."""
        for node, messages in list(self.sent.items()):
            if isinstance(messages[-1], Formed):
                self.say(node, Ready(messages[-1].generation))

    def form(self, **changes: object) -> Driver:
        for rank in range(self.rules.num_workers):
            self.register(rank, registration(str(rank), **changes))
        self.answer_plan()
        assert all(messages[-1] == Started(1) for messages in self.sent.values())
        self.sent.clear()
        self.log.clear()
        return self

    def pass_time(self, seconds: float, *, step_s: float = 0.2) -> None:
        """Let the clock tick on, as the shell would."""
        start = self.now
        for step in range(1, round(seconds / step_s) + 1):
            self.now = start + step * step_s
            self.feed(Tick())

    def last(self, node: int) -> SchedulerMessage:
        return self.sent[node][-1]


@pytest.fixture
def drive() -> Callable[..., Driver]:
    def make(**rules: object) -> Driver:
        return Driver(replace(RULES, **rules))  # type: ignore[arg-type]

    return make


@pytest.fixture(name="registration")
def registration_fixture() -> Callable[..., Register]:
    return registration


@pytest.fixture
def start_cluster() -> Iterator[Callable[..., LiveCluster]]:
    """Starts live schedulers; after the test every one of them must have ended."""
    clusters: list[LiveCluster] = []

    def start(num_workers: int, **changes: Any) -> LiveCluster:
        clusters.append(LiveCluster(num_workers, **changes))
        return clusters[-1]

    yield start
    for cluster in clusters:
        cluster.close()
