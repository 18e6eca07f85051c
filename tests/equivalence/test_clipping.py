"""Clipping over all workers gives the bits of ``torch.nn.utils`` over all parameters."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures, SimulatedCluster
from torch import nn

import graphsplit as gs
from graphsplit.capture.graph import Mode
from graphsplit.errors import ConfigurationError, ScheduleError, StepFailedError
from graphsplit.optimizers.clip import GlobalNorm, Value
from graphsplit.partition.dump import describe_plan
from graphsplit.partition.plan import EdgeKind
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.program.lower import WorkerProgram
from graphsplit.program.proof import verify_programs

BATCHES = batches_of(4, 8, num=4)


class Tower(nn.Module):
    """Layers of several dtypes; a shared weight, a frozen parameter and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.third.weight = self.first.weight
        self.low = nn.Linear(8, 8).bfloat16()
        self.high = nn.Linear(8, 8).double()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        h = self.third(torch.relu(self.second(torch.relu(self.first(x)))))
        h = self.frozen(h) + self.low(h.bfloat16()).float()
        return h + self.high(h.double()).float()


def on_three(network: Any) -> None:
    for rank, name in enumerate(["second", "third", "first", "low", "high"]):
        getattr(network, name).place("MS_WORKER", rank % 3)


same_over_three = functools.partial(
    assert_same_bits,
    Tower,
    BATCHES,
    num_workers=3,
    place=on_three,
    loss_fn=rows_against_target,
    captures=Captures(),
    evaluate_after=(),
)


def planned(cluster: SimulatedCluster) -> Any:
    made = cluster.latest(Mode.TRAIN)
    assert made is not None
    return made


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 0.5, 3.0, float("inf"), 0.0])
def test_the_global_norm_is_that_of_one_process(norm_type: float) -> None:
    cluster = same_over_three(clip=GlobalNorm(0.1, norm_type))
    norms = [worker.planner.updater.last_norm for worker in cluster.workers]
    assert all(norm is not None and norm > 0.1 for norm in norms)  # so it was clipped
    assert len({float(norm) for norm in norms if norm is not None}) == 1


def test_gradients_below_the_limit_are_left_as_they_are() -> None:
    same_over_three(clip=GlobalNorm(1e9))
    same_over_three(clip=GlobalNorm(0.0))


def test_values_are_clamped_without_any_message() -> None:
    cluster = same_over_three(clip=Value(0.001))
    assert all(edge.kind is not EdgeKind.REDUCTION for edge in planned(cluster).plan.edges)


def test_microbatches_are_clipped_once_they_are_all_added() -> None:
    same_over_three(clip=GlobalNorm(0.1), microbatches=2)
    assert_same_bits(  # 3, 3, 2 and 2 rows: two plans, of which the last one clips
        Tower,
        batches_of(10, 8, num=2),
        num_workers=3,
        place=on_three,
        loss_fn=rows_against_target,
        clip=GlobalNorm(0.1),
        microbatches=4,
        evaluate_after=(),
    )


def test_all_parameters_on_one_worker_of_three() -> None:
    assert_same_bits(
        Tower,
        BATCHES[:2],
        num_workers=3,
        loss_fn=rows_against_target,
        unplaced="worker0",
        place=lambda net: net.place("MS_WORKER", 1),
        clip=GlobalNorm(0.1),
    )


def test_one_worker_alone() -> None:
    assert_same_bits(
        Tower, BATCHES[:2], num_workers=1, loss_fn=rows_against_target, clip=GlobalNorm(0.1)
    )


def test_a_gradient_that_a_hook_drops_does_not_count() -> None:
    def drop(network: Any) -> None:
        for name, parameter in network.named_parameters():
            if name == "second.bias" and not gs_is_elsewhere(parameter):
                parameter.grad = None
            if name == "unused" and not gs_is_elsewhere(parameter):
                parameter.grad = torch.full((3,), 7.0)

    same_over_three(clip=GlobalNorm(0.1), on_gradients=drop)


def gs_is_elsewhere(parameter: torch.Tensor) -> bool:
    from graphsplit.optimizers.ownership import is_elsewhere

    return is_elsewhere(parameter)


def spoil(network: nn.Module) -> None:
    for parameter in network.parameters():
        if not gs_is_elsewhere(parameter) and parameter.grad is not None:
            parameter.grad.view(-1)[0] = float("nan")
            return


def test_a_norm_that_is_not_finite_scales_all_the_same() -> None:
    same_over_three(clip=GlobalNorm(0.1), on_gradients=spoil, steps=1)


def test_a_norm_that_is_not_finite_is_an_error_on_every_worker_if_asked_for() -> None:
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        same_over_three(clip=GlobalNorm(0.1, error_if_nonfinite=True), on_gradients=spoil)
    clip = GlobalNorm(0.1, error_if_nonfinite=True)
    cluster = same_over_three(clip=clip, steps=1)
    for worker in cluster.workers:
        worker.planner.updater.on_gradients = functools.partial(spoil, worker.task.network)
    inputs, target = BATCHES[0]
    with pytest.raises(StepFailedError, match=r"(?s)is non-finite.*CLIP"):
        cluster.train_step(((inputs, target), {}))


