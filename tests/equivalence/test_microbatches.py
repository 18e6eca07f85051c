"""Steps of several microbatches have the bits of the loop that accumulates over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import assert_same_wherever_placed, batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures, SimulatedCluster
from test_lenet import LeNet, images
from torch import nn

import graphsplit as gs
from graphsplit.batches.microbatches import Divider
from graphsplit.capture.graph import Mode
from graphsplit.errors import PlanMismatchError
from graphsplit.planning.task import Task

_lenet = Captures()


def placed(**ranks: int) -> Any:
    def place(net: Any) -> None:
        for name, rank in ranks.items():
            net.get_submodule(name).place("MS_WORKER", rank)

    return place


@pytest.mark.parametrize(
    ("microbatches", "ranks"),
    [(2, (3, 4, 0, 1, 2)), (4, (3, 4, 0, 1, 2)), (8, (0, 1, 2, 3, 4)), (3, (1, 0, 1, 0, 1))],
)
def test_lenet(microbatches: int, ranks: tuple[int, ...]) -> None:
    assert_same_bits(
        LeNet,
        images(8, 8),
        num_workers=max(ranks) + 1,
        loss_fn=nn.CrossEntropyLoss(),
        place=placed(**dict(zip(("conv1", "conv2", "fc1", "fc2", "fc3"), ranks, strict=True))),
        microbatches=microbatches,
        captures=_lenet,
    )


class Everything(nn.Module):
    """Branches, a skip, A -> B -> A, a shared weight, dropout on several workers, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.drop, self.late = nn.Dropout(0.3), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.drop(self.stem(x))
        left = self.late(torch.tanh(self.left(first)))
        right = self.norm(self.right(first)) * left
        total = F.dropout(right + first, 0.1) + self.stem(right)
        return F.linear(self.head(total), self.head.weight) + x


@pytest.mark.parametrize("rows", [4, 10, 7, 2])
def test_everything_wherever_placed(rows: int) -> None:
    assert_same_wherever_placed(
        Everything, batches_of(rows, 6, 6), microbatches=4 if rows != 2 else 8, placements=range(5)
    )


def test_many_microbatches() -> None:
    assert_same_wherever_placed(
        Everything, batches_of(32, 6, 6), microbatches=32, placements=range(1, 4)
    )


def test_a_short_last_batch_and_one_smaller_than_the_number_of_microbatches() -> None:
    batches = [
        *batches_of(8, 6, 6, num=2),
        *batches_of(5, 6, 6, num=1),
        *batches_of(3, 6, 6, num=1),
    ]
    assert_same_bits(
        Everything,
        batches,
        steps=6,
        num_workers=3,
        loss_fn=rows_against_target,
        place=placed(stem=0, left=1, right=2, norm=2, head=0),
        microbatches=4,
        evaluate_after={1, 5},
    )


class Tied(nn.Module):
    """An embedding that is the head as well, on another worker than some of its uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.drop(torch.tanh(self.body(self.embedding(ids)))))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def tokens(*rows: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    batches = []
    for number in rows:
        ids = torch.randint(0, 11, (number, 5), generator=generator)
        labels = ids.roll(-1, 1)
        for row in range(number):
            labels[row, 1 + row % 4 :] = -100
        batches.append({"ids": ids, "labels": labels})
    return batches


def num_tokens(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (labels != -100).sum()


@pytest.mark.parametrize("owner", [0, 3])
@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_tied_weights_and_a_mean_over_uneven_tokens(microbatches: int, owner: int) -> None:
    ranks = {"embedding": owner, "body": 1, "drop": 2, "head": 3 - owner}
    assert_same_bits(
        Tied,
        tokens(8, 8, 5),
        num_workers=4,
        place=placed(**ranks),
        microbatches=microbatches,
        loss_weight=num_tokens,
        make_optimizer=lambda net: torch.optim.AdamW(net.parameters(), lr=0.01),
    )


def test_the_mean_over_all_tokens_is_that_of_the_whole_batch() -> None:
    """What the weight is for: without it, short sequences would count as much as long ones."""
    (batch,) = tokens(8)
    torch.manual_seed(0)
    network = Tied()
    network.drop.p = 0.0
    network(**batch)["loss"].backward()
    whole = network.body.weight.grad

    def step(loss_weight: Any) -> torch.Tensor:
        def make_task() -> Task:
            torch.manual_seed(0)
            net = Tied()
            net.drop.p = 0.0
            optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
            divider = Divider(4, None, loss_weight)
            return Task(net, None, optimizer, "affinity", with_loss=True, divider=divider)

        cluster = SimulatedCluster(make_task, 1)
        cluster.train_step(((), batch))
        gradient = cluster.workers[0].task.network.get_parameter("body.weight").grad
        assert gradient is not None
        return gradient

    torch.testing.assert_close(step(num_tokens), whole)
    assert (step(None) - whole).norm() > 0.01 * whole.norm()


def by_length(batch: Any, microbatches: int) -> list[Any]:
    """Short rows apart from long ones, each cut to its length: two or more signatures."""
    inputs, target = batch
    return [(inputs[:2], target[:2]), (inputs[2:3], target[2:3]), (inputs[3:], target[3:])]


def test_a_split_of_the_users_own() -> None:
    assert_same_bits(
        Everything,
        batches_of(7, 6, 6),
        num_workers=2,
        loss_fn=rows_against_target,
        place=placed(stem=0, left=1, right=0, norm=1, head=0),
        microbatches=3,
        split=by_length,
        steps=3,
    )


def test_parts_of_a_batch_that_have_no_rows_go_to_every_microbatch() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Any, scale: Any, power: Any, target: Any) -> Any:
            made = self.second(self.first(x["rows"]) * scale) ** power
            return F.mse_loss(made.sum(1), target)

    batches = [
        {"x": {"rows": x}, "scale": torch.tensor(0.5), "power": 2, "target": y}
        for x, y in batches_of(6, 6)
    ]
    assert_same_bits(
        Scaled, batches, num_workers=2, place=placed(first=0, second=1), microbatches=4
    )


class Counting(nn.Module):
    """State that changes in forward, is read by another worker before, and is in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("seen", torch.ones(6))
        self.register_buffer("fixed", torch.full((6,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x) * self.fixed + self.seen  # `seen` as the microbatch before left it
        made = self.second(made)
        self.seen.mul_(0.9).add_(made.detach().mean(0))
        return made * self.seen + self.fixed


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0), (0, 0)])
def test_buffers_change_in_the_order_of_the_microbatches(ranks: tuple[int, int]) -> None:
    def place(net: Any) -> None:
        net.place("MS_WORKER", 1)
        net.first.place("MS_WORKER", ranks[0])
        net.second.place("MS_WORKER", ranks[1])

    assert_same_bits(
        Counting,
        batches_of(8, 6),
        num_workers=2,
        loss_fn=rows_against_target,
        place=place,
        microbatches=4,
    )


