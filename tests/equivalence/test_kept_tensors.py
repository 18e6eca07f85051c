"""Tensors that a loss or a network keeps in Python: the bits of the plain loop."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from torch import nn

from graphsplit.errors import OwnershipError
from graphsplit.torch_ext.stand_ins import StandIn

pytestmark = pytest.mark.filterwarnings("ignore:network or loss reads:UserWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.begin()

    def begin(self) -> None:
        pass

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.middle(torch.tanh(self.first(x))))


def place(net: Any) -> None:
    net.first.place("MS_WORKER", 0)
    net.second.place("MS_WORKER", 1)


class Average:
    """Assigned anew, from a tensor of the user's."""

    def __init__(self) -> None:
        self.average = torch.tensor(1.0)

    def __call__(self, outputs: Any, target: Any) -> torch.Tensor:
        loss = rows_against_target(outputs, target)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss / self.average


class FromNothing(Average):
    def __init__(self) -> None:
        self.average: Any = None

    def __call__(self, outputs: Any, target: Any) -> torch.Tensor:
        loss = rows_against_target(outputs, target)
        new = loss.detach()
        self.average = new if self.average is None else 0.9 * self.average + 0.1 * new
        return loss / self.average


class InPlace(Average):
    def __call__(self, outputs: Any, target: Any) -> torch.Tensor:
        loss = rows_against_target(outputs, target)
        self.average.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss / self.average


class ByNumbersAlone(Average):
    """Written to before it meets anything that depends on the batch."""

    def __init__(self) -> None:
        self.average = torch.arange(1.0, 5.0)

    def __call__(self, outputs: Any, target: Any) -> torch.Tensor:
        loss = rows_against_target(outputs, target)
        self.average.mul_(0.5)
        self.average[1:] += 1
        return loss + (outputs * self.average).mean()


class InPlaceThenAssigned(ByNumbersAlone):
    def __call__(self, outputs: Any, target: Any) -> torch.Tensor:
        loss = rows_against_target(outputs, target)
        before = self.average.sum()
        self.average.mul_(0.5)
        self.average = self.average + outputs.detach().mean(0)
        return loss * before + (outputs * self.average).mean()


class Latest:
    """The last losses, which move on by one place at each step."""

    def __init__(self) -> None:
        self.latest: Any = deque(maxlen=2)
        self.table: dict[str, torch.Tensor] = {}

    def __call__(self, outputs: Any, target: Any) -> torch.Tensor:
        loss = rows_against_target(outputs, target)
        self.latest.append(loss.detach())
        self.table["sum"] = self.table.get("sum", torch.zeros(())) + loss.detach()
        return loss / sum(self.latest) + loss / self.table["sum"]


class TwoNames:
    """One tensor in two places, then two tensors."""

    def __init__(self) -> None:
        self.one: Any = None
        self.other: Any = None

    def __call__(self, outputs: Any, target: Any) -> torch.Tensor:
        loss = rows_against_target(outputs, target)
        if self.one is None:
            self.one = self.other = outputs.detach().mean(0)
        elif self.one is self.other:
            self.one.mul_(0.5)
            self.other = self.other + 1
        else:
            self.one, self.other = self.other, self.one
        return loss + self.one.sum() * 2 + self.other.sum()


class ListsAnew:
    """Reads from a list that it makes itself, and leaves another: no tensor there is the user's."""

    def __init__(self) -> None:
        self.table = {"past": [torch.ones(4)]}

    def __call__(self, outputs: Any, target: Any) -> torch.Tensor:
        self.table["past"] = [*self.table["past"], outputs.detach().mean(0)][-2:]
        outputs = outputs + 0.1 * self.table["past"][-1]
        self.table["past"] = [one * 0.5 for one in self.table["past"]]
        if not self.table["past"]:
            outputs = outputs + self.table["past"][-1]
        return rows_against_target(outputs, target)


LOSSES: dict[str, Callable[[], Any]] = {
    "assigned": Average,
    "from nothing": FromNothing,
    "in place": InPlace,
    "in place, by numbers alone": ByNumbersAlone,
    "in place, then assigned": InPlaceThenAssigned,
    "list and dictionary": Latest,
    "lists made anew": ListsAnew,
    "two names": TwoNames,
}


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_keeps_tensors(name: str, microbatches: int) -> None:
    assert_same_bits(
        Net,
        batches_of(8, 3, num=5),
        num_workers=2,
        place=place,
        loss_fn=LOSSES[name](),
        microbatches=microbatches,
        plan_everywhere=True,
    )


class Hidden(Net):
    def begin(self) -> None:
        self.state: Any = None
        self.past: Any = deque(maxlen=2)

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        if self.state is not None:
            h = h + 0.1 * self.state[0] * self.state[1]
        self.past.append(h.detach().mean(0))
        self.state = (h.detach().mean(0), h.detach().std(0))
        return h + sum(self.past)


