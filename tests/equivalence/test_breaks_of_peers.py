"""Where other systems break, graphsplit gives the bits of one process. One story per break.

The first half are breaks of torch.distributed.pipelining 2.13, the second of MindSpore's
distributed graph partition. Stories about processes (a killed worker, an exception elsewhere, a
rank that does not exist, loss and accuracy on every worker) are in tests/system/test_failures.py
and tests/system/test_same_bits.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from simulated.simulate import SimulatedCluster
from torch import nn

from graphsplit.capture.graph import Mode
from graphsplit.partition.plan import EdgeKind
from graphsplit.program.depths import channel_depths
from graphsplit.program.proof import verify_programs


def placed(**ranks: int) -> Any:
    """Places modules by name."""

    def place(net: Any) -> None:
        for name, rank in ranks.items():
            net.get_submodule(name).place("MS_WORKER", rank)

    return place


class Chain(nn.Module):
    """Three layers; what each reads is up to ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)


# torch.distributed.pipelining


class Skipping(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        return self.c(torch.relu(self.b(first)) + first) * first


def test_a_value_used_by_two_later_workers() -> None:
    """There: «Backward of skip connections not supported yet»."""
    assert_same_bits(
        Skipping,
        batches_of(4, 6),
        num_workers=3,
        loss_fn=rows_against_target,
        place=placed(a=0, b=1, c=2),
    )


class LateMask(Chain):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x)) * mask)


def test_an_input_first_used_by_a_later_worker() -> None:
    """There: a model input first used in a later stage fails."""
    batches = [(x, (x > 0).float(), y) for x, y in batches_of(4, 6)]
    cluster = assert_same_bits(
        LateMask,
        batches,
        num_workers=3,
        loss_fn=rows_against_target,
        place=placed(a=0, b=1, c=2),
    )
    planned = cluster.latest(Mode.TRAIN)
    assert planned is not None
    mask = next(p for p, n in enumerate(planned.plan.placed.graph.nodes) if n.target == "1")
    assert all(edge.value != mask for edge in planned.plan.edges)  # read where it is used


