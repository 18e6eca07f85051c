"""Names of streams that depend only on what is left of the past.

A node is the name of a stream, and an attempt tells which of two streams of a process is the later
one. Nothing depends on more than that: which are equal, and in which order they came. So worlds
that differ in how many streams there were, and not in what is left of them, get the same names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from membership_head import Head
from membership_slot import NODES_PER_SLOT, Slot
from membership_values import copy
from membership_view import View

from graphsplit.cluster.scheduler.job.state import JobState
from graphsplit.cluster.wire.messages import Register


@dataclass(frozen=True)
class Renaming:
    """Other names for the nodes of a slot, and for the attempts of its lives."""

    nodes: tuple[tuple[int, int], ...]
    attempts: tuple[tuple[str, int, int], ...]


def renaming(slot: Slot, view: View) -> Renaming | None:
    """The shortest names for what is left of the past, in the same order; None if they are."""
    nodes = sorted({*slot.streams, *view.nodes})
    first = NODES_PER_SLOT * slot.number
    new_nodes = tuple((old, first + new) for new, old in enumerate(nodes))
    attempts = []
    used = sorted({*view.attempts, *_attempts(slot)})
    for life in sorted({life for life, _ in used}):
        numbers = [number for one, number in used if one == life]
        attempts += [(life, old, new) for new, old in enumerate(numbers, start=1)]
    is_same = all(old == new for old, new in new_nodes) and slot.num_streams == len(nodes)
    if is_same and all(old == new for _, old, new in attempts):
        return None
    return Renaming(new_nodes, tuple(attempts))


def _attempts(slot: Slot) -> set[tuple[str, int]]:
    """Which streams of which lives the slot itself has a note of."""
    found = set()
    if slot.process is not None and slot.process.num_attempts:
        found.add((slot.process.incarnation, slot.process.num_attempts))
    for stream in slot.streams.values():
        for _, message in stream.to_scheduler:
            if isinstance(message, Register):
                found.add((message.incarnation, message.attempt))
    return found


def rename(slot: Slot, names: Renaming) -> None:
    """Change the names in a slot."""
    nodes = dict(names.nodes)
    attempts = {(life, old): new for life, old, new in names.attempts}
    slot.num_streams = len(nodes)
    slot.streams = {nodes[node]: stream for node, stream in slot.streams.items()}
    worker = slot.process
    if worker is not None:
        worker.node = None if worker.node is None else nodes[worker.node]
        if worker.num_attempts:
            worker.num_attempts = attempts[worker.incarnation, worker.num_attempts]
    for stream in slot.streams.values():
        stream.to_scheduler[:] = [
            (fence, renamed(one, attempts) if isinstance(one, Register) else one)
            for fence, one in stream.to_scheduler
        ]


def renamed(one: Register, attempts: dict[tuple[str, int], int]) -> Register:
    """The registration with another number of its stream, if it has one."""
    return replace(one, attempt=attempts.get((one.incarnation, one.attempt), one.attempt))


def rename_in_head(head: Head, names: Renaming) -> Head:
    """The scheduler with other names for the streams of one slot."""
    nodes = dict(names.nodes)
    attempts = {(life, old): new for life, old, new in names.attempts}
    state = copy(head.state)
    if state is not None:
        _rename_in_job(state.job, nodes, attempts)
    return Head(head.rules, state, head.image, head.exit)


def _rename_in_job(
    job: JobState, nodes: dict[int, int], attempts: dict[tuple[str, int], int]
) -> None:
    candidates, roster = job.candidates, job.roster
    candidates.strangers = {
        nodes.get(node, node): since for node, since in candidates.strangers.items()
    }
    candidates.spares = {nodes.get(node, node): one for node, one in candidates.spares.items()}
    candidates.attempts = {
        life: attempts.get((life, n), n) for life, n in candidates.attempts.items()
    }
    roster._by_node = {nodes.get(node, node): one for node, one in roster._by_node.items()}
    for worker in roster:
        worker.node = nodes.get(worker.node, worker.node)