def test_the_norms_travel_along_edges_of_the_plan() -> None:
    cluster = same_over_three(clip=GlobalNorm(0.1), steps=1)
    plan, programs = planned(cluster).plan, planned(cluster).programs
    root = plan.reduction.root
    edges = [edge for edge in plan.edges if edge.kind is EdgeKind.REDUCTION]
    assert sorted((e.source, e.destination) for e in edges) == sorted(
        pair for other in {0, 1, 2} - {root} for pair in ((root, other), (other, root))
    )
    text = describe_plan(plan)
    assert f"gathered by worker {root}" in text
    for program in programs:
        opcodes = [i.opcode for i in program.instructions]
        reduce, clip = opcodes.index(Opcode.REDUCE), opcodes.index(Opcode.CLIP)
        assert opcodes[clip + 1] is Opcode.OPTIMIZER
        assert set(opcodes[reduce + 1 : clip]) == {Opcode.SEND, Opcode.RECEIVE}
        for instruction in program.instructions:
            assert Instruction.parse(str(instruction)) == instruction


def test_explain_names_what_is_shared() -> None:
    from graphsplit.partition.explain.plan import explain_plan

    cluster = same_over_three(clip=GlobalNorm(0.1), steps=1)
    assert "norms and checks of gradients" in explain_plan(planned(cluster).plan)


def test_a_part_that_nobody_receives_is_found_before_step_0() -> None:
    cluster = same_over_three(clip=GlobalNorm(0.1), steps=1)
    plan, programs = planned(cluster).plan, planned(cluster).programs
    root = plan.reduction.root
    parts = {e.index for e in plan.edges if e.kind is EdgeKind.REDUCTION and e.destination == root}
    cut = [
        WorkerProgram(
            program.worker,
            program.num_microbatches,
            tuple(
                i
                for i in program.instructions
                if not (i.opcode is Opcode.RECEIVE and i.operand in parts)
            ),
        )
        for program in programs
    ]
    with pytest.raises(ScheduleError, match="receives"):
        verify_programs(plan, cut)


def test_workers_that_clip_differently_notice() -> None:
    made = []

    def clip_of_next() -> GlobalNorm:
        made.append(None)
        return GlobalNorm(float(len(made)))

    from graphsplit.errors import PlanMismatchError
    from graphsplit.planning.task import Task

    def make_task() -> Task:
        network = Tower()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        return Task(network, rows_against_target, optimizer, "affinity", True, clip=clip_of_next())

    cluster = SimulatedCluster(make_task, 2, captures=Captures())
    inputs, target = BATCHES[0]
    with pytest.raises(PlanMismatchError, match=r"clip GlobalNorm\(max_norm=1.0"):
        cluster.train_step(((inputs, target), {}))


def test_one_process_clips_and_tells_the_norm() -> None:
    torch.manual_seed(0)
    network = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model = gs.Model(network, rows_against_target, optimizer, clip=gs.clip.GlobalNorm(0.1))
    assert model.last_gradient_norm is None
    model.train_step(*BATCHES[0])
    assert model.last_gradient_norm is not None
    total = torch.nn.utils.get_total_norm([p.grad for p in network.parameters()])
    assert total <= 0.1 < model.last_gradient_norm


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gs.clip.GlobalNorm(-1.0), r"GlobalNorm: max_norm is -1.0; expected a number of 0"),
        (lambda: gs.clip.GlobalNorm("1"), r"GlobalNorm: max_norm is '1'"),
        (lambda: gs.clip.GlobalNorm(1.0, "l2"), r"GlobalNorm: norm_type is 'l2'"),
        (lambda: gs.clip.Value(float("nan")), r"Value: value is nan"),
        (lambda: gs.Model(nn.Linear(2, 2), clip=1.0), r"clip is 1.0; expected gs.clip.GlobalNorm"),
    ],
)
def test_what_is_no_clipping_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


class TwoWeights(nn.Module):
    """A layer whose weight the script replaces, and puts back later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weights = [self.first.weight, nn.Parameter(torch.full((8, 8), 0.1))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.mark.filterwarnings("ignore:network or loss reads")  # each weight takes a capture
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_weight_that_is_put_back_is_clipped_and_frozen_again(microbatches: int) -> None:
    def change(step: int, network: Any, loss_fn: Any) -> None:
        if step in (2, 4):
            network.first.weight = network.weights[step == 2]
        if step in (6, 8):
            network.weights[0].requires_grad_(step == 8)

    assert_same_bits(
        TwoWeights,
        BATCHES,
        steps=10,
        num_workers=2,
        place=lambda network: network.second.place("MS_WORKER", 1),
        loss_fn=rows_against_target,
        clip=GlobalNorm(0.05),
        microbatches=microbatches,
        before_step=change,
        evaluate_after=(3, 5, 7),
    )
