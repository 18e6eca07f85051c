"""Gradients that replicas add in blocks, before they send them, have the bits of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from replica_helpers import Net, planned, same_over_two, whole
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures
from torch import nn

from graphsplit.capture.graph import NodeKind
from graphsplit.errors import StepFailedError
from graphsplit.partition.explain.plan import explain_plan
from graphsplit.partition.plan import EdgeKind
from graphsplit.partition.replicas.blocks import sent_per_step
from graphsplit.program.instruction import Opcode
from graphsplit.runtime.segments.blocks import packed, unpacked
from graphsplit.runtime.segments.part_sums import PartSum
from graphsplit.tensor_meta import TensorMeta

_net = Captures()


class Wide(nn.Module):
    """Many layers of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(12)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize(("num_workers", "microbatches"), [(2, 4), (2, 8), (3, 12)])
def test_pairs_send_a_rings_bytes(num_workers: int, microbatches: int) -> None:
    found = planned(whole(*range(num_workers)), make=Wide, microbatches=microbatches, order="pairs")
    plan, programs = found.plan, found.programs
    nodes = plan.placed.graph.nodes
    sizes = [n.meta.size_bytes for n in nodes[: plan.num_values] if n.kind is NodeKind.PARAMETER]
    sent = [0] * 3
    for program in programs:
        for instruction in program.instructions:
            if instruction.opcode is Opcode.SEND:
                edge = plan.edges[instruction.operand]
                is_state = nodes[edge.value].is_state
                sent[program.worker] += edge.meta.size_bytes if is_state else 0
    share = 2 * sum(sizes) * (num_workers - 1) / num_workers
    # Each tensor begins anywhere in a line of 64 bytes of its message, and ends in another one.
    assert max(sent[:num_workers]) <= 1.1 * share + 128 * len(sizes)
    left = planned(whole(*range(num_workers)), make=Wide, microbatches=microbatches).plan
    assert sent_per_step(plan) == sent_per_step(left)
    assert "Gradients that replicas send to owners, per step" in explain_plan(left)


def test_small_blocks_go_in_one_message_and_explain_counts_each_parameter() -> None:
    found = planned(whole(0, 1), make=Wide, microbatches=8, order="pairs")
    plan = found.plan
    (mine, theirs) = plan.blocks.values()  # those of either owner
    assert len(mine.members) + len(theirs.members) == 24
    for program in found.programs[:2]:
        kinds = [
            plan.edges[i.operand].kind for i in program.instructions if i.opcode is Opcode.SEND
        ]
        assert kinds.count(EdgeKind.BLOCK) == 1
        opcodes = [i.opcode for i in program.instructions]
        assert opcodes.count(Opcode.ACCUMULATE) == 8  # twice in each of four microbatches
    lines = explain_plan(plan).split("\n")
    (weight,) = (line for line in lines if "parameter layers.0.weight" in line)
    assert weight.count("144 B") == 2  # there, and its gradient back


def test_small_parameters_are_borrowed_in_one_message() -> None:
    found = planned(whole(0, 1), make=Wide, microbatches=8, order="pairs")
    plan = found.plan
    borrowed = [edge for edge in plan.edges if edge.per_step]
    assert sorted((edge.source, len(edge.values)) for edge in borrowed) == [(0, 12), (1, 12)]
    sent = [i.operand for program in found.programs for i in program.instructions]
    assert [edge for edge in borrowed if edge.index not in sent] == []
    lines = explain_plan(plan, detail="operations").split("\n")
    (line, _) = (line for line in lines if "and 11 more" in line)
    assert "borrowed parameter layers" in line


class Kinds(nn.Module):
    """Parameters of several dtypes and forms."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.other = nn.Linear(6, 6), nn.Parameter(torch.ones(3, 2).T)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.empty = nn.Parameter(torch.ones(0, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x) + self.empty.sum()
        return x * self.scale.float() * self.other.flatten()


@pytest.mark.parametrize("by", ["batch", "microbatch"])
def test_one_message_for_parameters_of_any_dtype(by: Any) -> None:
    same_over_two(
        Kinds,
        batches_of(16, 6, 6, num=2),
        microbatches=8,
        gradient_order="pairs",
        accumulate=2,
        accumulate_by=by,
    )


def test_one_message_says_which_gradients_there_are() -> None:
    blocks = [torch.ones(2, 3).T, None, torch.tensor(1.0, dtype=torch.float64)]
    metas = [
        TensorMeta.of(torch.ones(3, 2)),
        TensorMeta.of(torch.ones(4)),
        *map(TensorMeta.of, blocks[2:]),
    ]
    one, none, other = unpacked(packed(blocks, metas), metas)
    assert one is not None and torch.equal(one, blocks[0]) and none is None
    assert other is not None and torch.equal(other, blocks[2])


def test_a_replica_holds_one_gradient_for_each_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    add = PartSum.add

    def noted(one: PartSum, number: int, part: Any, size: int = 1, **options: Any) -> None:
        add(one, number, part, size, **options)
        held.append(len(one.blocks))

    monkeypatch.setattr(PartSum, "add", noted)
    planned(whole(0, 1), make=Wide, microbatches=16, order="pairs")
    assert max(held) == 3  # while 8 parts come in: sums of 4, of 2, and one


@pytest.mark.parametrize(("num_workers", "microbatches"), [(2, 5), (2, 7), (3, 7)])
def test_several_blocks_of_one_replica(num_workers: int, microbatches: int) -> None:
    assert_same_bits(
        Net,
        batches_of(2 * microbatches, 6, 6, num=2),
        num_workers=num_workers,
        loss_fn=rows_against_target,
        place=whole(*range(num_workers)),
        microbatches=microbatches,
        gradient_order="pairs",
        captures=_net,
    )


class Sums(nn.Module):
    """Parameters that have one gradient in common."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.one, self.two = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.one + self.two + torch.tanh(self.two)


def test_gradients_that_parameters_share() -> None:
    same_over_two(
        Sums,
        batches_of(16, 6, 6, num=2),
        microbatches=8,
        gradient_order="pairs",
    )


def halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def test_hooks_see_every_part() -> None:
    def make() -> nn.Module:
        net = Net()
        net.body[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        net.head.weight.register_post_accumulate_grad_hook(halve)
        return net

    same_over_two(
        make,
        batches_of(8, 6, 6, num=2),
        microbatches=4,
        gradient_order="pairs",
    )


def test_a_hook_that_comes_later_is_refused_by_name() -> None:
    cluster = planned(whole(0, 1), order="pairs", is_cluster=True)
    for worker in cluster.workers:
        worker.task.network.head.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(StepFailedError, match=r"a hook was put on head.weight after the first"):
        cluster.train_step((batches_of(8, 6, 6, num=1)[0], {}))
