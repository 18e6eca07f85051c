"""Faults at exact moments, from inside the processes of a job, each once, whoever comes back.

A fault has a victim, and an observer: the process that comes to the moment. They are the same,
unless a worker tells when the scheduler is to be hit, or the scheduler when a worker is. The
moments are calls of graphsplit that are wrapped here; nothing waits, and nothing sleeps.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from moments import after_snapshots, before, before_instructions
from quiet_time import quiet_time

from graphsplit.checkpoint.disk.files import TensorFileWriter
from graphsplit.cluster.member.connection import Connection
from graphsplit.cluster.member.member import Member
from graphsplit.cluster.member.state_machine import MemberState
from graphsplit.cluster.scheduler.decisions import ending, recovery
from graphsplit.cluster.scheduler.job.events import Received
from graphsplit.cluster.scheduler.state_machine import SchedulerState
from graphsplit.cluster.wire.messages import Arrive, MeetingKind, Register
from graphsplit.distribute.calls import NetworkCalls
from graphsplit.failure import AbortSignal
from graphsplit.optimizers.optimizer import OwnedOptimizer
from graphsplit.planning.planner import Planner

EXCEPTION = "exception"
INJECTED = "injected by the matrix"
TOLD, HIT = "told", "hit"
WAIT_S = 30.0


@dataclass(frozen=True)
class Fault:
    """What is to go wrong.

    Attributes:
        victim: Who is hit: ``scheduler`` or ``worker 1``.
        observer: Who comes to the moment.
        what: The moment, as a hook below names it.
        number: Which one of that name: of a step, a snapshot, or a count from 0.
        how: ``SIGKILL``, ``SIGSTOP`` or ``exception``; empty for an undisturbed run.
    """

    victim: str = ""
    observer: str = ""
    what: str = ""
    number: int = 0
    how: str = ""

    def write(self, folder: Path) -> None:
        """Leave it where the processes of the job look for it."""
        (folder / "fault.json").write_text(json.dumps(asdict(self)))


def _times() -> str:
    """This moment, by the clock, and by that which stands still while anything waits for a core."""
    return f"{time.monotonic()!r} {quiet_time()!r}"


class Injector:
    """Watches one process of a job, and hits when the moment has come.

    Args:
        folder: Of this run: the fault, pids, and marks with times.
        is_own_loop: Whether the script's own loop trains, rather than a Model.
    """

    def __init__(self, folder: Path, *, is_own_loop: bool = False) -> None:
        self._folder = folder
        self._is_own_loop = is_own_loop
        self._fault = Fault(**json.loads((folder / "fault.json").read_text()))
        rank = os.environ.get("MS_NODE_ID", "")
        self._name = f"worker {rank}" if rank else "scheduler"
        self._counts: dict[str, int] = {}
        self._raises_next = False
        self._note("pids", f"{self._name}: {os.getpid()}")
        (folder / f"{self._name}.pid").write_text(str(os.getpid()))
        self._watch_what_is_told()
        is_at_finish = self._fault.what == "AT FINISH" and self._fault.victim != "scheduler"
        if rank and is_at_finish and self._name != self._fault.victim:
            self._come_to_the_finish_later()
        if self._name == self._fault.observer:
            self._watch_worker() if rank else self._watch_scheduler()
        if self._name == self._fault.victim == "scheduler":
            self._raise_when_signalled()

    def _note(self, file: str, line: str) -> None:
        with (self._folder / file).open("a") as log:
            log.write(line + "\n")

    def _here(self, what: str, number: int | None = None) -> None:
        if what != self._fault.what:
            return
        if number is None:
            number = self._counts[what] = self._counts.get(what, -1) + 1
        if number != self._fault.number:
            return
        try:
            with (self._folder / HIT).open("x") as mark:
                mark.write(_times())
        except FileExistsError:
            return
        self._hit()

    def _hit(self) -> None:
        is_own = self._fault.victim == self._name
        if self._fault.how == EXCEPTION:
            if is_own and self._name != "scheduler":
                raise RuntimeError(INJECTED)
            os.kill(self._victims_pid(), signal.SIGUSR1)
        else:
            os.kill(self._victims_pid(), signal.Signals[self._fault.how])

    def _victims_pid(self) -> int:
        return int((self._folder / f"{self._fault.victim}.pid").read_text())

    # Moments.

    def _watch_worker(self) -> None:
        for owner, name, what in (
            (Connection, "register", "JOIN"),
            (Member, "_wait_running", "WAIT"),
            (Planner, "_make", "PLAN"),
            (Member, "agree", "AGREE"),
            (Member, "finish", "FINISH"),
            (TensorFileWriter, "__init__", "SAVE"),
        ):
            before(owner, name, partial(self._here, what))
        if self._is_own_loop:
            self._watch_own_loop()
        else:
            before_instructions(self._come_to_instruction)
        after_snapshots(partial(self._here, "SNAPSHOT"))

    def _watch_own_loop(self) -> None:
        """A worker comes to these with all others, whatever it owns."""

        def forward() -> None:
            self._here("FORWARD" if torch.is_grad_enabled() else "EVAL")

        before(NetworkCalls, "forward", forward)
        before(NetworkCalls, "backward", partial(self._here, "BACKWARD"))
        before(OwnedOptimizer, "stepping", partial(self._here, "OPTIMIZER"))

    def _come_to_instruction(self, is_training: bool, opcode: str, step: int) -> None:
        self._here(opcode if is_training else "EVAL", step)

    def _come_to_the_finish_later(self) -> None:
        """Who is hit while it waits at the finish is not the last one there, and found missing."""

        def wait_until_told() -> None:
            deadline = time.monotonic() + WAIT_S
            pause = threading.Event()
            while not (self._folder / TOLD).exists() and time.monotonic() < deadline:
                pause.wait(0.01)

        before(Member, "finish", wait_until_told)

    def _watch_scheduler(self) -> None:
        handle = SchedulerState.handle

        def watched(state: SchedulerState, event: Any, now: float) -> Any:
            message = event.message if isinstance(event, Received) else None
            is_first_word = isinstance(message, Register)
            if is_first_word:
                self._here("REGISTER")
            effects = handle(state, event, now)
            if is_first_word:
                self._here("REGISTERED")
            if isinstance(message, Arrive) and message.kind is MeetingKind.FINISH:
                victim = self._fault.victim
                worker = state.job.roster.get(event.node)
                if victim == "scheduler" or (worker and f"worker {worker.rank}" == victim):
                    self._here("AT FINISH")
            return effects

        SchedulerState.handle = watched  # type: ignore[method-assign]

    def _raise_when_signalled(self) -> None:
        def note(*_: Any) -> None:
            self._raises_next = True

        def perhaps_raise() -> None:
            if self._raises_next:
                self._raises_next = False
                raise RuntimeError(INJECTED)

        signal.signal(signal.SIGUSR1, note)
        before(SchedulerState, "handle", perhaps_raise)

    # Who knew of it when.

    def _watch_what_is_told(self) -> None:
        for owner, name in (
            (AbortSignal, "set"),
            (MemberState, "lose_stream"),
            (ending, "fail"),
            (recovery, "recover"),
        ):
            before(owner, name, self._note_told)

    def _note_told(self) -> None:
        # Before the call: whom it wakes may keep Python busy for a while.
        if (self._folder / HIT).exists():
            self._note(TOLD, f"{self._name}: {_times()}")
