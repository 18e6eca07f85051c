"""Every schedule gives the bits of the plain loop, weight gradients computed apart included."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import (
    assert_same_wherever_placed,
    batches_of,
    rows_against_target,
    splitting_all,
)
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures, SimulatedCluster
from test_lenet import LeNet, images
from test_microbatches import Everything, Tied, num_tokens, placed, tokens
from torch import nn

import graphsplit as gs
from graphsplit.batches.microbatches import Divider
from graphsplit.capture.graph import Mode
from graphsplit.errors import ScheduleError
from graphsplit.partition.plan import PartitionPlan
from graphsplit.planning.task import Task
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.runtime.step_state import StepState
from graphsplit.schedule.auto import POLICIES
from graphsplit.schedule.named import ZERO_BUBBLE
from graphsplit.schedule.play import play

_lenet = Captures()


@pytest.fixture(autouse=True)
def _split_all() -> Iterator[None]:
    with splitting_all():
        yield


def lenet(microbatches: int, schedule: Any, **options: Any) -> SimulatedCluster:
    ranks = dict(zip(("conv1", "conv2", "fc1", "fc2", "fc3"), (3, 4, 0, 1, 2), strict=True))
    return assert_same_bits(
        LeNet,
        images(8, 8),
        num_workers=5,
        loss_fn=nn.CrossEntropyLoss(),
        place=placed(**ranks),
        microbatches=microbatches,
        captures=_lenet,
        schedule=schedule,
        **options,
    )


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zero_bubble", "auto"])
def test_lenet(schedule: str, microbatches: int) -> None:
    cluster = lenet(microbatches, schedule)
    planned = cluster.latest(Mode.TRAIN)
    assert planned is not None
    opcodes = {i.opcode for program in planned.programs for i in program.instructions}
    assert len(planned.plan.splits) == 4
    assert (Opcode.BACKWARD_WEIGHT in opcodes) or schedule != "zero_bubble"


def test_lenet_with_its_norm_clipped_over_two_batches() -> None:
    lenet(2, "zero_bubble", clip=gs.clip.GlobalNorm(0.5), accumulate=2)


@pytest.mark.parametrize("schedule", sorted(POLICIES))
def test_everything_wherever_placed(schedule: str) -> None:
    assert_same_wherever_placed(
        Everything, batches_of(10, 6, 6), microbatches=4, placements=range(1, 4), schedule=schedule
    )


def whole_in_the_middle(plan: PartitionPlan, number: int) -> Sequence[Sequence[Instruction]]:
    """Of one microbatch at each end backward runs in two parts."""
    return play(plan, number, replace(ZERO_BUBBLE, ends=(1, 1)))


def test_lenet_with_backwards_whole_and_in_parts() -> None:
    cluster = lenet(4, whole_in_the_middle)
    planned = cluster.latest(Mode.TRAIN)
    assert planned is not None
    kinds = Counter(i.opcode for p in planned.programs for i in p.instructions)
    assert kinds[Opcode.BACKWARD_WEIGHT] == 4 * 2
    assert kinds[Opcode.BACKWARD] == 4 * 2 + 4  # that of the first layer is never split


def test_everything_with_backwards_whole_and_in_parts() -> None:
    assert_same_wherever_placed(
        Everything,
        batches_of(10, 6, 6),
        microbatches=4,
        placements=range(1, 4),
        schedule=whole_in_the_middle,
    )


@pytest.mark.parametrize("owner", [0, 3])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zero_bubble", whole_in_the_middle])
def test_tied_weights(schedule: Any, owner: int) -> None:
    """The head's gradient is sent to, or added by, the owner once it is computed."""
    assert_same_bits(
        Tied,
        tokens(8, 8, 5),
        num_workers=4,
        place=placed(embedding=owner, body=1, drop=2, head=3 - owner),
        microbatches=4,
        loss_weight=num_tokens,
        schedule=schedule,
    )


class Double(torch.autograd.Function):
    """A custom function, kept whole."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 3


class Kinds(nn.Module):
    """Operations that can be split, among others that hinder or use what they leave."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6, sparse=True)
        self.conv, self.turned = nn.Conv1d(6, 8, 3, padding=1), nn.ConvTranspose1d(8, 6, 3)
        self.grouped = nn.Conv1d(6, 6, 2, groups=2, bias=False)
        self.linear, self.plain = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.whole = nn.Parameter(torch.randn(6, 6))  # its gradient is the one noted for `plain`
        self.square = nn.Parameter(torch.randn(6, 6) * 0.3)
        self.twice = nn.Linear(6, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made = self.embedding(ids)
        made = self.turned(F.relu(self.conv(made.transpose(1, 2)), inplace=True))
        made = self.grouped(made)[..., :6]
        made = Double.apply(self.linear(made.transpose(1, 2)))
        first = self.plain(made[0]) + self.whole
        made = made + torch.addmm(self.square, first, self.twice.weight)
        return F.gelu(made @ self.square) + self.twice(made)


def ids_and_targets(rows: int, num: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(0, 7, (rows, 6), generator=generator),
            torch.randn(rows, generator=generator),
        )
        for _ in range(num)
    ]


@pytest.mark.parametrize(
    ("microbatches", "schedule"), [(1, "zero_bubble"), (3, "zero_bubble"), (3, whole_in_the_middle)]
)
def test_many_kinds_of_operations(microbatches: int, schedule: Any) -> None:
    for ranks in ((0, 1, 1, 1, 1, 1), (1, 0, 1, 0, 1, 0), (0, 0, 1, 1, 2, 2)):
        names = ("embedding", "conv", "turned", "grouped", "linear", "plain")
        assert_same_bits(
            Kinds,
            ids_and_targets(6),
            num_workers=3,
            loss_fn=rows_against_target,
            place=placed(**dict(zip(names, ranks, strict=True)), twice=2),
            make_optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.01),
            microbatches=microbatches,
            schedule=schedule,
        )


