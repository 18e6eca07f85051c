"""Check what a policy gives, whoever wrote it: each computation once, where it belongs, in order.

What comes from other workers, a worker waits for, whatever the order; whether that can end well is
for ``program.proof`` to prove. What comes from the worker itself must have been computed before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphsplit.errors import ScheduleError
from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.program.lower import Policy
from graphsplit.schedule.tasks import Tasks

_EXPECTED = "a list with one list of instructions for each worker"
_PARTS = (Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)


def checked(policy: Policy) -> Policy:
    """A policy whose orders are checked."""

    def check_and_give(
        plan: PartitionPlan, num_microbatches: int
    ) -> Sequence[Sequence[Instruction]]:
        orders = _as_orders(policy(plan, num_microbatches))
        check_orders(plan, orders, num_microbatches)
        return orders

    return check_and_give


def _as_orders(given: Any) -> list[list[Instruction]]:
    """A policy's answer, if it is of the right kind."""
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise ScheduleError(f"the schedule gave {_kind(given)}; expected {_EXPECTED}")
    orders = []
    for worker, order in enumerate(given):
        if isinstance(order, (str, Mapping)) or not isinstance(order, Iterable):
            raise ScheduleError(
                f"the schedule gave {_kind(order)} for worker {worker}; expected {_EXPECTED}"
            )
        orders.append(list(order))
        for item in orders[-1]:
            if not isinstance(item, Instruction):
                raise ScheduleError(
                    f"the schedule has {item!r:.80} in the order of worker {worker}; expected an "
                    f"Instruction, as in Instruction(Opcode.FORWARD, segment, microbatch); "
                    f"Instruction.parse reads one from text"
                )
    return orders


def _kind(given: Any) -> str:
    name = type(given).__name__
    return "None" if given is None else f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def check_orders(
    plan: PartitionPlan, orders: Sequence[Sequence[Instruction]], num_microbatches: int
) -> None:
    """Check the compute of all workers.

    Raises:
        ScheduleError: A computation is missing, too many, on the wrong worker, or too early.
    """
    if len(orders) != plan.num_workers:
        raise ScheduleError(
            f"the schedule has an order for {len(orders)} worker(s); expected one for each of "
            f"{plan.num_workers}"
        )
    tasks = Tasks(plan, _split(plan, orders))
    expected = {i for i, _ in tasks.instructions(num_microbatches)}
    for worker, order in enumerate(orders):
        _check_order(tasks, worker, order, expected)
    if expected:
        missing = min(expected, key=lambda i: (i.microbatch, i.operand, i.opcode.value))
        worker = tasks.worker_of((missing.opcode, missing.operand))
        raise ScheduleError(
            f"the schedule leaves out '{missing}' of worker {worker}"
            + (f", and {len(expected) - 1} more" if len(expected) > 1 else "")
        )


def _split(plan: PartitionPlan, orders: Iterable[Iterable[Instruction]]) -> set[int]:
    found: set[int] = set()
    for order in orders:
        for instruction in order:
            if instruction.opcode not in _PARTS:
                continue
            if instruction.operand not in plan.splits:
                raise ScheduleError(
                    f"the schedule has '{instruction}', but the backward of "
                    f"seg{instruction.operand} cannot be split\n"
                    f"  Fix: give it 'BACKWARD'; plan.splits names the segments that can be split."
                )
            found.add(instruction.operand)
    return found


def _parts(tasks: Tasks, instruction: Instruction) -> tuple[Instruction, ...]:
    """A whole backward is both its parts, where that of other microbatches is split."""
    if instruction.opcode is not Opcode.BACKWARD or instruction.operand not in tasks.split:
        return (instruction,)
    return tuple(replace(instruction, opcode=part) for part in _PARTS)


def _check_order(
    tasks: Tasks, worker: int, order: Sequence[Instruction], expected: set[Instruction]
) -> None:
    done: set[Instruction] = set()
    for instruction in itertools.chain.from_iterable(_parts(tasks, i) for i in order):
        task = (instruction.opcode, instruction.operand)
        if instruction in done:
            raise ScheduleError(f"worker {worker} runs '{instruction}' twice")
        if instruction not in expected:
            raise ScheduleError(f"worker {worker} runs '{instruction}', which is not in the plan")
        if tasks.worker_of(task) != worker:
            raise ScheduleError(
                f"worker {worker} runs '{instruction}', which belongs to worker "
                f"{tasks.worker_of(task)}"
            )
        for earlier, distance in tasks.waits[task]:
            microbatch = instruction.microbatch - distance
            if not tasks.is_in(microbatch, earlier) or tasks.worker_of(earlier) != worker:
                continue
            before = Instruction(*earlier, microbatch)
            if before not in done:
                raise ScheduleError(f"worker {worker} runs '{instruction}' before '{before}'")
        done.add(instruction)
        expected.remove(instruction)
