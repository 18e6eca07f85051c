"""Averages and targets that a script keeps by hand: of what lives on other workers, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from alone_helpers import assert_as_alone
from plain_model import PlainModel
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn

import graphsplit as gs
from graphsplit.errors import OwnershipError
from graphsplit.recovery.settings import SnapshotSettings

assert threads_as_workers
pytestmark = pytest.mark.usefixtures("threads_as_workers")
INPUTS = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randn(4, 8, 2, generator=torch.Generator().manual_seed(2))
BATCHES = list(zip(INPUTS, TARGETS, strict=True))
Update = Callable[[Any, Any], object]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn, self.second = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        if hasattr(nn.Module, "place"):
            self.first.place("MS_WORKER", 0)
            self.second.place("MS_WORKER", 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.bn(torch.tanh(self.first(x))))
        return made


def pairwise(write: Callable[[torch.Tensor, torch.Tensor], object]) -> Update:
    def update(average: Any, net: Any) -> None:
        with torch.no_grad():
            for one, other in zip(average.parameters(), net.parameters(), strict=True):
                write(one, other)

    return update


def parts(one: torch.Tensor, other: torch.Tensor) -> None:
    one[0].mul_(0.5).add_(other[0])
    one.view(-1)[0] = other.view(-1)[1]


def set_data(one: torch.Tensor, other: torch.Tensor) -> None:  # as byol-pytorch does it
    one.data = 0.9 * one.data + 0.1 * other.data


def by_state(average: Any, net: Any) -> None:  # as ModelEmaV2 of timm does it
    with torch.no_grad():
        states = average.state_dict().values(), net.state_dict().values()
        for one, other in zip(*states, strict=True):
            one.copy_(0.9 * one + 0.1 * other)


def in_one_call(average: Any, net: Any) -> None:  # as its ModelEmaV3
    averaged, now = [], []
    for one, other in zip(average.state_dict().values(), net.state_dict().values(), strict=True):
        if one.is_floating_point():
            averaged.append(one)
            now.append(other)
        else:
            one.copy_(other)
    torch._foreach_lerp_(averaged, now, weight=0.1)


def kept_state(average: Any, net: Any) -> None:
    state = vars(average).setdefault("kept", average.state_dict())
    for name, value in net.state_dict().items():
        if value.is_floating_point():
            state[name].mul_(0.9).add_(value, alpha=0.1)


def softly(average: Any, net: Any) -> None:
    state, new = average.state_dict(), net.state_dict()
    for name in new:
        state[name] = new[name] * 0.1 + state[name] * 0.9
    average.load_state_dict(state)


UPDATES: dict[str, Update] = {
    "lerp": pairwise(lambda one, other: one.lerp_(other, 0.1)),
    "data": pairwise(lambda one, other: one.data.mul_(0.9).add_(other.data, alpha=0.1)),
    "expression": pairwise(lambda one, other: one.copy_(0.9 * one + 0.1 * other)),
    "difference": pairwise(lambda one, other: one.sub_(0.1 * (one - other))),
    "parts": pairwise(parts),
    "set data": pairwise(set_data),
    "set to a copy": pairwise(lambda one, other: setattr(one, "data", other.data.clone())),
    "state": by_state,
    "in one call": in_one_call,
    "kept state": kept_state,
    "loaded": lambda average, net: average.load_state_dict(net.state_dict()),
    "softly": softly,
}
BEGINNINGS: dict[str, Callable[[Any], nn.Module]] = {
    "a copy": copy.deepcopy,
    "a new one": lambda net: Net(),
}


def train(make: Any, update: Update, begin: Callable[[Any], Any], predicts_at: int) -> Any:
    torch.manual_seed(0)
    net = Net()
    model = make(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
    average = begin(net)
    averaged, found = make(average), []
    for step, batch in enumerate(BATCHES):
        found.append(model.train_step(*batch).clone())
        update(average, net)
        if step >= predicts_at:
            found.append(averaged.predict(batch[0]))
    return copy.deepcopy([found, model.state_dict(), averaged.state_dict()])


@pytest.mark.parametrize("begin", BEGINNINGS)
@pytest.mark.parametrize("update", UPDATES)
def test_an_average_may_be_kept_by_hand(update: str, begin: str) -> None:
    for predicts_at in (0, 2, len(BATCHES)):
        parts = UPDATES[update], BEGINNINGS[begin], predicts_at
        assert_as_alone(
            lambda parts=parts: train(PlainModel, *parts),
            lambda parts=parts: train(gs.Model, *parts),
        )


def test_weights_kept_in_a_list_may_be_put_back() -> None:
    def run(make: Any) -> Any:
        torch.manual_seed(0)
        net = Net()
        model = make(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
        found = [model.train_step(*BATCHES[0]).clone()]
        before = {name: value.clone() for name, value in net.state_dict().items()}
        found.append(model.train_step(*BATCHES[1]).clone())
        net.load_state_dict(before)
        return copy.deepcopy([*found, model.train_step(*BATCHES[2]).clone(), model.state_dict()])

    assert_as_alone(lambda: run(PlainModel), lambda: run(gs.Model))


def train_unlike(update: Callable[[int, Any, Any], object], num_workers: int = 2) -> None:
    def run(rank: int) -> None:
        net = Net()
        model = gs.Model(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05))
        average = copy.deepcopy(net)
        model.train_step(*BATCHES[0])
        with torch.no_grad():
            update(rank, average, net)
        gs.Model(average).predict(INPUTS[0])

    ThreadCluster(run, num_workers, is_recoverable=False).run()


def test_one_that_a_worker_updates_alone_is_named() -> None:
    with pytest.raises(OwnershipError, match=r"'second\.weight' was not written to equally often"):
        train_unlike(lambda rank, one, net: rank or one.second.weight.add_(net.second.weight))


def test_one_that_not_all_workers_update_is_named() -> None:
    with pytest.raises(OwnershipError, match="lives on worker 1, and not on worker 2"):
        train_unlike(
            lambda rank, one, net: rank == 2 or one.second.weight.add_(net.second.weight), 3
        )


def test_one_made_of_what_lives_on_two_workers_is_refused() -> None:
    def update(rank: int, one: Any, net: Any) -> None:
        one.second.bias.add_(net.first.bias[:2])
        one.second.bias.add_(net.second.bias)

    with pytest.raises(OwnershipError, match=r"workers 0 and 1 was written to 'second\.bias'"):
        train_unlike(update)


def test_what_shares_memory_with_an_unknown_tensor_is_refused() -> None:
    def update(rank: int, one: Any, net: Any) -> None:
        kept = torch.zeros(2)
        kept.detach().add_(net.second.bias)

    with pytest.raises(OwnershipError, match=r"'second\.bias' lives on worker 1.*add_"):
        train_unlike(update)


def test_the_memory_of_a_value_is_not_shared_with_an_average() -> None:
    with pytest.raises(OwnershipError, match=r"asked for by data.*\n.*p\.data\.copy_\(value\)"):
        train_unlike(lambda rank, one, net: setattr(one.second.bias, "data", net.second.bias.data))


def test_a_target_on_another_worker_is_not_set_to_values_that_are_not_there() -> None:
    class Follows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.online(x) * self.target(x)
            return made

    def run(rank: int) -> None:
        net: Any = Follows()
        net.online.place("MS_WORKER", 0)
        net.target.place("MS_WORKER", 1)
        model = gs.Model(net, F.mse_loss, torch.optim.SGD(net.online.parameters(), lr=0.05))
        for batch in BATCHES:
            model.train_step(*batch)
            set_data(net.target.weight, net.online.weight)

    with pytest.raises(OwnershipError, match=r"asked for by data.*\n.*place both alike"):
        ThreadCluster(run, 2, is_recoverable=False).run()


def test_where_lost_workers_come_back_it_is_refused_before_the_first_use() -> None:
    def run(rank: int) -> None:
        train(gs.Model, UPDATES["lerp"], copy.deepcopy, 0)

    with pytest.raises(OwnershipError, match="or predict, before"):
        ThreadCluster(run, 2, SnapshotSettings(1, 100)).run()


def test_a_file_stays_as_it_was_where_values_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    path.write_text("the former")

    def run(rank: int) -> None:
        net = Net()
        gs.Model(net, F.mse_loss, torch.optim.SGD(net.parameters(), lr=0.05)).train_step(
            *BATCHES[0]
        )
        torch.save({"net": net.state_dict()}, path)

    with pytest.raises(OwnershipError, match="asked for by save"):
        ThreadCluster(run, 2, is_recoverable=False).run()
    assert path.read_text() == "the former"
