"""Measures a program while it runs: when each instruction ended, and what it cost in CPU time.

Two clocks are read after each instruction: ``perf_counter_ns``, which runs on, and the thread's CPU
time, which stands still while the thread waits, or while others have its core. An instruction's
span begins where the one before ended, so nothing is left unaccounted for.

The first run is not timed. In it, what autograd saves is counted::

    run 0    bytes that each segment saves for its backward
    run 1..  times

A runner that is not watched runs the actions that it was bound to, and nothing of this.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.runtime.runner import ProgramRunner
from graphsplit.runtime.step_state import Action, StepState

_NEVER = -1


@dataclass(frozen=True)
class TimedRun:
    """One run of a worker's program.

    Attributes:
        step: Number of the step in the job.
        before_ns: When the program of the step before ended; -1 if it was another one.
        before_cpu_ns: The thread's CPU time then.
        begin_ns: When this one began.
        begin_cpu_ns: The thread's CPU time then.
        ends_ns: When each instruction ended.
        ends_cpu_ns: The thread's CPU time then.
    """

    step: int
    before_ns: int
    before_cpu_ns: int
    begin_ns: int
    begin_cpu_ns: int
    ends_ns: tuple[int, ...]
    ends_cpu_ns: tuple[int, ...]


class StepRecorder:
    """Watches one runner, from ``start`` to ``stop``.

    Args:
        runner: The runner.
        num_runs: How many runs are timed at the most.

    Attributes:
        runs: What was measured.
        activations: Bytes that each segment saves for its backward, by segment.
    """

    def __init__(self, runner: ProgramRunner, num_runs: int) -> None:
        self.runs: list[TimedRun] = []
        self._num_runs = num_runs
        self.activations: dict[int, int] = {}
        self._runner = runner
        self._ends = [0] * len(runner.instructions)
        self._cpu_ends = [0] * len(runner.instructions)
        self._begin = (0, 0)
        self._last = (_NEVER, 0, 0)  # step and end of the run before
        self._has_counted = False

    @property
    def is_done(self) -> bool:
        """Whether all runs are timed."""
        return len(self.runs) >= self._num_runs

    def begin(self, step: int) -> None:
        """The next run is watched, and begins now."""
        if self.is_done:
            self.stop()
            return
        if not self._has_counted:
            self._runner.watch(self._counting)
        elif not self.runs:
            self._runner.watch(self._timing)
        self._step = step
        self._begin = (time.perf_counter_ns(), time.thread_time_ns())

    def end(self) -> None:
        """The run has ended."""
        if self.is_done:
            return
        if not self._has_counted:
            self._has_counted = True
        else:
            follows = self._last[0] == self._step - 1
            before = self._last[1:] if follows else (_NEVER, 0)
            ends = tuple(self._ends), tuple(self._cpu_ends)
            self.runs.append(TimedRun(self._step, *before, *self._begin, *ends))
        self._last = (self._step, time.perf_counter_ns(), time.thread_time_ns())

    def stop(self) -> None:
        """Nothing is watched any more."""
        self._runner.watch(None)

    def _timing(self, position: int, action: Action) -> Action:
        ends, cpu_ends = self._ends, self._cpu_ends
        now, cpu_now = time.perf_counter_ns, time.thread_time_ns

        def run_and_note(state: StepState) -> None:
            action(state)
            ends[position] = now()
            cpu_ends[position] = cpu_now()

        return run_and_note

    def _counting(self, position: int, action: Action) -> Action:
        instruction = self._runner.instructions[position]
        if instruction.opcode is not Opcode.FORWARD:
            return action
        return self._counting_saved(instruction, action)

    def _counting_saved(self, instruction: Instruction, action: Action) -> Action:
        # Parameters are there anyway, whoever saves them.
        held = {t.untyped_storage().data_ptr() for t in self._runner.state.values()}

        def run_and_count(state: StepState) -> None:
            saved: dict[int, int] = {}

            def note(tensor: torch.Tensor) -> torch.Tensor:
                if tensor.layout is torch.strided:
                    memory = tensor.untyped_storage()
                    saved[memory.data_ptr()] = memory.nbytes()
                # The tensor itself would keep its own graph alive.
                return tensor.detach()

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                action(state)
            size = sum(n for memory, n in saved.items() if memory not in held)
            before = self.activations.get(instruction.operand, 0)
            self.activations[instruction.operand] = max(before, size)

        return run_and_count
