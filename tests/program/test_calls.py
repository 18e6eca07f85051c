"""Programs of calls: a network's forward alone, and its backward when the script asks for it."""

from __future__ import annotations

import pytest
import torch
from pass_helpers import captured, placed
from torch import nn

from graphsplit.capture.graph import Mode
from graphsplit.errors import ConfigurationError
from graphsplit.partition.edges import partition
from graphsplit.partition.plan import EdgeKind, PartitionPlan
from graphsplit.planning.passes import lower_plan
from graphsplit.planning.trainable import check_graph
from graphsplit.program.instruction import Opcode
from graphsplit.program.lower import WHOLE_STEP, first_of_backward


class Towers(nn.Module):
    """Two outputs on two workers; one is used on after it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.left.place("MS_WORKER", 0)
        self.right.place("MS_WORKER", 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.left(x)
        return h, self.right(h)


def _plan(network: nn.Module, mode: Mode) -> PartitionPlan:
    graph = captured(network, torch.randn(2, 4), mode=mode)
    return partition(placed(network, graph, num_workers=3))


def test_outputs_of_a_call_go_nowhere() -> None:
    plan = _plan(Towers(), Mode.LOOK)

    assert [(e.source, e.destination) for e in plan.edges] == [(0, 1)]
    assert not any(io.roots for io in plan.io)


def test_forward_of_a_call_has_moved_all_its_values_before_backward_begins() -> None:
    plan = _plan(Towers(), Mode.CALL)
    for program in lower_plan(plan, WHOLE_STEP, "1f1b"):
        start = first_of_backward(plan, program)
        forward, backward = program.instructions[:start], program.instructions[start:]
        moves = (Opcode.SEND, Opcode.RECEIVE)
        kinds = {plan.edges[i.operand].kind for i in forward if i.opcode in moves}
        assert kinds <= {EdgeKind.VALUE}
        assert {plan.edges[i.operand].kind for i in backward if i.opcode in moves} <= {
            EdgeKind.GRADIENT
        }
        assert Opcode.FORWARD not in {i.opcode for i in backward}
        assert not {Opcode.ZERO_GRADIENTS, Opcode.OPTIMIZER} & {
            i.opcode for i in program.instructions
        }


def test_each_output_that_has_a_gradient_is_where_backward_begins() -> None:
    plan = _plan(Towers(), Mode.CALL)

    roots = {root for io in plan.io for root in io.roots}
    assert roots == {output.node for output in plan.placed.graph.outputs}


def test_what_a_call_returns_is_no_parameter() -> None:
    class Own(Towers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.left.weight.T

    with pytest.raises(ConfigurationError, match=r"left\.weight itself, or a view"):
        check_graph(captured(Own(), torch.randn(2, 4), mode=Mode.CALL))
