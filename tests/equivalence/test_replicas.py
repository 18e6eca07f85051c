"""Microbatches shared among replicas give the bits of one process, whatever their number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import batches_of, rows_against_target
from replica_helpers import Net, planned, same_over_two, whole
from simulated.equivalence import assert_same_bits, sgd_with_momentum
from simulated.simulate import Captures
from test_microbatches import Tied, num_tokens, tokens
from torch import nn

import graphsplit as gs
from graphsplit.capture.graph import Mode
from graphsplit.errors import PlacementError
from graphsplit.marks.annotations import Annotation, annotations_of
from graphsplit.partition import splitting
from graphsplit.partition.checks.replicated import refuse_unreplicable
from graphsplit.program.instruction import Opcode
from graphsplit.schedule.costs import Costs
from graphsplit.schedule.simulation.simulate import simulate

ORDERS = ("left", "pairs")


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.narrow(F.gelu(self.wide(self.norm2(x)))))


class SmallGPT(nn.Module):
    """An embedding that is the head as well, around two blocks; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def stage(net: Any) -> None:
    net.body.place("MS_WORKER", [1, 2])
    net.head.place("MS_WORKER", 0)


def blocks(net: Any) -> None:
    net.place("MS_WORKER", 0)
    net.blocks.place("MS_WORKER", [1, 2])


_net, _gpt = Captures(), Captures()


@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("place", "num_workers"),
    [(whole(0, 1), 2), (whole(2, 0, 1), 3), (stage, 3)],
    ids=["two", "three", "one stage"],
)
def test_an_mlp(place: Any, num_workers: int, order: str, microbatches: int) -> None:
    assert_same_bits(
        Net,
        batches_of(8, 6, 6, num=2),
        num_workers=num_workers,
        loss_fn=rows_against_target,
        place=place,
        microbatches=microbatches,
        make_optimizer=adam if microbatches == 8 else sgd_with_momentum,
        gradient_order=order,
        captures=_net,
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("place", "num_workers", "microbatches"),
    [(whole(0, 1), 2, 4), (whole(0, 1, 2), 3, 8), (blocks, 3, 4)],
    ids=["two", "three", "blocks"],
)
def test_a_small_gpt_with_tied_weights(
    place: Any, num_workers: int, microbatches: int, order: str
) -> None:
    assert_same_bits(
        SmallGPT,
        tokens(8, 8),
        num_workers=num_workers,
        place=place,
        microbatches=microbatches,
        loss_weight=num_tokens,
        make_optimizer=adam,
        gradient_order=order,
        captures=_gpt,
    )