class ReadElsewhere(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x)
        with gs.place("MS_WORKER", 1):
            with_seen = self.second(made) + self.seen
        with gs.place("MS_WORKER", 0):
            self.seen.mul_(0.9)
            return with_seen * self.seen + made


def test_a_buffer_that_changes_goes_to_another_worker_as_each_microbatch_finds_it() -> None:
    cluster = assert_same_bits(
        ReadElsewhere,
        batches_of(8, 6),
        num_workers=2,
        loss_fn=rows_against_target,
        place=lambda net: net.place("MS_WORKER", 0),
        microbatches=4,
    )
    planned = cluster.latest(Mode.TRAIN)
    assert planned is not None
    plan = planned.plan
    (edge,) = (e for e in plan.edges if plan.placed.graph.nodes[e.value].target == "seen")
    assert (edge.source, edge.destination, edge.per_step) == (0, 1, False)


class Changing(nn.Module):
    """Writes to its input, which is part of the batch; autograd has saved other rows of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return self.second(self.first(x))


def test_an_input_that_is_modified_in_place() -> None:
    assert_same_bits(
        Changing,
        batches_of(6, 6),
        num_workers=2,
        loss_fn=rows_against_target,
        place=placed(first=0, second=1),
        microbatches=3,
    )


class SameGradient(nn.Module):
    """Parameters whose gradients are one tensor, of which one is used elsewhere as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(6, 6)) for _ in range(3))
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x) @ (self.a + self.b + self.c)
        return self.second(made) @ self.b


def test_parameters_that_get_one_and_the_same_gradient() -> None:
    assert_same_wherever_placed(SameGradient, batches_of(6, 6), microbatches=3)


def test_schedulers_and_hooks_meet_every_step_and_microbatch() -> None:
    calls: list[int] = []

    def make() -> nn.Module:
        network = Everything()
        network.stem.weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
        return network

    assert_same_bits(
        make,
        batches_of(6, 6, 6),
        num_workers=2,
        loss_fn=rows_against_target,
        place=placed(stem=0, left=1, right=0, norm=1, head=0),
        make_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        microbatches=3,
    )
    assert len(calls) == 2 * 2 * 3  # loop and cluster, two steps, three microbatches


def test_every_worker_plans_by_itself() -> None:
    assert_same_bits(
        Everything,
        batches_of(7, 6, 6),
        num_workers=2,
        loss_fn=rows_against_target,
        place=placed(stem=0, left=1, right=0, norm=1, head=0),
        microbatches=4,
        plan_everywhere=True,
    )


def test_workers_with_another_number_of_microbatches_are_refused() -> None:
    numbers = iter([4, 2])

    def make_task() -> Task:
        torch.manual_seed(0)
        network = Everything()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        divider = Divider(next(numbers))
        return Task(network, rows_against_target, optimizer, "affinity", True, divider=divider)

    cluster = SimulatedCluster(make_task, 2)
    with pytest.raises(PlanMismatchError, match="microbatch"):
        cluster.train_step((batches_of(8, 6)[0], {}), batch=batches_of(8, 6)[0])