class InTurns:
    """Losses of one class, each with an average of its own."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.losses, self.use = [make(), make()], 0

    def __call__(self, outputs: Any, target: Any) -> torch.Tensor:
        chosen = [loss for number, loss in enumerate(self.losses) if number == self.use]
        made: torch.Tensor = chosen[0](outputs, target)
        return made


def assert_same_in_turns(
    make: Callable[[], Any], before_step: Callable[[int, Any, Any], None], microbatches: int = 1
) -> None:
    assert_same_bits(
        Net,
        batches_of(8, 3, num=6),
        num_workers=2,
        place=place,
        loss_fn=InTurns(make),
        microbatches=microbatches,
        before_step=before_step,
        plan_everywhere=True,
    )


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("make", [Average, FromNothing, InPlace])
def test_each_loss_of_a_class_keeps_its_own_tensor(make: Any, microbatches: int) -> None:
    """They were kept in one buffer, without a word."""

    def take_turns(step: int, net: Any, loss_fn: Any) -> None:
        loss_fn.use = (0, 0, 1, 1, 0, 1)[step]

    assert_same_in_turns(make, take_turns, microbatches)


@pytest.mark.parametrize("make", [Average, FromNothing])
def test_what_the_script_has_taken_from_its_place_is_not_read_in_another_one(make: Any) -> None:
    """It went on from the average of the latest step, without a word."""

    def go_back(step: int, net: Any, loss_fn: Any) -> None:
        if step == 2:
            loss_fn.losses[1] = copy.copy(loss_fn.losses[0])
        loss_fn.use = int(step >= 4)

    with pytest.raises(OwnershipError, match="has taken from where code had left a tensor"):
        assert_same_in_turns(make, go_back)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_network_keeps_tensors_in_attributes(microbatches: int) -> None:
    def restart(step: int, net: Any, loss_fn: Any) -> None:
        if step == 3:
            net.state = None

    assert_same_bits(
        Hidden,
        batches_of(8, 3, num=5),
        num_workers=2,
        place=place,
        loss_fn=rows_against_target,
        microbatches=microbatches,
        before_step=restart,
        plan_everywhere=True,
    )


class Buffered(Net):
    """A buffer that is written to, also through a view, and then assigned anew."""

    def begin(self) -> None:
        self.register_buffer("average", torch.arange(1.0, 5.0))

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        first, scaled = self.average[:2], h * self.average.sum()
        self.average.mul_(0.5)
        first.add_(0.1)
        self.average = self.average + h.detach().mean(0)
        self.average.add_(0.01)
        return scaled * self.average + first.mean()


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_buffer_is_written_to_before_it_is_assigned(microbatches: int) -> None:
    assert_same_bits(
        Buffered,
        batches_of(8, 3, num=4),
        num_workers=2,
        place=place,
        loss_fn=rows_against_target,
        microbatches=microbatches,
    )


class CachedProperties(Net):
    """What is made when it is first read stays, though what it was made of changes."""

    def begin(self) -> None:
        self.slope = 0.5

    @cached_property
    def bias(self) -> torch.Tensor:
        return torch.arange(4.0) * self.slope

    @cached_property
    def gain(self) -> float:
        return self.slope * 2

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.gain + self.bias


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_cached_property_stays_as_it_is_until_it_is_deleted(microbatches: int) -> None:
    def change(step: int, net: Any, loss_fn: Any) -> None:
        net.slope = 0.5 + step
        if step == 3:
            del net.gain
        if step == 4:
            del net.bias
        if step == 6:
            net.bias = torch.ones(4)

    assert_same_bits(
        CachedProperties,
        batches_of(8, 3, num=4),
        num_workers=2,
        place=place,
        loss_fn=rows_against_target,
        microbatches=microbatches,
        before_step=change,
        plan_everywhere=True,
        steps=8,
    )


class ReadLater(Net):
    """One call leaves a tensor of another form than was there; only a later one reads it."""

    def begin(self) -> None:
        self.center, self.is_ready = torch.ones(1), False

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        if self.is_ready:
            return h + self.center
        self.center, self.is_ready = h.detach().mean(0), True
        return h


class ReadInEval(Net):
    """What training leaves, evaluation reads."""

    def begin(self) -> None:
        self.center: Any = None
        self.scale = torch.ones(1)

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.center, self.scale = h.mean(0), h.std(0)
            return h
        return h if self.center is None else (h - self.center) / self.scale


class Queue(Net):
    """Grows until it is full."""

    def begin(self) -> None:
        self.queue = torch.zeros(0, 4)

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        self.queue = torch.cat([self.queue, h.detach()])[-12:]
        return h + self.queue.mean(0)


@pytest.mark.parametrize("make", [ReadLater, ReadInEval, Queue])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_one_call_leaves_another_one_reads(make: type[Net], microbatches: int) -> None:
    assert_same_bits(
        make,
        batches_of(8, 3, num=4),
        num_workers=2,
        place=place,
        loss_fn=rows_against_target,
        microbatches=microbatches,
        plan_everywhere=True,
    )


class Hooked(Net):
    """A hook keeps a feature, which the second half reads."""

    def begin(self) -> None:
        self.seen: dict[str, torch.Tensor] = {}
        self.first.register_forward_hook(self.note)

    def note(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.seen["h"] = out

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.seen["h"].sigmoid()


def test_a_hook_keeps_a_feature() -> None:
    assert_same_bits(
        Hooked,
        batches_of(8, 3, num=4),
        num_workers=2,
        place=place,
        loss_fn=rows_against_target,
        evaluate_after=(1, 2),
        plan_everywhere=True,
    )


def test_the_script_is_not_given_what_moves_on() -> None:
    """In eager mode a reference to it keeps the value of its step."""
    found: list[Any] = []
    assert_same_bits(
        Net,
        batches_of(8, 3, num=4),
        num_workers=1,
        loss_fn=FromNothing(),
        before_step=lambda step, net, loss_fn: found.append(loss_fn.average),
        plan_everywhere=True,
    )
    kept = [value for value in found if isinstance(value, StandIn)]
    assert kept
    with pytest.raises(OwnershipError, match=r"loss_fn\.average is kept with the network"):
        float(kept[-1])


def test_what_the_script_had_there_stays_as_it_is() -> None:
    first = torch.tensor(1.0)

    def put_back(step: int, net: Any, loss_fn: Any) -> None:
        if step in (0, 3):
            loss_fn.average = first

    assert_same_bits(
        Net,
        batches_of(8, 3, num=5),
        num_workers=1,
        loss_fn=Average(),
        before_step=put_back,
        plan_everywhere=True,
    )
    assert first == 1


class KeepsBuffer(Net):
    def begin(self) -> None:
        self.register_buffer("h", torch.ones(4))
        self.first_h = [self.h]

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        h = h + 0.3 * self.h
        self.h = h.detach().mean(0)
        return h


def test_a_buffer_may_be_reset_to_the_tensor_that_it_was() -> None:
    start = torch.ones(4)

    def reset(step: int, net: Any, loss_fn: Any) -> None:
        if step in (0, 3):
            net.h = start

    assert_same_bits(
        KeepsBuffer,
        batches_of(8, 3, num=5),
        num_workers=1,
        loss_fn=rows_against_target,
        before_step=reset,
        plan_everywhere=True,
    )
    assert torch.equal(start, torch.ones(4))


class OfParameters:
    """A penalty on parameters that it holds in a list."""

    def __init__(self) -> None:
        self.parameters: list[torch.Tensor] = []

    def __call__(self, outputs: Any, target: Any) -> torch.Tensor:
        return rows_against_target(outputs, target) + sum(p.square().sum() for p in self.parameters)


def test_a_loss_that_holds_parameters_trains_them() -> None:
    def tell(step: int, net: Any, loss_fn: Any) -> None:
        loss_fn.parameters = [net.first.weight, net.second.weight]

    assert_same_bits(
        Net,
        batches_of(8, 3, num=4),
        num_workers=2,
        place=place,
        loss_fn=OfParameters(),
        before_step=tell,
        plan_everywhere=True,
    )


class KeepsView(Net):
    def begin(self) -> None:
        self.held: dict[str, torch.Tensor] = {}

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        row = self.held.get("row", self.first.bias)
        self.held["row"] = self.first.weight.detach()[0]
        return h * row.sum()


def test_a_view_of_a_parameter_is_not_kept() -> None:
    with pytest.raises(OwnershipError, match=r"a view of .*first\.weight"):
        assert_same_bits(
            KeepsView,
            batches_of(4, 3, num=2),
            num_workers=2,
            place=place,
            loss_fn=rows_against_target,
            plan_everywhere=True,
        )


@dataclass
class Holder:
    value: torch.Tensor


class LeavesObject(Net):
    """An object with a tensor that no step reads, and a parameter: only the script could."""

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        self.left = SimpleNamespace(all=[Holder(h), Holder(h + 1)], bias=Holder(self.first.bias))
        return h


def test_a_tensor_in_an_object_that_forward_leaves_is_not_missed_without_a_word() -> None:
    found: list[Any] = []

    def look(step: int, net: Any, loss_fn: Any) -> None:
        if step:
            assert net.left.bias.value is net.first.bias
            found.extend(one.value for one in net.left.all)

    assert_same_bits(
        LeavesObject,
        batches_of(4, 3, num=2),
        num_workers=2,
        place=place,
        loss_fn=rows_against_target,
        before_step=look,
        plan_everywhere=True,
    )
    kept = [value for value in found if isinstance(value, StandIn)]
    assert len({id(value) for value in kept}) == 4  # two workers
    with pytest.raises(OwnershipError, match="stands in an object that forward makes"):
        float(kept[-1].sum())


class LeavesViews(Net):
    """Nobody reads them later: they do no harm."""

    def middle(self, h: torch.Tensor) -> torch.Tensor:
        self.left, self.right = h.chunk(2, 1)
        self.row, self.sparse = self.first.bias[:1], torch.eye(4).to_sparse()
        return torch.cat([self.right, self.left], 1) + self.row


def test_views_that_one_call_leaves_do_no_harm() -> None:
    assert_same_bits(
        LeavesViews,
        batches_of(4, 3, num=2),
        num_workers=2,
        place=place,
        loss_fn=rows_against_target,
        plan_everywhere=True,
    )
