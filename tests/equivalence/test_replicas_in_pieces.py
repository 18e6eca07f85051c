"""Replicas run a network in pieces, whose parameters come and go beside computing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of
from replica_helpers import planned, same_over_two, whole
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures
from test_microbatches import tokens
from test_replicas import SmallGPT
from torch import nn
from torch.nn import functional

from graphsplit.partition import pieces
from graphsplit.partition.plan import EdgeKind, PartitionPlan
from graphsplit.program.instruction import BACKWARD, Instruction, Opcode
from graphsplit.schedule.costs import Costs, LinkCost
from graphsplit.schedule.simulation.simulate import simulate

_OF_STEP = (Opcode.SEND, Opcode.RECEIVE)
_small_gpt, _norms = Captures(), Captures()


class Layers(nn.Module):
    """Linear layers of one size, with norms that keep statistics, dropout, and one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + functional.dropout(norm(layer(x)), 0.2, self.training)
        found: torch.Tensor = self.layers[0](x)
        return found


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LEAST_BYTES", 100)


def _level(plan: PartitionPlan, one: Instruction) -> int:
    return plan.segments[one.operand].level


def _kinds(plan: PartitionPlan, one: Instruction) -> EdgeKind | None:
    return plan.edges[one.operand].kind if one.opcode in _OF_STEP else None


@pytest.mark.usefixtures("small_pieces")
def test_parameters_and_gradients_move_beside_computing() -> None:
    found = planned(whole(0, 1), make=Layers, microbatches=8, order="pairs")
    plan, nodes = found.plan, found.plan.placed.graph.nodes
    for program in found.programs[:2]:
        do = program.instructions
        borrowed = [
            p
            for p, i in enumerate(do)
            if i.opcode is Opcode.RECEIVE and nodes[plan.edges[i.operand].value].is_state
            if _kinds(plan, i) is EdgeKind.VALUE
        ]
        computed = [p for p, i in enumerate(do) if i.opcode is Opcode.FORWARD]
        assert sum(p > computed[0] for p in borrowed) >= 3  # they come beside the first forward
        lowest = max(p for p, i in enumerate(do) if i.opcode in BACKWARD and _level(plan, i) == 0)
        sent = [
            p
            for p, i in enumerate(do)
            if i.opcode is Opcode.SEND and _kinds(plan, i) is EdgeKind.BLOCK
        ]
        assert sum(p < lowest for p in sent) >= 3  # and go beside the last backward
        under_way = 0
        for instruction in do:
            if instruction.opcode is Opcode.FORWARD and _level(plan, instruction) == 0:
                under_way += 1
            elif instruction.opcode in BACKWARD and _level(plan, instruction) == 0:
                under_way -= 1
            assert under_way <= 1  # pieces are no reason to keep more activations


@pytest.mark.usefixtures("small_pieces")
def test_parameters_are_sent_in_the_order_of_their_first_use() -> None:
    found = planned(whole(0, 1), make=Layers, microbatches=8, order="pairs")
    for sender, receiver in ((0, 1), (1, 0)):
        sent = [
            i.operand
            for i in found.programs[sender].instructions
            if i.opcode is Opcode.SEND and found.plan.edges[i.operand].kind is EdgeKind.VALUE
        ]
        wanted = [
            i.operand
            for i in found.programs[receiver].instructions
            if i.opcode is Opcode.RECEIVE and i.operand in sent
        ]
        borrowed = [edge for edge in sent if found.plan.edges[edge].per_step]
        assert borrowed == [edge for edge in wanted if edge in borrowed]


def test_on_a_slow_link_a_step_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    for least in (1 << 20, 100):
        monkeypatch.setattr(pieces, "LEAST_BYTES", least)
        found = planned(whole(0, 1), make=Layers, microbatches=4, order="pairs")
        plan, lanes = found.plan, [0, 0]
        for segment in plan.segments:
            lanes[segment.worker] += len(segment.nodes)
        seconds = {s.index: len(s.nodes) / lanes[s.worker] for s in plan.segments}
        link = LinkCost(0.0, 1000.0)
        costs = Costs(seconds, seconds, {}, links={(0, 1): link, (1, 0): link})
        steps.append(simulate(plan, found.programs, costs, num_steps=3).step_s)
    assert steps[1] < steps[0] - 1  # of a forward and a backward that take a second each


def test_small_networks_are_one_piece() -> None:
    found = planned(whole(0, 1), make=Layers, microbatches=8, order="pairs")
    assert len(found.plan.segments) == 2


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("order", ["left", "pairs"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble", "interleaved_1f1b"])
def test_pieces_change_no_bits(order: Any, schedule: str) -> None:
    cluster = same_over_two(
        Layers,
        batches_of(8, 6, num=2),
        microbatches=4,
        gradient_order=order,
        schedule=schedule,
        captures=_norms,
    )
    found = cluster.workers[0].planner._plans.values()
    assert max(len(one.plan.segments) for one in found) >= 6


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("order", ["left", "pairs"])
def test_batches_of_two_shapes_run_in_pieces_on_all_replicas(order: Any) -> None:
    cluster = same_over_two(
        Layers,
        batches_of(20, 6, num=1),  # eight microbatches: 3 3 3 3, and 2 2 2 2
        microbatches=8,
        gradient_order=order,
        evaluate_after=(),
    )
    plans = [one.plan for one in cluster.workers[0].planner._plans.values()]
    assert [plan.lanes for plan in plans] == 2 * [(range(2), range(2, 4))]
    assert all(len(plan.segments) >= 6 for plan in plans)


@pytest.mark.usefixtures("small_pieces")
def test_a_tied_head_over_three_replicas() -> None:
    assert_same_bits(
        SmallGPT,
        tokens(6, 5),
        num_workers=3,
        place=whole(0, 1, 2),
        microbatches=6,
        gradient_order="pairs",
        captures=_small_gpt,
    )


def test_a_replica_keeps_half_of_the_optimizers_state() -> None:
    cluster = same_over_two(
        Layers,
        batches_of(8, 6, num=2),
        microbatches=2,
        gradient_order="pairs",
        make_optimizer=lambda net: torch.optim.Adam(net.parameters(), lr=0.01),
        captures=_norms,
    )
    held = []
    for worker in cluster.workers:
        state = worker.task.optimizers[0].state
        held.append(sum(t.nbytes for one in state.values() for t in one.values() if t.dim()))
    whole_state = 2 * sum(p.nbytes for p in Layers().parameters())
    largest = 2 * max(p.nbytes for p in Layers().parameters())
    assert sum(held) == whole_state
    assert max(held) <= max(0.55 * whole_state, largest)
