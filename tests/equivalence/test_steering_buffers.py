"""Registered buffers whose values steer Python code, in networks that span workers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alone_helpers import assert_as_alone
from plain_model import PlainModel
from recovery_helpers import Generators, ThreadCluster, threads_as_workers
from simulated.compare import difference
from simulated.equivalence import assert_same_bits
from torch import nn

import graphsplit as gs
from graphsplit.errors import CaptureError, PlanMismatchError
from graphsplit.planning.recordings import Recordings
from graphsplit.recovery.settings import SnapshotSettings

assert threads_as_workers
pytestmark = [
    pytest.mark.usefixtures("threads_as_workers"),
    pytest.mark.filterwarnings("ignore:network or loss reads:UserWarning"),
]
INPUTS = torch.randn(8, 8, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(8, 8, 2, generator=torch.Generator().manual_seed(2))
BATCHES = list(zip(INPUTS, TARGETS, strict=True))
Use = Callable[[Any, torch.Tensor], torch.Tensor]


class Steered(nn.Module):
    """Its layers are on two workers, so that it cannot be kept whole."""

    def __init__(self, use: Use, buffers: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)
        if hasattr(nn.Module, "place"):
            self.first.place("MS_WORKER", 0)
            self.second.place("MS_WORKER", 1)
        self.use = use
        for name, value in buffers.items():
            self.register_buffer(name, value.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.use(self, torch.tanh(self.first(x))))
        return made


def below_three(net: Any, h: torch.Tensor) -> torch.Tensor:
    return h * 2 if net.count < 3 else h


def counted(use: Use, add: Callable[[Any], object]) -> Use:
    def call(net: Any, h: torch.Tensor) -> torch.Tensor:
        h = use(net, h)
        if net.training:
            add(net)
        return h

    return call


def add_in_place(net: Any) -> None:
    net.count += 1


def initialize(net: Any, h: torch.Tensor) -> torch.Tensor:
    if not net.is_done:
        net.mean.copy_(h.detach().mean(0))
        net.is_done.fill_(True)
    return h - net.mean


def start_again(net: Any) -> None:
    if (net.count + 1) % 3 == 0:
        net.count.zero_()
    else:
        net.count.add_(1)


def by_index(net: Any) -> None:
    net.count[0] = (net.count + 2) % 5  # the pointer of a queue, as in MoCo


def through_views(net: Any) -> None:
    net.count.view(1).add_(1)
    net.count.data += 1
    net.count.data[...] = net.count - 1


def an_alias(net: Any, h: torch.Tensor) -> torch.Tensor:
    seen, copied = net.count.detach(), net.count.clone()
    net.count += 1
    later = net.count + 1
    later += 1
    h = h * 2 if seen % 2 == 0 else h
    return h.relu() if copied + later < 7 else h


def a_part(net: Any, h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[:, : net.count] *= 2
    net.count.copy_((net.count + 1) % 4)
    return h


def by_table(net: Any, h: torch.Tensor) -> torch.Tensor:
    table = torch.linspace(0.5, 2.0, 90).reshape(2, 45)
    return h * table[0][net.count] + table[1, net.count]


COUNT = {"count": torch.tensor(0)}
CASES: dict[str, tuple[Use, dict[str, torch.Tensor]]] = {
    "unchanged": (below_three, COUNT),
    "counted": (counted(below_three, add_in_place), COUNT),
    "assigned": (counted(below_three, lambda net: setattr(net, "count", net.count + 1)), COUNT),
    "of one element": (counted(below_three, add_in_place), {"count": torch.zeros(1)}),
    "every other": (
        counted(lambda net, h: h.relu() if net.count % 2 == 0 else h, start_again),
        COUNT,
    ),
    "an item": (counted(lambda net, h: h * (1 + net.count.item()), add_in_place), COUNT),
    "a rate": (
        counted(lambda net, h: h * max(0.3, float(net.rate)), lambda net: net.rate.mul_(0.9)),
        {"rate": torch.tensor(0.7)},
    ),
    "an operand, too": (
        counted(lambda net, h: below_three(net, h) * (net.count + 1), add_in_place),
        COUNT,
    ),
    "written by an index": (
        counted(lambda net, h: h * 2 if int(net.count) < 3 else h, by_index),
        {"count": torch.zeros(1, dtype=torch.int64)},
    ),
    "written through views": (counted(below_three, through_views), COUNT),
    "seen by another name": (an_alias, COUNT),
    "the end of a slice": (a_part, COUNT),
    "a place in a table": (counted(by_table, add_in_place), COUNT),
    "beside an average": (
        counted(below_three, lambda net: (add_in_place(net), net.mean.add_(net.first.bias.sum()))),
        {**COUNT, "mean": torch.tensor(0.0)},
    ),
    "initialized by data": (
        initialize,
        {"is_done": torch.tensor(False), "mean": torch.zeros(5)},
    ),
}


def train(case: str, change: Callable[[Any, int], object], make: Any, microbatches: int) -> Any:
    torch.manual_seed(0)
    net = Steered(*CASES[case])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    model = make(net, F.mse_loss, optimizer, microbatches=microbatches)
    found: list[Any] = [model.predict(INPUTS[0])]
    for step, batch in enumerate(BATCHES[:5]):
        change(net, step)
        found.append(model.train_step(*batch).clone())
        if step % 2:
            found.append(model.predict(batch[0]))
    names = CASES[case][1].keys() - {"mean"}
    return copy.deepcopy([found, model.state_dict(), {n: getattr(net, n) for n in sorted(names)}])


def compare(run: Callable[[Any], Any]) -> None:
    assert_as_alone(lambda: run(PlainModel), lambda: run(gs.Model))


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_buffer_may_steer_forward_on_several_workers(case: str, microbatches: int) -> None:
    compare(lambda make: train(case, lambda net, step: None, make, microbatches))


def by_fill(net: Any, step: int) -> None:
    net.count.fill_(step)


def by_assignment(net: Any, step: int) -> None:
    net.count = torch.tensor(step)


@pytest.mark.parametrize("change", [by_fill, by_assignment])
def test_a_script_may_change_a_buffer_that_steers(change: Callable[[Any, int], object]) -> None:
    compare(lambda make: train("unchanged", change, make, 1))


class Loader:
    """Adds to the counter before each batch."""

    def __init__(self, net: Any) -> None:
        self.net = net

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        for batch in BATCHES[:3]:
            self.net.count += 1
            yield batch


@pytest.mark.parametrize("case", ["unchanged", "counted"])
def test_a_data_set_may_change_a_buffer_that_steers(case: str) -> None:
    def run(make: Any) -> Any:
        torch.manual_seed(0)
        net = Steered(*CASES[case])
        model = make(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
        model.train(2, Loader(net))
        return copy.deepcopy([model.predict(INPUTS[0]), model.state_dict(), net.count])

    compare(run)


def test_a_state_with_a_buffer_that_steers_may_be_loaded() -> None:
    def run(make: Any) -> Any:
        torch.manual_seed(0)
        net = Steered(*CASES["counted"])
        model = make(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
        losses, state = [], None
        for step, batch in enumerate(BATCHES):
            if step == 2:
                state = model.state_dict()
            if step == 5:
                (model if make is gs.Model else net).load_state_dict(state)
            losses.append(model.train_step(*batch).clone())
        return losses, model.state_dict()

    compare(run)


def test_a_counter_is_recorded_for_each_answer_and_not_for_each_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, made = Recordings.make, list[str]()

    def counted_make(self: Recordings, mode: Any, signature: Any) -> Any:
        made.append(mode.value)
        return make(self, mode, signature)

    monkeypatch.setattr(Recordings, "make", counted_make)

    def train_long(rank: int) -> None:
        net = Steered(*CASES["counted"])
        model = gs.Model(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
        for _ in range(12):
            model.train_step(*BATCHES[0])

    ThreadCluster(train_long, 2, is_recoverable=False).run()
    assert len(made) / 2 <= 5  # 0, a number below 3; 3, a number above


def test_a_worker_that_alone_changes_a_buffer_that_steers_is_named() -> None:
    def alone(rank: int) -> None:
        net: Any = Steered(*CASES["unchanged"])
        model = gs.Model(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
        for step in range(3):
            if step == 2 and rank == 1:
                net.count.fill_(7)
            model.train_step(*BATCHES[0])

    with pytest.raises(PlanMismatchError, match=r"the value of net\.count is 7 on worker 1, 0 on"):
        ThreadCluster(alone, 2, is_recoverable=False).run()


def other_dtype(net: Any) -> None:
    net.count = net.count * 0.5


def one_for_two(net: Any) -> None:
    net.other = net.count


def a_list(net: Any) -> None:
    torch._foreach_add_([net.count], 1)


def other_data(net: Any) -> None:
    net.count.data = torch.tensor(3)


def a_late_view(net: Any) -> None:
    net.first.bias.data.mul_(next(iter(net.count.view(1))).add_(1))


@pytest.mark.parametrize("add", [other_dtype, one_for_two, a_list, other_data, a_late_view])
def test_what_is_written_to_a_buffer_that_steers_is_followed_or_refused(add: Any) -> None:
    use = counted(below_three, add)

    def run(rank: int) -> None:
        net: Any = Steered(use, {**COUNT, "other": torch.tensor(7)})
        model = gs.Model(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
        model.train_step(*BATCHES[0])

    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        ThreadCluster(run, 2, is_recoverable=False).run()


@pytest.mark.parametrize("progress", [12, 30])
def test_a_worker_that_comes_back_has_the_buffers_that_steer(progress: int) -> None:
    def run(rank: int) -> Any:
        return train("counted", lambda net, step: None, gs.Model, 1)

    before = Generators.now()
    expected = train("counted", lambda net, step: None, PlainModel, 1)
    before.put_back()
    cluster = ThreadCluster(run, 2, SnapshotSettings(1, 100), {1: [progress]})
    for found in cluster.run():
        assert difference(expected, found) is None
    assert cluster.num_killed == 1


@pytest.mark.parametrize("microbatches", [1, 4])
def test_simulated_workers_have_it_all(microbatches: int) -> None:
    use = counted(below_three, add_in_place)
    assert_same_bits(
        lambda: Steered(use, {"count": torch.tensor(0)}),
        BATCHES,
        num_workers=2,
        loss_fn=F.mse_loss,
        steps=5,
        microbatches=microbatches,
        before_step=lambda step, net, loss_fn: add_in_place(net) if step == 1 else None,
    )