class There(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_three_stages_on_two_workers(microbatches: int) -> None:
    """There: three stages on two ranks fail under Interleaved1F1B."""
    assert_same_bits(
        There,
        batches_of(6, 6),
        num_workers=2,
        loss_fn=rows_against_target,
        place=placed(a=0, b=1, c=0),
        microbatches=microbatches,
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.body(self.embedding(ids))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tokens(num: int, *shape: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "ids": torch.randint(0, 12, shape, generator=generator),
            "labels": torch.randint(0, 12, shape, generator=generator),
        }
        for _ in range(num)
    ]


def test_the_gradient_of_tied_parameters_is_the_sum_over_all_workers() -> None:
    """There: gradient norms 0.219 and 0.307, where the truth is 0.399."""
    cluster = assert_same_bits(
        Tied, tokens(3, 4, 5), num_workers=2, place=placed(embedding=0, body=1, head=1)
    )
    owners = {cluster.owner_of(name).rank for name in ("embedding.weight", "head.weight")}
    assert len(owners) == 1


def test_a_layer_that_is_reused_stays_one_layer_under_its_own_name() -> None:
    """There: A -> B -> A gives unshared copies under new names."""

    class Reusing(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(torch.relu(self.b(torch.relu(self.a(x)))))

    cluster = assert_same_bits(
        Reusing,
        batches_of(4, 6),
        num_workers=2,
        loss_fn=rows_against_target,
        place=placed(a=0, b=1),
    )
    assert set(cluster.workers[0].planner.owners) == set(Reusing().state_dict())


class Dropping(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.a(x), 0.5, self.training)
        x = F.dropout(self.b(x), 0.5, self.training)
        return self.c(F.dropout(x, 0.5, self.training))


def test_eval_turns_dropout_off_and_train_turns_it_on_again() -> None:
    """There: train or eval is burned in; ``.eval()`` succeeds, and dropout stays on."""
    assert_same_bits(
        Dropping,
        batches_of(4, 6, num=3),
        num_workers=3,
        loss_fn=rows_against_target,
        place=placed(a=0, b=1, c=2),
        evaluate_after=range(3),
    )


def test_every_worker_draws_other_masks_as_one_process_does() -> None:
    """There: the same seed on every rank gives every stage the same dropout mask."""

    class Masks(Chain):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = self.a(x) * 0 + 1, self.b(x) * 0 + 1
            return F.dropout(a, 0.5), F.dropout(b, 0.5)

    def make_task() -> Any:
        from graphsplit.planning.task import Task

        net = Masks()
        placed(a=0, b=1)(net)
        return Task(net, None, None, "affinity", False)

    cluster = SimulatedCluster(make_task, 2)
    first, second = cluster.predict(((torch.ones(16, 6),), {}))[0]
    assert not torch.equal(first, second)


class Normalised(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.norm(self.a(x)))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_planning_does_not_touch_running_statistics(microbatches: int) -> None:
    """There: shape inference ran the real module, and BatchNorm got running_mean of 3e28."""
    assert_same_bits(
        Normalised,
        batches_of(6, 6),
        num_workers=3,
        loss_fn=rows_against_target,
        place=placed(a=0, norm=1, c=2),
        microbatches=microbatches,
    )


def test_ten_samples_in_four_microbatches_and_a_short_last_batch() -> None:
    """There: ragged batches crash."""
    batches = [*batches_of(10, 6, num=1), *batches_of(7, 6, num=1), *batches_of(2, 6, num=1)]
    assert_same_bits(
        Skipping,
        batches,
        num_workers=3,
        loss_fn=rows_against_target,
        place=placed(a=0, b=1, c=2),
        microbatches=4,
    )


def test_a_mean_over_tokens_where_some_are_ignored() -> None:
    """There: gradients are 55-63 % wrong."""
    batches = tokens(2, 6, 5)
    for batch in batches:
        batch["labels"][0, 1:] = -100
        batch["labels"][4, 2:] = -100
    assert_same_bits(
        Tied,
        batches,
        num_workers=2,
        place=placed(embedding=0, body=1, head=1),
        microbatches=3,
        loss_weight=lambda ids, labels: int((labels != -100).sum()),
    )


def test_every_program_passes_the_proof_it_is_made_for() -> None:
    """There: the simulator rejects schedules that were lowered by the same package."""
    cluster = assert_same_bits(
        Skipping,
        batches_of(8, 6),
        num_workers=3,
        loss_fn=rows_against_target,
        place=placed(a=2, b=0, c=1),
        microbatches=8,
    )
    planned = cluster.latest(Mode.TRAIN)
    assert planned is not None
    verify_programs(planned.plan, planned.programs, depths=channel_depths(planned.programs))


# MindSpore


def test_both_operands_of_a_square_come_from_the_other_worker() -> None:
    """There: ``x * x`` across a cut replaces one operand only."""

    class Square(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            with_b = self.b(x * x)
            return self.c(torch.maximum(with_b, with_b))

    assert_same_bits(
        Square,
        batches_of(4, 6),
        num_workers=3,
        loss_fn=rows_against_target,
        place=placed(a=0, b=1, c=2),
        unplaced="affinity",
    )


def test_every_element_of_a_tuple_arrives() -> None:
    """There: a tuple edge sends element 0 only."""

    class Splitting(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, two, three = self.a(x).split(2, dim=1)
            return self.b(torch.cat([three, one, two], dim=1)) + self.c(torch.cat([two] * 3, 1))

    assert_same_bits(
        Splitting,
        batches_of(4, 6),
        num_workers=3,
        loss_fn=rows_against_target,
        place=placed(a=0, b=1, c=2),
    )


def test_a_value_that_many_operations_read_is_sent_once() -> None:
    """There: one send per consumer, no sharing."""

    class Reading(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            return self.b(x) + self.b(x.exp()) + self.b(x.square())

    cluster = assert_same_bits(
        Reading,
        batches_of(4, 6),
        num_workers=2,
        loss_fn=rows_against_target,
        place=placed(a=0, b=1),
        unplaced="affinity",
    )
    planned = cluster.latest(Mode.TRAIN)
    assert planned is not None
    sent = [(e.value, e.destination) for e in planned.plan.edges if e.kind is EdgeKind.VALUE]
    assert len(sent) == len(set(sent))


def test_a_parameter_that_is_used_elsewhere_is_fresh_in_every_step() -> None:
    """There: non-owners hold fake tensors, and a changed parameter is sent apart."""

    class Borrowing(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(F.linear(self.b(x), self.a.weight, self.a.bias)) + self.a(x)

    assert_same_bits(
        Borrowing,
        batches_of(4, 6, num=3),
        num_workers=3,
        loss_fn=rows_against_target,
        place=placed(a=0, b=1, c=1),
    )


def test_operations_that_are_no_modules_are_placed_where_they_are_asked_for() -> None:
    """There: in define-by-run mode ``place`` is ignored without a word."""
    import graphsplit as gs

    class Functional(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            with gs.place("MS_WORKER", 2):
                x = torch.sin(x)
            return self.b(gs.op(torch.mul).place("MS_WORKER", 1)(x, x))

    cluster = assert_same_bits(
        Functional,
        batches_of(4, 6),
        num_workers=3,
        loss_fn=rows_against_target,
        place=placed(a=0, b=0),
    )
    planned = cluster.latest(Mode.TRAIN)
    assert planned is not None
    where = dict(
        zip(
            (node.target for node in planned.plan.placed.graph.nodes),
            planned.plan.placed.workers,
            strict=True,
        )
    )
    assert where["aten.sin.default"] == 2
    assert where["aten.mul.Tensor"] == 1
