"""Moments inside the processes of a job, at which a test lets something happen to it.

Calls of graphsplit are wrapped for the life of the process; nothing waits, and nothing sleeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphsplit.capture.graph import Mode
from graphsplit.recovery.snapshot.replicator import Replicator
from graphsplit.runtime.runner import ProgramRunner


def before(owner: Any, name: str, come: Callable[[], None]) -> None:
    """Before every call of a function that a class or a module has under a name."""
    function = getattr(owner, name)

    def watched(*arguments: Any, **options: Any) -> Any:
        come()
        return function(*arguments, **options)

    setattr(owner, name, watched)


def before_instructions(come: Callable[[bool, str, int], None]) -> None:
    """Before every instruction: whether its step is one of training, its name, and which step."""
    bind: Any = ProgramRunner._bind

    def watched(runner: Any, instruction: Any) -> Any:
        action = bind(runner, instruction)
        is_training = runner._plan.placed.graph.mode is Mode.TRAIN
        opcode = instruction.opcode.name

        def run(state: Any) -> None:
            come(is_training, opcode, state.step)
            action(state)

        return run

    ProgramRunner._bind = watched  # type: ignore[method-assign]


def after_snapshots(come: Callable[[int], None]) -> None:
    """After a part of a snapshot was offered to those who hold it: of which snapshot."""
    offer: Any = Replicator.offer

    def watched(replicator: Any, part: Any, *arguments: Any, **options: Any) -> None:
        offer(replicator, part, *arguments, **options)
        come(part.number)

    Replicator.offer = watched  # type: ignore[method-assign]
