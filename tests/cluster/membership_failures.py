"""What may go wrong in a small cluster: how often, of which kinds, and at which slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from membership_head import AnyEvent, Head, Killed, Silent
from membership_moves import Move
from membership_slot import Slot
from membership_view import View

from graphsplit.cluster.member.state_machine import MemberPhase
from graphsplit.cluster.wire.messages import Failed
from graphsplit.failure import FailureCause

KINDS = ("kill", "break", "raise", "double", "lose", "freeze", "crash")
RAISED = FailureCause("exception", "ValueError: the user's mistake")
_LOSSES = {"nothing lost": False, "all lost": True}


@dataclass(frozen=True)
class Budget:
    """What may still go wrong. The workers are alike, so the first to fail is 0, then 0 or 1.

    Attributes:
        failures: How many more things may go wrong.
        kinds: Of which kinds.
        num_slots: At how many slots, from the first on.
    """

    failures: int = 0
    kinds: frozenset[str] = frozenset()
    num_slots: int = 1

    def after(self, slot: int | None) -> Budget:
        """What may go wrong after a failure at this slot; None: at the scheduler."""
        if self.failures == 1:
            return Budget()
        num_slots = self.num_slots if slot is None else max(self.num_slots, slot + 2)
        return Budget(self.failures - 1, self.kinds, num_slots)

    def spares(self, slot: int) -> bool:
        """Whether nothing will ever go wrong at this slot."""
        return self.failures == 0 or slot >= self.num_slots + self.failures - 1


def failures(slot: Slot, view: View, budget: Budget) -> Iterator[Move]:
    """Everything that can go wrong at this slot."""
    worker = slot.process
    if not budget.failures or slot.number >= budget.num_slots:
        return
    if worker is None or worker.state.is_over:
        return
    kinds, number = budget.kinds, slot.number
    if "kill" in kinds:
        for lost in _variants(slot):
            yield _failure(f"{number} is killed, {lost}", lambda s, k=lost: _kill(s, k))
    if "raise" in kinds and worker.state.phase is MemberPhase.RUNNING:
        yield _failure(f"{number} raises", _raise)
    yield from _failures_of_stream(slot, kinds)
    if "freeze" in kinds and worker.incarnation in view.heard:
        yield _failure(f"{number} is silent", lambda s: Silent(s.worker.incarnation))


def _failures_of_stream(slot: Slot, kinds: frozenset[str]) -> Iterator[Move]:
    stream, number = slot.stream, slot.number
    if stream is None:
        return
    if "break" in kinds and not stream.is_cut:
        for lost in _variants(slot):
            name = f"stream of {number} breaks, {lost}"
            yield _failure(name, lambda s, k=lost: s.stream.cut(loses=_LOSSES[k]))
    for way, whom in enumerate(("scheduler", "worker")):
        queue = stream.queue(way)
        if "double" in kinds and queue:
            yield _failure(f"doubled to {whom}, {number}", lambda s, w=way: _double(s, w))
        if "lose" in kinds and len(queue) > 1:
            yield _failure(f"lost to {whom}, {number}", lambda s, w=way: _drop(s, w))


def failures_of_head(head: Head, budget: Budget) -> Iterator[tuple[str, AnyEvent]]:
    """Everything that can go wrong with the scheduler."""
    if budget.failures and "crash" in budget.kinds and head.state is not None:
        for lost, loses in _LOSSES.items():
            yield f"scheduler is killed, {lost}", Killed(loses)


def _failure(name: str, act: object) -> Move:
    return Move(name, act, is_failure=True)  # type: ignore[arg-type]


def _variants(slot: Slot) -> list[str]:
    stream = slot.stream
    is_idle = stream is None or not (stream.to_scheduler or stream.to_member)
    return ["nothing lost"] if is_idle else list(_LOSSES)


def _kill(slot: Slot, lost: str) -> None:
    """The worker's process is gone."""
    if slot.stream is not None:
        slot.stream.cut(loses=_LOSSES[lost])
    slot.process = None
    if not slot.rules.lets_rejoin:
        slot.outcome = "failed"


def _raise(slot: Slot) -> None:
    """The user's code raises."""
    slot.say(Failed(RAISED))
    slot.worker.state.phase = MemberPhase.FAILED


def _double(slot: Slot, way: int) -> None:
    """The oldest message under way comes twice."""
    assert slot.stream is not None
    queue = slot.stream.queue(way)
    queue.insert(0, queue[0])


def _drop(slot: Slot, way: int) -> None:
    """The oldest message under way is lost, and the stream goes on."""
    assert slot.stream is not None
    slot.stream.queue(way).pop(0)
