"""What can happen next at one slot of a small cluster, as long as nothing goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from membership_head import AnyEvent
from membership_slot import Slot
from membership_view import View

from graphsplit.cluster.member.state_machine import MemberPhase


@dataclass(frozen=True)
class Move:
    """Something that can happen at a slot.

    Attributes:
        name: What happens, for people.
        act: Changes the slot; returns what the scheduler notices of it, if anything.
        is_failure: Whether it is something that goes wrong.
    """

    name: str
    act: Callable[[Slot], AnyEvent | None]
    is_failure: bool = False


def moves(slot: Slot, view: View) -> Iterator[Move]:
    """Everything that can happen here while nothing goes wrong."""
    yield from _heard_by_scheduler(slot, view)
    yield from heard_by_worker(slot)
    yield from steps(slot, view)


def _heard_by_scheduler(slot: Slot, view: View) -> Iterator[Move]:
    for node, stream in slot.streams.items():
        if not view.is_there or stream.scheduler_sees_end:
            continue
        if stream.to_scheduler:
            yield Move(f"scheduler hears {node}", lambda s, n=node: s.hear(n))
        elif stream.is_cut:
            yield Move(f"scheduler sees the end of {node}", lambda s, n=node: s.see_end(n))


def heard_by_worker(slot: Slot) -> Iterator[Move]:
    """The next that the worker hears on its stream."""
    stream = slot.stream
    if stream is None:
        return
    node = slot.worker.node
    if stream.to_member:
        yield Move(f"worker hears {node}", lambda s: s.tell(node))
    elif stream.is_cut:
        yield Move(f"worker sees the end of {node}", lambda s: s.lose(node))


def steps(slot: Slot, view: View) -> Iterator[Move]:
    """What the worker does by itself."""
    worker, number = slot.process, slot.number
    if worker is None:
        if not slot.outcome and slot.rules.lets_rejoin:
            yield Move(f"{number} starts again", lambda s: s.start())
        return
    state = worker.state
    if worker.wants_stream and worker.node is None and not state.is_over:
        if view.is_there:
            yield Move(f"{number} connects", lambda s: s.connect())
        elif not view.may_return:
            yield Move(f"{number} gives up", lambda s: s.give_up())
    if state.phase is MemberPhase.RUNNING and state.waits_at is None:
        yield Move(f"{number} arrives", lambda s: s.arrive())
    if state.phase is MemberPhase.RECOVERING:
        yield Move(f"{number} recovers", lambda s: s.offer())
    if state.is_over:
        yield Move(f"{number} leaves", lambda s: s.leave())
