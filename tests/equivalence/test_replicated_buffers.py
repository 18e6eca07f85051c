"""Buffers that forward updates, where replicas share the microbatches, have one process's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence_helpers import rows_against_target
from replica_helpers import whole
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures, SimulatedCluster
from test_microbatches import Everything
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphsplit as gs
from graphsplit.batches.microbatches import Divider
from graphsplit.capture.graph import Mode, NodeKind
from graphsplit.capture.operations.opaque_call import opaque_call
from graphsplit.errors import PlacementError
from graphsplit.partition.plan import EdgeKind, PartitionPlan
from graphsplit.planning.task import Task
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.schedule.costs import Costs
from graphsplit.schedule.simulation.simulate import simulate


class Images(nn.Module):
    """Convolutions, batch norms of three kinds, dropout, and a moving average of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Dropout(0.2),
            nn.Conv2d(4, 4, 3),
            nn.BatchNorm2d(4, affine=False),
            nn.ReLU(),
        )
        self.head, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=0.3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.head(self.body(x).mean((2, 3))))
        shift = (x.detach().mean(0) - self.mean) * 0.1  # reads it, for nothing but itself
        self.mean.add_(shift)
        return x


def images(*rows: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 2, 6, 6, generator=generator), torch.randn(n, generator=generator))
        for n in rows
    ]


def stage(net: Any) -> None:
    net.body.place("MS_WORKER", [1, 2])
    net.head.place("MS_WORKER", 0)


def mixed(net: Any) -> None:
    net.body.place("MS_WORKER", [2, 0])
    net.head.place("MS_WORKER", [1, 0, 2])
    net.norm.place("MS_WORKER", 1)


_images, _everything = Captures(), Captures()


class WithOthersWeights(nn.Module):
    """A batch norm whose weight and bias are those of another one, on another worker."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
        self.inner.weight, self.inner.bias = self.outer.weight, self.outer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x.relu()).relu())


@pytest.mark.parametrize("replicas", [[1, 2], [0, 1, 2], [2, 0]])
def test_a_norm_with_the_weights_of_another_worker(replicas: list[int]) -> None:
    def place(net: Any) -> None:
        net.outer.place("MS_WORKER", 0)
        net.inner.place("MS_WORKER", replicas)

    assert_same_bits(
        WithOthersWeights,
        images(8, 8),
        num_workers=3,
        loss_fn=rows_against_target,
        place=place,
        microbatches=4,
    )


class Again(nn.Module):
    """A batch norm of its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.norm(x))


def test_a_norm_of_its_own_output() -> None:
    assert_same_bits(
        Again,
        images(8, 8),
        num_workers=2,
        loss_fn=rows_against_target,
        place=whole(0, 1),
        microbatches=4,
    )


@pytest.mark.parametrize("order", ["left", "pairs"])
@pytest.mark.parametrize(
    ("place", "num_workers", "microbatches"),
    [(whole(0, 1), 2, 4), (whole(2, 0, 1), 3, 4), (stage, 3, 4), (mixed, 3, 6)],
    ids=["two", "three", "one stage", "mixed"],
)
def test_batch_norm_and_moving_averages(
    place: Any, num_workers: int, microbatches: int, order: str
) -> None:
    assert_same_bits(
        Images,
        images(12, 14, 12),  # 14 in 4: microbatches of two sizes
        num_workers=num_workers,
        loss_fn=rows_against_target,
        place=place,
        microbatches=microbatches,
        gradient_order=order,
        captures=_images,
    )