class Stages(nn.Module):
    """A straight pipeline of wide layers."""

    def __init__(self, num: int = 4) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6)) for _ in range(num)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def by_stage(net: Any) -> None:
    for rank, stage in enumerate(net.stages):
        stage.place("MS_WORKER", rank)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_hooks_of_parameters_see_the_gradients_that_they_see_in_eager_mode(
    microbatches: int,
) -> None:
    def clamp(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.1, 0.1)

    def make() -> nn.Module:
        network = Stages()
        for parameter in network.parameters():
            parameter.register_hook(lambda gradient: gradient * 1.5)
            parameter.register_post_accumulate_grad_hook(clamp)
        return network

    assert_same_bits(
        make,
        batches_of(8, 6),
        num_workers=4,
        loss_fn=rows_against_target,
        place=by_stage,
        microbatches=microbatches,
        schedule="zero_bubble",
    )


def test_mixed_precision() -> None:
    assert_same_bits(
        Stages,
        batches_of(8, 6),
        num_workers=4,
        loss_fn=rows_against_target,
        place=by_stage,
        microbatches=4,
        autocast=torch.bfloat16,
        make_scaler=lambda: torch.amp.GradScaler("cpu", init_scale=8.0),
        schedule="zero_bubble",
    )


def one_after_the_other(plan: PartitionPlan, number: int) -> list[list[Instruction]]:
    """A policy of the user's own: a microbatch begins when the one before is done."""
    orders: list[list[Instruction]] = [[] for _ in range(plan.num_workers)]
    for microbatch in range(number):
        for segment in plan.segments:
            forward = Instruction(Opcode.FORWARD, segment.index, microbatch)
            orders[segment.worker].append(forward)
        for segment in reversed(plan.segments):
            backward = Instruction(Opcode.BACKWARD, segment.index, microbatch)
            orders[segment.worker].append(backward)
    return orders


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_policy_of_the_users_own(microbatches: int) -> None:
    cluster = lenet(microbatches, one_after_the_other)
    planned = cluster.latest(Mode.TRAIN)
    assert planned is not None
    order = [i for i in planned.programs[2].instructions if i.opcode is Opcode.FORWARD]
    assert len(order) == microbatches


def test_a_policy_that_waits_in_a_circle_is_refused_before_the_first_step() -> None:
    def backward_of_all_first(plan: PartitionPlan, number: int) -> list[list[Instruction]]:
        orders = one_after_the_other(plan, number)
        orders[0].sort(key=lambda i: (i.opcode.value, -i.microbatch))
        return orders

    with pytest.raises(ScheduleError, match="worker 0 runs 'BACKWARD mb3 seg0' before"):
        train(backward_of_all_first, 4, lambda states: None)


def train(schedule: Any, microbatches: int, look: Any, network: Any = Stages) -> SimulatedCluster:
    """One step of a pipeline, looked at after every instruction."""

    def make_task() -> Task:
        torch.manual_seed(0)
        net = network()
        by_stage(net)
        return Task(
            net,
            rows_against_target,
            torch.optim.SGD(net.parameters(), lr=0.1),
            "affinity",
            with_loss=False,
            divider=Divider(microbatches),
            schedule=schedule,
        )

    cluster = SimulatedCluster(make_task, 4, captures=Captures())
    batch = batches_of(2 * microbatches, 6)[0]
    cluster.train_step((batch, {}))
    for worker in cluster.workers:
        planned = worker.planner.latest(Mode.TRAIN)
        assert planned is not None
        planned.runner.watch(lambda position, action: _looking(action, look))
    cluster.train_step((batch, {}))
    return cluster


def _looking(action: Any, look: Any) -> Any:
    def run(state: StepState) -> None:
        action(state)
        look(state)

    return run


def held_bytes(state: StepState) -> int:
    """What a step holds on one worker, apart from the losses."""
    kinds = (state.values, state.leaves, state.collected, state.received)
    tensors = [t for kind in kinds for held in kind for t in held.values()]
    memories = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t is not None and t.dim()
    }
    return sum(memories.values()) + 1000 * len(state.generators)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble"])
def test_what_is_held_grows_with_the_depth_and_not_with_the_microbatches(schedule: str) -> None:
    def most_held(microbatches: int) -> int:
        most = 0

        def look(state: StepState) -> None:
            nonlocal most
            most = max(most, held_bytes(state))

        train(schedule, microbatches, look)
        return most

    few, many = most_held(8), most_held(24)
    assert 0 < many <= few
    assert most_held(2) < few


def test_no_tensor_of_a_microbatch_outlives_its_backward() -> None:
    """Activations too, which only autograd holds: looked at by weak references."""
    alive: list[int] = []
    made: list[weakref.ref[torch.Tensor]] = []

    class Watched(Stages):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return watched(super().forward(x))

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            kept = x * 2
            ctx.save_for_backward(kept)
            made.append(weakref.ref(kept))
            return x * 1

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0]

    def watched(x: torch.Tensor) -> torch.Tensor:
        return Watch.apply(x)

    def look(state: StepState) -> None:
        alive.append(sum(ref() is not None for ref in made))

    train("1f1b", 8, look, Watched)
    assert max(alive) <= 2  # the last worker has one microbatch under way
