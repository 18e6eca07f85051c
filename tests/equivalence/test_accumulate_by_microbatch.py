"""``accumulate_by="microbatch"``: the bits of the printed loop, with one exchange per step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from replica_helpers import Net, whole
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures
from test_microbatches import Tied, num_tokens, placed, tokens
from torch import nn

import graphsplit as gs
from graphsplit.capture.graph import Mode
from graphsplit.errors import ConfigurationError, StateError, StepFailedError
from graphsplit.partition.plan import EdgeKind
from graphsplit.program.instruction import Opcode

_net, _tied = Captures(), Captures()
same = functools.partial(
    assert_same_bits,
    Net,
    loss_fn=rows_against_target,
    accumulate_by="microbatch",
    captures=_net,
)


@pytest.mark.parametrize("order", ["left", "pairs"])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_any_number_of_replicas_and_batches_of_any_number_of_rows(
    num_workers: int, order: Any
) -> None:
    rows = (8, 8, 3, 6, 8, 1)  # a step may end with a batch of few microbatches
    same(
        [batches_of(number, 6, 6, num=1)[0] for number in rows],
        num_workers=num_workers,
        place=whole(*range(num_workers)),
        microbatches=4,
        accumulate=3,
        gradient_order=order,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"clip": gs.clip.GlobalNorm(0.05), "make_scaler": lambda: torch.amp.GradScaler("cpu")},
        {"clip": gs.clip.Value(0.01), "set_to_none": False},
        {"schedule": "zero_bubble"},
        {"schedule": "auto"},
        {"make_optimizer": lambda net: torch.optim.AdamW(net.parameters(), lr=0.01)},
    ],
    ids=["clip and scale", "values and zeros", "zero bubble", "auto", "AdamW"],
)
def test_all_that_comes_between_backward_and_step(options: Any) -> None:
    def place(net: Any) -> None:
        net.body.place("MS_WORKER", [0, 1, 2], rows=(2, 1, 1))
        net.head.place("MS_WORKER", [1, 0])

    same(
        batches_of(10, 6, 6, num=5),
        num_workers=3,
        place=place,
        microbatches=5,
        accumulate=2,
        gradient_order="pairs",
        **options,
    )


@pytest.mark.parametrize("order", ["left", "pairs"])
def test_tied_parameters_on_several_workers_of_one_microbatch(order: Any) -> None:
    assert_same_bits(
        Tied,
        tokens(8, 8, 5, 3, 8, 8),
        num_workers=3,
        place=placed(embedding=0, body=[1, 2], drop=2, head=2),
        microbatches=4,
        loss_weight=num_tokens,
        accumulate=2,
        accumulate_by="microbatch",
        gradient_order=order,
        captures=_tied,
    )


def test_hooks_see_the_part_of_one_microbatch() -> None:
    def make() -> nn.Module:
        net = Net()
        net.body[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return net

    assert_same_bits(
        make,
        batches_of(8, 6, 6, num=4),
        loss_fn=rows_against_target,
        num_workers=2,
        place=whole(0, 1),
        microbatches=4,
        accumulate=2,
        accumulate_by="microbatch",
    )


@pytest.mark.parametrize("rows", [8, 5], ids=["beside its backward", "after it"])
def test_gradients_are_sent_once_in_a_step(rows: int) -> None:
    batches = [*batches_of(8, 6, 6, num=3), *batches_of(rows, 6, 6, num=1)]
    cluster = same(
        batches,
        num_workers=2,
        place=whole(0, 1),
        microbatches=8,
        accumulate=4,
        gradient_order="pairs",
    )
    plans = [p for p in cluster.workers[0].planner._plans.values()]
    plans = [p for p in plans if p.plan.placed.graph.mode is Mode.TRAIN]
    of_batches = [p for p in plans if p.plan.segments]
    ends = [p for p in plans if _sent(p, EdgeKind.BLOCK)]
    assert all(p.plan.segments for p in ends) == (rows == 8)
    for end in ends:
        assert len(_sent(end, EdgeKind.BLOCK)) == 2  # from each to the owner of the others
    assert len(of_batches) == 3  # the one that opens a step, the one that closes it, and the others
    assert not any(_sent(planned, EdgeKind.GRADIENT) for planned in plans)


def _sent(planned: Any, kind: EdgeKind) -> list[int]:
    found: Sequence[Any] = [i for program in planned.programs for i in program.instructions]
    sent = [i.operand for i in found if i.opcode is Opcode.SEND]
    return [edge for edge in sent if planned.plan.edges[edge].kind is kind]


def test_one_batch_a_step_or_one_microbatch_is_as_ever() -> None:
    for options in ({"microbatches": 4}, {"microbatches": 1, "accumulate": 2}):
        same(batches_of(8, 6, 6, num=2), num_workers=1, place=whole(0), **options)


def test_what_cannot_be_is_refused_by_name(tmp_path: Any) -> None:
    def model(by: str = "microbatch", **options: Any) -> gs.Model:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        options = {"microbatches": 2, "accumulate": 2, **options}
        return gs.Model(net, rows_against_target, optimizer, accumulate_by=by, **options)

    with pytest.raises(ConfigurationError, match="accumulate_by='part'; expected 'batch' or 'mic"):
        model("part")
    one, other = model(), model(microbatches=3)
    (batch,) = batches_of(8, 6, 6, num=1)
    one.train_step(*batch)
    one.save(tmp_path / "save")
    with pytest.raises(StateError, match=r"in the middle of a step that keeps 2 parts.*keeps 3: g"):
        other.load(tmp_path / "save")
    one.train_step(*batch)
    one.save(tmp_path / "save")
    other.load(tmp_path / "save")


def test_a_parameter_that_is_frozen_within_a_step_is_named() -> None:
    def freeze(step: int, network: Any, loss_fn: Any) -> None:
        network.head.requires_grad_(step != 1)

    with pytest.raises(
        StepFailedError, match=r"batch of the step has given head\.(weight|bias) a gr"
    ):
        same(
            batches_of(8, 6, 6, num=2),
            num_workers=2,
            place=whole(0, 1),
            microbatches=4,
            accumulate=2,
            before_step=freeze,
        )


def test_a_split_that_makes_more_microbatches_is_refused() -> None:
    def split(batch: Any, number: int) -> list[Any]:
        return list(zip(*(tensor.split(1) for tensor in batch), strict=True))

    with pytest.raises(ConfigurationError, match="split made 8 microbatches of a batch, and the M"):
        same(
            batches_of(8, 6, 6, num=2),
            num_workers=2,
            place=whole(0, 1),
            microbatches=4,
            accumulate=2,
            split=split,
        )