class OfInstances(nn.Module):
    """Instance norms with running statistics, one of them of the input and without a momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.InstanceNorm2d(2, track_running_stats=True, momentum=None),
            nn.Conv2d(2, 4, 3),
            nn.InstanceNorm2d(4, affine=True, track_running_stats=True, momentum=0.3),
            nn.ReLU(),
            nn.Dropout(0.2),
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


@pytest.mark.parametrize("order", ["left", "pairs"])
@pytest.mark.parametrize("place", [whole(2, 0, 1), stage], ids=["three", "one stage"])
def test_instance_norms_with_running_statistics(place: Any, order: str) -> None:
    assert_same_bits(
        OfInstances,
        images(12, 14, 12),
        num_workers=3,
        loss_fn=rows_against_target,
        place=place,
        microbatches=4,
        gradient_order=order,
    )


class Averaging(Images):
    """Norms whose running statistics are the averages of all microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.body[1], self.body[5] = (
            nn.BatchNorm2d(4, momentum=None),
            nn.BatchNorm2d(4, affine=False, momentum=None),
        )
        self.norm = nn.BatchNorm1d(3, momentum=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(input=self.head(self.body(x).mean((2, 3))))


def apart(net: Any) -> None:
    net.body.place("MS_WORKER", 1)
    net.head.place("MS_WORKER", 0)
    net.norm.place("MS_WORKER", 2)


_averaging = Captures()


@pytest.mark.parametrize("order", ["left", "pairs"])
@pytest.mark.parametrize("place", [apart, whole(2, 0, 1), mixed], ids=["none", "three", "mixed"])
def test_norms_without_a_momentum(place: Any, order: str) -> None:
    cluster = assert_same_bits(
        Averaging,
        images(12, 14, 12),
        num_workers=3,
        loss_fn=rows_against_target,
        place=place,
        microbatches=6,
        gradient_order=order,
        captures=_averaging,
    )
    found = cluster.latest(Mode.TRAIN)
    assert found is not None
    assert not any(map(opaque_call, found.plan.placed.graph.fx_nodes.values()))


class WholeNorm(nn.Module):
    """A norm inside code that is kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.norm = nn.Linear(6, 6), gs.opaque(nn.Sequential(nn.BatchNorm1d(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.head(x))


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 6, sparse=True), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


@pytest.mark.parametrize(
    ("make", "x", "why"),
    [
        (
            WholeNorm,
            torch.randn(8, 6),
            r"Sequential \(norm\) is kept whole, and changes buffer norm.0.running_mean",
        ),
        (Words, torch.zeros(8, dtype=torch.long), "the gradient of embed.weight is sparse"),
    ],
)
@pytest.mark.parametrize("order", ["left", "pairs"])
def test_what_replicas_cannot_run_is_refused_in_the_plan(
    make: Any, x: torch.Tensor, why: str, order: str
) -> None:
    def make_task() -> Task:
        net = make().place("MS_WORKER", [0, 1])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        options: Any = {"divider": Divider(4), "gradient_order": order}
        return Task(net, rows_against_target, optimizer, "affinity", False, **options)

    cluster = SimulatedCluster(make_task, 2, captures=Captures())
    with pytest.raises(PlacementError, match=why):
        cluster.train_step(((x, torch.zeros(8)), {}))


def test_a_sparse_gradient_stays_beside_replicas_on_its_worker() -> None:
    def place(net: Any) -> None:
        net.head.place("MS_WORKER", [0, 1])
        net.embed.place("MS_WORKER", 1)

    words = [(torch.arange(8) % 5, torch.ones(8))] * 2
    assert_same_bits(
        Words, words, num_workers=2, loss_fn=rows_against_target, place=place, microbatches=4
    )


@pytest.mark.parametrize("place", [whole(0, 1, 2), whole(2, 0)], ids=["three", "two"])
def test_a_norm_among_branches_skips_and_shared_weights(place: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(8, 6, 6, generator=generator), torch.randn(8, generator=generator)
    for options in ({"schedule": "zero_bubble"}, {"recompute": True}, {"accumulate": 2}):
        assert_same_bits(
            Everything,
            [batch],
            steps=3,
            num_workers=3,
            loss_fn=rows_against_target,
            place=place,
            microbatches=4,
            captures=_everything,
            **options,
        )


class Twice(nn.Module):
    """One norm that is used twice, before and after what follows it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.relu_(self.one(self.norm(x))))


def test_a_norm_that_is_used_twice() -> None:
    generator = torch.Generator().manual_seed(1)
    assert_same_bits(
        Twice,
        [(torch.randn(8, 6, generator=generator), torch.randn(8, generator=generator))],
        steps=2,
        num_workers=2,
        loss_fn=rows_against_target,
        place=whole(0, 1),
        microbatches=4,
        plan_everywhere=True,
    )


