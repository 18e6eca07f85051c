"""What is known of a program's sends before it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pass_helpers import captured, placed
from torch import nn

from graphsplit.capture.graph import Mode
from graphsplit.partition.edges import partition
from graphsplit.partition.plan import EdgeKind
from graphsplit.program.instruction import Instruction
from graphsplit.runtime.channels import before_waiting_work, channel_specs


@pytest.mark.parametrize(
    ("program", "positions"),
    [
        (["BACKWARD mb0 seg0", "SEND mb0 edge0", "OPTIMIZER"], [2]),
        (["SEND mb0 edge0", "BACKWARD_WEIGHT mb0 seg0", "OPTIMIZER"], [1]),
        (["SEND mb0 edge0", "SEND mb0 edge1", "FORWARD mb1 seg0"], []),
        (["BACKWARD mb0 seg0", "OPTIMIZER"], []),
    ],
)
def test_others_go_first_after_a_send_where_the_next_instruction_can_wait(
    program: list[str], positions: list[int]
) -> None:
    instructions = [Instruction.parse(line) for line in program]
    assert list(before_waiting_work(instructions)) == positions


class Two(nn.Module):
    """Two linear layers; what is between them may be seen by the caller."""

    def __init__(self, *, is_shown: bool) -> None:
        super().__init__()
        self.first, self.second, self.is_shown = nn.Linear(3, 3), nn.Linear(3, 3), is_shown
        self.first.place("MS_WORKER", 0)
        self.second.place("MS_WORKER", 1)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        between = self.first(x)
        shown = [between.view(-1)] if self.is_shown else []
        return [self.second(between), *shown]


def kept(network: nn.Module, *inputs: torch.Tensor, **options: Any) -> dict[EdgeKind, bool]:
    """Whether worker 0 sends out of their own memory what ``first`` makes, and its gradient."""
    graph = captured(network, *inputs, **options)
    plan = partition(placed(network, graph, num_workers=2))
    return {
        plan.edges[index].kind: spec.keeps
        for index, spec in channel_specs(plan, 0, worker=0, depths={}).items()
        if graph.nodes[plan.edges[index].value].name == "linear"
    }


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_value_is_sent_out_of_its_own_memory_where_nobody_writes_to_it(is_shown: bool) -> None:
    network, x = Two(is_shown=is_shown), torch.zeros(2, 3)
    assert kept(network, x, mode=Mode.PREDICT) == {EdgeKind.VALUE: not is_shown}


def test_a_gradient_may_be_written_to_after_it_was_sent() -> None:
    """Autograd hands the same one to others, and adds to it in place."""
    x = torch.zeros(2, 3)
    found = kept(Two(is_shown=False), x, x, loss_fn=lambda made, wanted: (made[0] - wanted).sum())
    assert found == {EdgeKind.VALUE: True, EdgeKind.GRADIENT: False}
