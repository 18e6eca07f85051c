"""Attributes that forward sets: left as in eager mode, and read by the next step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from simulated.simulate import SimulatedCluster
from torch import nn

from graphsplit.capture.graph import Mode


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)


class Rescaled(Base):
    """Halves its weights for eval mode and doubles them again, as RWKV of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.is_rescaled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training == self.is_rescaled:
            with torch.no_grad():
                if self.training:
                    self.second.weight.mul_(2)
                else:
                    self.second.weight.div_(2)
            self.is_rescaled = not self.training
        made: torch.Tensor = self.second(self.first(x).relu())
        return made * 2 if self.is_rescaled else made


class Alternating(Base):
    """Two graphs in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.odd = not self.odd
        h = self.first(x)
        made: torch.Tensor = self.second(h) if self.odd else self.second(h.relu()) + 1
        return made


class WarmingUp(Base):
    """An attribute that is not there at first, one that is None, one that grows for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.width: int | None = None
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.width is None:
            self.width = x.shape[1]
        self.seen = [*self.seen, 1][-2:]
        made: torch.Tensor = self.second(self.first(x)) * len(self.seen)
        if not hasattr(self, "is_warm"):
            self.is_warm = True
            return made
        return made * self.width


class ByVars(Base):
    """Changes an attribute through the dictionary of all."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vars(self)["calls"] += 1
        made: torch.Tensor = self.second(self.first(x)) * self.calls
        return made


def _longer(past: list[int]) -> int:
    past.append(1)
    return len(past)


class ByPartial(Base):
    """Changes a list that only a ``functools.partial`` holds."""

    def __init__(self) -> None:
        super().__init__()
        self.count = partial(_longer, [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.first(x)) * self.count()
        return made


def place(net: Any) -> None:
    net.first.place("MS_WORKER", 0)
    net.second.place("MS_WORKER", 1)


def trained(make: type[nn.Module], microbatches: int = 1) -> SimulatedCluster:
    return assert_same_bits(
        make,
        batches_of(7, 3, num=5),
        num_workers=2,
        place=place,
        loss_fn=rows_against_target,
        microbatches=microbatches,
        evaluate_after=(1, 2, 4),
    )


@pytest.mark.filterwarnings("ignore:network or loss reads")
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("make", [Rescaled, Alternating, WarmingUp, ByVars, ByPartial])
def test_graphs_follow_the_attributes_that_forward_sets(
    make: type[nn.Module], microbatches: int
) -> None:
    trained(make, microbatches)


def test_every_worker_has_the_attributes_of_eager_mode() -> None:
    cluster = trained(Rescaled)  # ends in eval mode
    assert all(worker.task.network.is_rescaled for worker in cluster.workers)


def test_a_plan_is_found_again_when_an_attribute_has_its_value_again() -> None:
    cluster = trained(Rescaled)
    plans = cluster.workers[0].planner._plans.values()
    modes = [planned.plan.placed.graph.mode for planned in plans]
    assert modes.count(Mode.TRAIN) == 2


@pytest.mark.parametrize("microbatches", [1, 3])
def test_an_attribute_that_never_settles_is_an_operand(microbatches: int) -> None:
    class Counting(Base):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            made: torch.Tensor = self.second(self.first(x)) * self.calls
            return made

    cluster = trained(Counting, microbatches)
    found = cluster.workers[0].planner.recordings
    lifted = [place.label for r in found for place in r.graph.state.lifted.places]
    assert "net.calls" in lifted


class Remembering(Base):
    """Keeps its last hidden state, and adds it to the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.hidden is not None:
            h = h + self.hidden
        self.hidden = h.detach()
        made: torch.Tensor = self.second(h)
        return made


class Caching(Base):
    """Makes a table at the first call, for each number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) not in self.hidden:
            self.hidden[len(x)] = torch.arange(4.0)
        made: torch.Tensor = self.second(self.first(x)) * self.hidden[len(x)].sum()
        return made


class Collecting(Base):
    """Shows its hidden states to whoever looks; what it computes does not depend on them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [self.first(x)]
        self.seen.append(self.seen[0].relu())
        made: torch.Tensor = self.second(self.seen[-1])
        return made