def planned(place: Any, make: Any) -> Any:
    def make_task() -> Task:
        torch.manual_seed(0)
        net = make()
        place(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        divider = Divider(4)
        return Task(net, rows_against_target, optimizer, "affinity", False, divider=divider)

    cluster = SimulatedCluster(make_task, 2, captures=Captures())
    shape = (8, 2, 6, 6) if make is Images else (8, 6)
    cluster.train_step(((torch.randn(shape), torch.randn(8)), {}))
    return cluster.latest(Mode.TRAIN)


def test_replicas_do_not_wait_for_each_other() -> None:
    found = planned(whole(0, 1), Images)
    plan, programs = found.plan, found.programs
    seconds = {segment.index: 1.0 for segment in plan.segments}
    assert simulate(plan, programs, Costs(seconds, seconds, {})).step_s == pytest.approx(4.0)
    kinds = [edge.kind for edge in plan.edges]
    assert kinds.count(EdgeKind.BUFFERS) == 2  # all buffers in one message: there, and home
    for worker in (0, 1):
        folded = [i.microbatch for i in programs[worker].instructions if i.opcode is Opcode.FOLD]
        assert folded == [2 * worker, 2 * worker + 1]


class Read(Twice):
    """A step that looks at a buffer that it changes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.norm.running_mean


class Checkpointed(Twice):
    """A norm whose statistics backward changes once more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.norm, self.one(x), use_reentrant=False)


class Affine(Images):
    """All norms have weights: one without would look at the dtype of its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body[5] = nn.BatchNorm2d(4)


class Shorter(Affine):
    """Norms of shorter numbers than their statistics are, in a block of autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


@pytest.mark.parametrize("order", ["left", "pairs"])
@pytest.mark.parametrize("options", [{}, {"autocast": torch.float16}], ids=["block", "whole step"])
def test_norms_and_averages_under_autocast(options: Any, order: str) -> None:
    for place, num_workers in ((whole(2, 0, 1), 3), (stage, 3)):
        assert_same_bits(
            Affine if options else Shorter,
            images(12, 14),
            num_workers=num_workers,
            loss_fn=rows_against_target,
            place=place,
            microbatches=4,
            gradient_order=order,
            **options,
        )


class Cast(Twice):
    """A buffer that is updated by a product, whose operands autocast shortens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mix", torch.eye(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            self.mix.copy_(self.mix @ self.mix)
            return self.one(x)


class Keeping(Twice):
    """A tensor that is kept in Python from one microbatch to the next."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.one(x)
        before = getattr(self, "last", None)
        self.last = made.detach().sum(0)
        return made if before is None else made + before


class WrittenThroughAView(Twice):
    """What goes into the norm is written to by a view that nobody reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.one(x) * 1.0
        pairs = torch.view_as_complex(made.view(-1, 2))
        made.add_(1)
        pairs.mul_(1j)
        return self.norm(made)


class WrittenBeforeTheFirstParameter(WrittenThroughAView):
    """Each lane borrows other parameters, and so has other segments around the writes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x * 1.0
        pairs = torch.view_as_complex(made.view(-1, 2))
        made.add_(1)
        pairs.mul_(1j)
        return self.one(self.norm(made))


@pytest.mark.parametrize("make", [WrittenThroughAView, WrittenBeforeTheFirstParameter])
def test_a_write_before_a_norm_stays_where_it_is(make: Any) -> None:
    assert_same_bits(
        make,
        [(torch.randn(8, 6), torch.randn(8))],
        num_workers=2,
        loss_fn=rows_against_target,
        place=whole(0, 1),
        microbatches=4,
    )


