"""Microbatches of several lanes take turns, and nobody's own work waits for sums of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures
from torch import nn

from graphsplit.planning.ready_plan import ReadyPlan
from graphsplit.program.instruction import BACKWARD, Opcode
from graphsplit.schedule.costs import Costs
from graphsplit.schedule.simulation.simulate import simulate

_captures = Captures()
_OWN = (Opcode.FORWARD, *BACKWARD)


def _net() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2))
    return nn.Sequential(nn.Linear(6, 6), body, nn.Dropout(0.2), nn.Linear(6, 6))


def _place(net: Any) -> None:
    net.place("MS_WORKER", 0)
    net[1].place("MS_WORKER", [1, 2])


def _planned(schedule: str, order: Any = "left") -> ReadyPlan:
    """The plan of a step whose bits are those of the plain loop."""
    cluster = assert_same_bits(
        _net,
        batches_of(16, 6, num=2),
        num_workers=3,
        loss_fn=rows_against_target,
        place=_place,
        microbatches=8,
        gradient_order=order,
        schedule=schedule,
        captures=_captures,
    )
    return next(iter(cluster.workers[0].planner._plans.values()))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble", "interleaved_1f1b"])
@pytest.mark.parametrize("order", ["left", "pairs"])
def test_replicas_behind_one_worker_get_their_microbatches_in_turn(
    schedule: str, order: Any
) -> None:
    planned = _planned(schedule, order)
    stem, *replicas = (
        [i for i in program.instructions if i.opcode in (*_OWN, Opcode.RECEIVE)]
        for program in planned.programs
    )
    first = planned.plan.segments[0]
    begun = [
        i.microbatch
        for i in stem
        if i.opcode is Opcode.FORWARD and planned.plan.segments[i.operand].level == first.level
    ]
    if schedule != "interleaved_1f1b":  # in groups of as many as there are workers
        assert begun == [0, 4, 1, 5, 2, 6, 3, 7]
    for rank, instructions in enumerate(replicas, 1):
        while instructions[-1].opcode is Opcode.RECEIVE:
            instructions.pop()
        for one in instructions[2:]:  # behind the borrowed parameters: nothing of the other one
            if one.opcode is Opcode.RECEIVE:
                assert planned.plan.edges[one.operand].source == 0, rank


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_replicas_of_a_slow_piece_do_not_wait_for_what_is_around_it(schedule: str) -> None:
    """The worker around it has more segments, and is free for most of a step all the same."""
    planned = _planned(schedule)
    forward = {s.index: 8.0 if s.worker else 1.0 for s in planned.plan.segments}
    costs = Costs(forward, {index: 2 * seconds for index, seconds in forward.items()}, {})
    step_s = simulate(planned.plan, planned.programs, costs, num_steps=3).step_s
    first_and_last = 2 + 4
    assert step_s <= 1.05 * (4 * (8 + 16) + first_and_last)
