"""Actions that go with an instruction: announcing values, letting others first, freeing memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from graphsplit.program.liveness import GENERATOR, HeldValue
from graphsplit.runtime.step_state import StepState
from graphsplit.transport.base import Sender

Action = Callable[[StepState], None]


def announcing(senders: Sequence[Sender], action: Action) -> Action:
    """Announce the values that are sent right after it, so that their receivers are awake."""
    announcements = [sender.announce for sender in senders]

    def announce_and_run(state: StepState) -> None:
        for announce in announcements:
            announce()
        action(state)

    return announce_and_run


def holding(sender: Sender, action: Action) -> Action:
    """Tell that another value to the same worker follows."""

    def hold_and_send(state: StepState) -> None:
        sender.hold()
        action(state)

    return hold_and_send


def letting_others_first(action: Action) -> Action:
    """Yield the core before what nobody waits for, to a worker that a value sent before has woken.

    Where there are fewer cores than workers it may wait for this very core.
    """

    def yield_and_run(state: StepState) -> None:
        os.sched_yield()
        action(state)

    return yield_and_run


def freeing(action: Action, held: Sequence[HeldValue]) -> Action:
    """Forget afterwards what nothing reads any more; see ``program.liveness``."""

    def run_and_free(state: StepState) -> None:
        action(state)
        for microbatch, value in held:
            if value == GENERATOR:
                del state.generators[microbatch]
            else:
                del state.values[microbatch][value]

    return run_and_free