def test_every_number_of_workers_gives_one_result() -> None:
    found = []
    for num_workers in (1, 2, 3, 4, 8):
        place = whole(*range(num_workers)) if num_workers > 1 else None
        cluster = assert_same_bits(
            Net,
            batches_of(9, 6, 6, num=1),
            num_workers=num_workers,
            loss_fn=rows_against_target,
            place=place,
            microbatches=8,
            gradient_order="pairs",
            captures=_net,
        )
        state = {
            name: dict(cluster.owner_of(name).task.network.named_parameters())[name]
            for name in ("body.0.weight", "head.weight")
        }
        found.append(torch.cat([tensor.detach().flatten() for tensor in state.values()]))
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe", "clip": gs.clip.GlobalNorm(0.05)},
        {"schedule": "zero_bubble", "accumulate": 2},
        {"schedule": "interleaved_1f1b", "set_to_none": False, "accumulate": 2},
        {"schedule": "auto", "make_scaler": lambda: torch.amp.GradScaler("cpu")},
        {"recompute": True, "plan_everywhere": True},
        {"recompute": ("body",)},
    ],
    ids=lambda options: " ".join(options),
)
def test_schedules_and_all_that_comes_between_backward_and_step(options: Any) -> None:
    for place, order in zip((whole(0, 1, 2), stage), ORDERS, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(splitting, "_LEAST_WORK", 1)
            assert_same_bits(
                Net,
                batches_of(8, 6, 6, num=4),
                num_workers=3,
                loss_fn=rows_against_target,
                place=place,
                microbatches=4,
                gradient_order=order,
                captures=None if "plan_everywhere" in options else _net,
                **options,
            )


@pytest.mark.parametrize("order", ORDERS)
def test_modules_of_different_counts_ragged_and_short_batches(order: str) -> None:
    def place(net: Any) -> None:
        net.embedding.place("MS_WORKER", [2, 0])
        net.body.place("MS_WORKER", [0, 1, 3])
        net.head.place("MS_WORKER", 2)

    assert_same_bits(
        Tied,
        tokens(6, 5, 7, 2, 1),  # one microbatch and two of 6: some workers have nothing to run
        num_workers=4,
        place=place,
        microbatches=6,
        loss_weight=num_tokens,
        make_optimizer=adam,
        gradient_order=order,
    )


def test_frozen_parameters_and_hooks() -> None:
    def make() -> nn.Module:
        net = Net()
        net.body[0].weight.requires_grad_(False)
        net.head.weight.register_hook(lambda gradient: gradient * 0.3)
        net.unused = nn.Linear(2, 2)
        return net

    same_over_two(
        make,
        batches_of(8, 6, 6, num=2),
        microbatches=4,
    )


def test_replicas_compute_at_the_same_time_and_share_the_parameters_out() -> None:
    found = planned(whole(0, 1))
    plan, programs = found.plan, found.programs
    for worker in (0, 1):
        parts = [i.microbatch for i in programs[worker].instructions if i.opcode is Opcode.FORWARD]
        assert parts == [2 * worker, 2 * worker + 1]
    seconds = {segment.index: 1.0 for segment in plan.segments}
    timeline = simulate(plan, programs, Costs(seconds, seconds, {}))
    assert timeline.step_s == pytest.approx(4.0)  # two forwards and backwards each, not four
    sizes = [0, 0]
    for position in plan.placed.graph.state_names:
        if plan.lane_of(position) == 0:
            node = plan.placed.graph.nodes[position]
            sizes[plan.placed.workers[position]] += node.meta.size_bytes
    assert max(sizes) <= 0.6 * sum(sizes)


@pytest.mark.parametrize(
    ("place", "make", "microbatches", "why"),
    [
        (
            whole(0, 1, 2),
            Net,
            2,
            r"3 workers, and the Model has microbatches=2(.|\n)*Fix: raise mic",
        ),
        (whole(0, 3), Net, 4, r"placed on MS_WORKER 3 at .*, but the job has workers 0 to 2"),
    ],
)
def test_what_cannot_run_in_replicas_is_refused_by_name(
    place: Any, make: Any, microbatches: int, why: str
) -> None:
    with pytest.raises(PlacementError, match=why):
        planned(place, make, microbatches)


def test_jobs_and_loops_without_replicas_say_so() -> None:
    torch.manual_seed(0)
    net = Net()
    net.body.place("MS_WORKER", [0, 1])
    modules = {f"module {path!r}": a for path, a in annotations_of(net).items() if a.replicas}
    graph = planned(whole(0, 1)).plan.placed.graph
    with pytest.raises(PlacementError, match=r"gs.distribute\) has none"):
        refuse_unreplicable(replace(graph, mode=Mode.CALL), modules, 4)
    model = gs.Model(net, rows_against_target, adam(net), microbatches=4)
    (batch,) = batches_of(8, 6, 6, num=1)
    with pytest.raises(PlacementError, match="names one worker each"):
        model.placement(*batch)
    told = model.explain(*batch)
    assert "per microbatch, 2 lanes together" in told
    assert " 112 " in told.partition("body.0")[2].partition("\n")[0]  # each parameter once


class Blocks(Net):
    """Operations and a norm that blocks place on several workers, beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with gs.place([1, 2], rows=(1, 3)):
            x = self.norm(self.body(x).sum(1))
        return gs.op(torch.tanh).place("MS_WORKER", [2, 0])(self.head(x))


def test_blocks_and_operations_on_several_workers() -> None:
    assert_same_bits(
        Blocks,
        batches_of(8, 6, 6, num=2),
        num_workers=3,
        loss_fn=lambda outputs, target: F.mse_loss(outputs.sum(1), target),
        microbatches=4,
        plan_everywhere=True,
    )


@pytest.mark.parametrize(
    "rules",
    [
        {"body": [0, 1], "head": {"ranks": [2, 1], "rows": [3, 1]}},
        {"modules": {"": ["MS_WORKER", [2, 0, 1]]}, "operations": {"body.4": {"tanh*": [1, 2]}}},
    ],
    ids=["modules", "operations"],
)
def test_rules_name_several_workers(rules: Any) -> None:
    cluster = assert_same_bits(
        Net,
        batches_of(8, 6, 6, num=2),
        num_workers=3,
        loss_fn=rows_against_target,
        place=lambda net: gs.apply_placement(net, rules),
        microbatches=4,
        captures=_net,
    )
    found = cluster.latest(Mode.TRAIN)
    assert found is not None
    assert len(found.plan.lanes) > 1


@pytest.mark.parametrize(
    ("rows", "num_parts", "expected"),
    [((), 5, (2, 2, 1)), ((2, 1, 1), 8, (4, 2, 2)), ((2, 1, 1), 6, (3, 2, 1)), ((), 2, (1, 1, 0))],
)
def test_blocks_are_contiguous_and_in_proportion(
    rows: tuple[int, ...], num_parts: int, expected: tuple[int, ...]
) -> None:
    placed = Annotation(4, "", replicas=(4, 7, 5), rows=rows)
    assert placed.blocks(num_parts) == expected
    late = [placed.block_of(part, num_parts) for part in range(-num_parts, 0)]
    assert late == sorted(late) and len(late) == num_parts
    ranks = [placed.in_lane(part, num_parts).rank for part in range(num_parts)]
    assert ranks == [r for r, size in zip((4, 7, 5), expected, strict=True) for _ in range(size)]


def test_behind_others_of_the_batch_the_last_replicas_have_more() -> None:
    placed = Annotation(4, "", replicas=(4, 7, 5), rows=(2, 1, 1))
    assert placed.blocks(3, to_last=True) == (1, 1, 1) == placed.blocks(3)
    assert placed.blocks(5, to_last=True) == (3, 1, 1)
    even = Annotation(4, "", replicas=(4, 7, 5))
    assert [even.in_lane(part, 4).rank for part in range(-4, 0)] == [4, 7, 5, 5]
    assert [even.in_lane(part, 1).rank for part in range(-1, 0)] == [5]


@pytest.mark.parametrize("rows", [(1,), (1, 0), (1, 2.0), (1, True), 3])
def test_rows_that_do_not_fit_are_refused(rows: Any) -> None:
    with pytest.raises(PlacementError, match=r"rows=.* does not divide microbatches among 2 work"):
        Net().place("MS_WORKER", [0, 1], rows=rows)
    with pytest.raises(PlacementError, match="rows= divides microbatches among several workers"):
        gs.place(1, rows=(1, 2))
    with pytest.raises(PlacementError, match="on 2 workers by rows"):
        planned(lambda net: net.place([0, 1], rows=(9, 1)))


def test_a_parameter_lives_on_one_worker() -> None:
    with pytest.raises(PlacementError, match="are several workers, and a parameter lives on one"):
        gs.apply_placement(Net(), {"parameters": {"head.weight": [0, 1]}})


def test_a_range_of_workers_is_a_list_of_them() -> None:
    net: Any = Net()
    net.place(range(2))
    net.body.place("MS_WORKER", range(1, 3), rows=(2, 1))
    net.head.place(range(1, 2))
    found = [(a.rank, a.replicas, a.rows) for a in annotations_of(net).values()]
    assert found == [(0, (0, 1), ()), (1, (1, 2), (2, 1)), (1, (), ())]


@pytest.mark.parametrize("ranks", [{0, 1}, torch.tensor([0, 1]), torch.arange(2).numpy()])
def test_ranks_in_what_is_no_list_are_refused_by_name(ranks: Any) -> None:
    net: Any = Net()
    with pytest.raises(PlacementError, match=r"role a \w+ is not known; expected 'MS_WORKER'"):
        net.place(ranks)
    with pytest.raises(PlacementError, match=r"rank .* is a \w+; expected an int"):
        net.place("MS_WORKER", ranks)


@pytest.mark.parametrize("ranks", [[], [0, 0], [0, -1], [0, "1"]])
def test_ranks_that_are_none_are_refused(ranks: list[Any]) -> None:
    with pytest.raises(PlacementError, match=r"worker|negative|expected an int"):
        Net().place("MS_WORKER", ranks)


class Flat(nn.Module):
    """Small parameters and buffers that are views of one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, width), nn.Linear(width, 8), nn.Linear(8, width)
        values = nn.utils.parameters_to_vector(self.parameters()).detach()
        nn.utils.vector_to_parameters(torch.cat([torch.zeros(1), values])[1:], self.parameters())
        rows = torch.randn(3, width, width)
        self.register_buffer("u", rows[1])
        self.register_buffer("v", rows[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.c(torch.tanh(self.b(self.a(x @ self.u)))) @ self.v
        return made


@pytest.mark.parametrize("width", [5, 7, 9])
@pytest.mark.parametrize("parts", [2, 4])
def test_what_replicas_borrow_begins_in_memory_as_at_home(width: int, parts: int) -> None:
    """The bits of small products depend on it."""
    assert_same_bits(
        lambda: Flat(width),
        batches_of(parts, width),
        num_workers=2,
        place=lambda net: net.place("MS_WORKER", [0, 1]),
        microbatches=parts,
        loss_fn=rows_against_target,
    )
