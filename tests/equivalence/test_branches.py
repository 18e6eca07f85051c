"""``torch.cond`` with branches on several workers: eager's bits, and nothing more is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, num_workers_of, rows_against_target
from pass_helpers import captured, placed
from simulated.equivalence import assert_same_bits
from simulated.scattered import scattered
from simulated.simulate import Captures
from torch import nn

from graphsplit.batches.signature import Signature
from graphsplit.capture.branching import is_branching, why_together
from graphsplit.capture.graph import CapturedGraph, Mode
from graphsplit.errors import PlacementError
from graphsplit.partition.checks.redrawn import refuse_redrawn
from graphsplit.planning.task import Task
from graphsplit.rewrite.branches import take_branches_apart

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
Body = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 4)
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self, self.first(x)))


def cond(predicate: torch.Tensor, taken: Any, not_taken: Any, operands: Any) -> Any:
    found: Any = torch.cond(predicate, taken, not_taken, operands)
    return found


def plain(net: Net, h: torch.Tensor) -> torch.Tensor:
    made = cond(h.sum() > 0, lambda y: net.one(y).sin() * y, lambda y: net.other(y) + y * y, (h,))
    return made * h


def nested(net: Net, h: torch.Tensor) -> torch.Tensor:
    def taken(y: torch.Tensor) -> Any:
        z = net.one(y)
        return cond(z[0, 0] > 0, lambda a, b: net.other(a) * b, lambda a, b: a + b * b, (z, y))

    return cond(h.sum() > 0, taken, lambda y: net.other(y).relu() + y, (h,)) + h


def used_again(net: Net, h: torch.Tensor) -> torch.Tensor:
    for index in range(2):
        h = cond(h.sum() > index, lambda y: net.one(y) * y, lambda y: net.one(net.other(y)), (h,))
    return h


def without_gradients(net: Net, h: torch.Tensor) -> torch.Tensor:
    def taken(y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            z = net.one(y) * 3
        return net.other(y) * z

    with torch.no_grad():
        scale = cond(h.mean() > 0, lambda y: net.one(y), lambda y: net.other(y), (h,))
    return cond(h.sum() > 0, taken, lambda y: net.one(y) + y, (h,)) * scale


def several_results(net: Net, h: torch.Tensor) -> torch.Tensor:
    one, _ = cond(
        h.sum() > 0,
        lambda y: (net.one(y).exp(), y.sum(0)),
        lambda y: (y.sin(), net.other(y).mean(0)),
        (h,),
    )
    one.add_(1)  # what the branch keeps for backward must not change
    return one


def infinite_if_run(net: Net, h: torch.Tensor) -> torch.Tensor:
    always = h.sum() > -1e9
    return cond(
        always, lambda y: net.one(y), lambda y: net.other(y) / 0 * torch.log(-y.abs()), (h,)
    )


BODIES: dict[str, Body] = {
    body.__name__: body
    for body in (
        plain,
        nested,
        used_again,
        without_gradients,
        several_results,
        infinite_if_run,
    )
}


class Opened(Captures):
    """Graphs in which every branch is taken apart."""

    def graph(self, task: Task, mode: Mode, signature: Signature, lift: Any = ()) -> CapturedGraph:
        graph = super().graph(task, mode, signature, lift)
        conds = [node for node in graph.fx_graph.nodes if is_branching(node)]
        assert not any(why_together(graph, node) for node in conds)
        return take_branches_apart(graph, frozenset(node.name for node in conds))


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_operations_of_branches_keep_their_bits_wherever_they_are(body: Body) -> None:
    first, *others = scattered(Opened(), [(seed, num_workers_of(seed)) for seed in (1, 2, 5)])
    batches = batches_of(6, 3, num=3)
    assert_same_bits(
        lambda: Net(body), batches, beside=others, loss_fn=rows_against_target, **first
    )


def apart(net: Any) -> None:
    for rank, name in enumerate(("first", "one", "other")):
        getattr(net, name).place("MS_WORKER", rank)
    net.last.place("MS_WORKER", 0)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_modules_of_branches_can_be_placed_apart(microbatches: int) -> None:
    assert_same_bits(
        lambda: Net(nested),
        batches_of(6, 3),
        num_workers=3,
        place=apart,
        loss_fn=rows_against_target,
        microbatches=microbatches,
    )


def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return outputs.sum() + target.sum()


def graph_of(net: nn.Module, mode: Mode = Mode.TRAIN) -> CapturedGraph:
    given = (torch.zeros(6, 3), torch.zeros(6)) if mode is Mode.TRAIN else (torch.zeros(6, 3),)
    return captured(net, *given, loss_fn=loss, mode=mode)


def draws(net: Net, h: torch.Tensor) -> torch.Tensor:
    def taken(y: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(net.one(y), 0.5, net.training)

    return cond(h.sum() > 0, taken, lambda y: net.other(y), (h,))


def test_random_numbers_in_branches_over_several_workers_are_refused_in_training() -> None:
    net = Net(draws)
    apart(net)
    with pytest.raises(PlacementError) as caught:
        placed(net, graph_of(net))
    message = str(caught.value)
    assert "draws random numbers inside" in message
    assert "PyTorch draws others when it runs the branch again in backward" in message
    assert "one on 1" in message and "other on 2" in message
    assert __file__ in message
    placed(net, graph_of(net, Mode.PREDICT))


@pytest.mark.parametrize("is_microbatched", [False, True])
def test_random_numbers_in_a_branch_need_one_worker_and_one_batch(is_microbatched: bool) -> None:
    net = Net(draws)
    refuse_redrawn(placed(net, graph_of(net)), is_microbatched=False)
    if not is_microbatched:
        net.first.place("MS_WORKER", 0)
        net.last.place("MS_WORKER", 1)
    with pytest.raises(PlacementError) as caught:
        refuse_redrawn(placed(net, graph_of(net)), is_microbatched=is_microbatched)
    where = "with several microbatches" if is_microbatched else "over several workers"
    assert where in str(caught.value)
    assert "Fix: draw outside" in str(caught.value)
    assert __file__ in str(caught.value)


def test_branches_that_cannot_be_taken_apart_say_why() -> None:
    def casts(net: Net, h: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return cond(h.sum() > 0, lambda y: net.one(y), lambda y: net.other(y), (h,)).float()

    net = Net(casts)
    apart(net)
    with pytest.raises(PlacementError) as caught:
        placed(net, graph_of(net, Mode.PREDICT))
    assert "cond runs whole on one worker: it stands in a torch.autocast block" in str(caught.value)