@pytest.mark.parametrize("make", [Remembering, Caching])
def test_a_tensor_that_the_next_forward_reads_is_kept(make: Any) -> None:
    assert_same_bits(
        make,
        batches_of(3, 3, num=3),
        num_workers=2,
        loss_fn=rows_against_target,
        plan_everywhere=True,
    )


def test_tensors_left_in_attributes_that_forward_does_not_read_do_no_harm() -> None:
    assert_same_bits(Collecting, batches_of(3, 3), num_workers=2, loss_fn=rows_against_target)


class WithOwnWay(Base):
    """A class's own way to read attributes, of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.half = 1.0

    def __getattribute__(self, name: str) -> Any:
        if name == "gain":
            return super().__getattribute__("half") * 2
        return super().__getattribute__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.first(x)) * self.gain
        return made


class NamedAsTorchs(Base):
    """An attribute that has the name of a method of modules, or of a table of hooks."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.first(x)) * getattr(self, self.name)
        return made


def compare(make: Any, before_step: Any = None, *, rows: int = 6, microbatches: int = 1) -> None:
    assert_same_bits(
        make,
        batches_of(rows, 3),
        steps=4,
        num_workers=2,
        place=lambda net: net.second.place("MS_WORKER", 1),
        loss_fn=rows_against_target,
        microbatches=microbatches,
        before_step=before_step,
        plan_everywhere=True,
    )


@pytest.mark.parametrize("name", ["type", "half", "compile", "_version", "num_hooks", "_hooks"])
def test_an_attribute_may_have_a_name_of_torchs(name: str) -> None:
    compare(
        partial(NamedAsTorchs, name),
        lambda step, net, loss_fn: setattr(net, name, 1.0 + step),
        rows=4,
    )


class HidesAMethod(Base):
    """Forward itself sets an attribute of a method's name, and reads it later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.first(x))
        held: Any = self.half
        made = made if callable(held) else made * held
        self.half = 0.5 if callable(held) else held * 0.9
        return made


@pytest.mark.parametrize("microbatches", [1, 3])
def test_forward_may_hide_a_method_of_modules(microbatches: int) -> None:
    compare(HidesAMethod, microbatches=microbatches)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_module_may_have_its_own_way_to_read_attributes(microbatches: int) -> None:
    def change(step: int, net: nn.Module, loss_fn: Any) -> None:
        net.half = 1.0 + step

    compare(WithOwnWay, change, microbatches=microbatches)


class Choosing(Base):
    """Keeps the head that it chose under another name, as a script may read it between steps."""

    def __init__(self, active: Any) -> None:
        super().__init__()
        self.other, self.active, self.task = nn.Linear(4, 4), active, "second"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.active = None if self.task == "" else getattr(self, self.task)
        head = self.second if self.active is None else self.active
        made: torch.Tensor = head(self.first(x))
        return made


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.filterwarnings("ignore:.*each value takes one of its own")
@pytest.mark.parametrize("active", [None, nn.Identity()], ids=["None", "a module"])
def test_forward_may_give_a_module_one_name_more(active: Any, microbatches: int) -> None:
    def change(step: int, net: Any, loss_fn: Any) -> None:
        assert step == 0 or net.active is getattr(net, net.task, None)
        net.task = ["second", "other", "second", ""][step % 4]

    compare(partial(Choosing, active), change, microbatches=microbatches)


class Refreshing(Base):
    """Gives itself, or a layer, all its attributes anew."""

    def __init__(self, *, layer: bool) -> None:
        super().__init__()
        self.at = [self.second if layer else self]
        vars(self.at[0])["n"] = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one: Any = self.at[0]
        one.__dict__ = {**one.__dict__, "n": one.n + 1}
        made: torch.Tensor = self.second(self.first(x).relu()) * (1 + 0.1 * one.n)
        return made


@pytest.mark.filterwarnings("ignore:network or loss reads")
@pytest.mark.parametrize("layer", [False, True])
def test_a_module_gets_another_dictionary_of_attributes(*, layer: bool) -> None:
    assert_same_bits(
        partial(Refreshing, layer=layer),
        batches_of(8, 3),
        steps=4,
        num_workers=2,
        place=lambda net: (net.first.place("MS_WORKER", 0), net.second.place("MS_WORKER", 1)),
        loss_fn=rows_against_target,
    )