class Counting(Twice):
    """A counter that forward adds to its values by a view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.one(x) * 1.0
        with torch.no_grad():
            self.count += 1
        made.view(-1).add_(self.count)
        return made


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Counting, "buffer count in place"),
        (Read, "buffer norm.running_mean in place"),
        (Checkpointed, "buffer norm.running_mean in place"),
        (Cast, "buffer mix in place"),
        (Keeping, r"(leaves|changes) .*\blast\b"),
    ],
)
def test_what_cannot_wait_until_after_forward_is_refused_by_name(make: Any, why: str) -> None:
    with pytest.raises(PlacementError, match=why) as caught:
        planned(whole(0, 1), make)
    assert "·" not in str(caught.value)
    assert "torch.float32" not in str(caught.value)


def one_after_the_other(plan: PartitionPlan, microbatches: int) -> list[list[Instruction]]:
    """A schedule by the rules of docs/how-to/choose-a-schedule.md, and nothing else."""
    orders: list[list[Instruction]] = [[] for _ in range(plan.num_workers)]
    nodes = plan.placed.graph.nodes
    for m in range(microbatches):
        here = [one for one in plan.segments if plan.is_in(m, one.nodes[0])]
        for one in here:
            orders[one.worker].append(Instruction(Opcode.FORWARD, one.index, m))
        for one in reversed(here):
            if plan.io[one.index].roots or plan.io[one.index].leaves:
                orders[one.worker].append(Instruction(Opcode.BACKWARD, one.index, m))
        for value in plan.gradient_sums:
            if nodes[value].kind is NodeKind.PARAMETER and plan.is_in(m, value):
                worker = plan.worker_of_sum(value)
                orders[worker].append(Instruction(Opcode.ACCUMULATE, value, m))
                block = plan.blocks_of(value)
                if block is not None and m in block.ends:
                    owner = plan.placed.workers[value]
                    orders[owner].append(Instruction(Opcode.ADD_BLOCK, value, m))
        for first, chain in plan.chains.items():
            for lane, worker in enumerate(chain.workers):
                value = first + lane * plan.num_values
                if plan.is_in(m, value):
                    orders[worker].append(Instruction(Opcode.FOLD, value, m))
    return orders


@pytest.mark.parametrize("order", ["left", "pairs"])
def test_an_own_schedule_by_the_documented_rules(order: str) -> None:
    assert_same_bits(
        Images,
        images(12, 12),
        num_workers=3,
        loss_fn=rows_against_target,
        place=mixed,
        microbatches=6,
        gradient_order=order,
        schedule=one_after_the_other,
        captures=_images,
    )


class Annealed(nn.Module):
    """A norm whose momentum changes, and a moving average whose decay does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("weight", torch.ones(()))
        self.decay = 0.9

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.body(x))
        self.mean.mul_(self.decay).add_(x.detach().mean(0) * (1 - self.decay))
        self.weight.mul_(self.decay)
        return x.tanh()


def test_numbers_of_updates_may_change_at_each_step() -> None:
    def change(step: int, net: Any, loss_fn: Any) -> None:
        net.norm.momentum, net.decay = 0.5 / (step + 1), 0.9 + step / 100

    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(8, 4, generator=generator) for _ in range(3)]
    assert_same_bits(
        Annealed,
        [(x, x[:, 0]) for x in rows],
        num_workers=2,
        place=whole(0, 1),
        loss_fn=rows_against_target,
        microbatches=4,
        steps=7,
        before_step=change,
        plan_everywhere=True,
    )


class Written(nn.Module):
    """A norm whose input, in another order of memory, is modified in place."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.body(x) * 2
        turned = made.transpose(1, 2)
        other = 0.0
        if self.way == "by others":
            with gs.place([1, 0]):
                made.mul_(3)
        elif self.way == "read by others":
            made.mul_(3)
            with gs.place([1, 0]):
                other = made + 1
        else:
            made[:, 0] = 1
            made[:, 1:3] += 0.5
        again = self.norm(turned.detach()) if self.way == "without gradient" else self.norm(turned)
        return self.head(again) + other


def norm_elsewhere(net: Any) -> None:
    net.place("MS_WORKER", [0, 1])
    net.norm.place("MS_WORKER", [1, 0])


@pytest.mark.parametrize(
    ("way", "place"),
    [
        ("by others", whole(0, 1)),
        ("read by others", whole(0, 1)),
        ("before it goes to another worker", norm_elsewhere),
        ("without gradient", norm_elsewhere),
    ],
)
def test_a_norm_of_memory_that_was_written_to(way: str, place: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(8, 6, 6, generator=generator) for _ in range(2)]
    assert_same_bits(
        lambda: Written(way),
        [(x, x[:, 0, 0]) for x in rows],
        num_workers=2,
        place=place,
        loss_fn=rows_against_target,
        microbatches=4,
    )
