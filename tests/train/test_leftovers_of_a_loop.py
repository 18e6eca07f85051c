"""What is left of a script's old loop, around a Model: an error with the fix, not a second step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn

import graphsplit as gs
from graphsplit.errors import JobFailedError, OwnershipError

assert threads_as_workers
STEPS = ("train_step", "forward_backward")
X, Y = torch.arange(8.0).reshape(2, 4), torch.tensor([0, 1])


def model_and_optimizer() -> tuple[gs.Model, torch.optim.Optimizer, nn.Module]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net[0].place("MS_WORKER", 0)
    net[1].place("MS_WORKER", 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return gs.Model(net, nn.CrossEntropyLoss(), optimizer), optimizer, net


def step_twice(method: str) -> None:
    model, optimizer, _ = model_and_optimizer()
    getattr(model, method)(X, Y)
    optimizer.step()


def train_with_a_schedule() -> list[float]:
    model, optimizer, _ = model_and_optimizer()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    for _ in range(3):
        losses.append(float(model.train_step(X, Y)))
        schedule.step()
    return losses


@pytest.mark.parametrize("method", STEPS)
def test_a_step_by_the_script_is_an_error_in_one_process(method: str) -> None:
    with pytest.raises(OwnershipError, match=r"SGD.step\(\) was called(.|\n)*Fix.*model.step\(\)"):
        step_twice(method)


@pytest.mark.parametrize("method", STEPS)
@pytest.mark.usefixtures("threads_as_workers")
def test_a_step_by_the_script_is_an_error_on_workers(method: str) -> None:
    with pytest.raises(
        (JobFailedError, OwnershipError), match=r"SGD.step\(\) was called by the script"
    ):
        ThreadCluster(lambda _: step_twice(method), 2).run()


@pytest.mark.parametrize("method", STEPS)
@pytest.mark.usefixtures("threads_as_workers")
def test_backward_of_what_a_step_returned_is_an_error(tmp_path: Path, method: str) -> None:
    def script() -> torch.Tensor:
        loss = getattr(model_and_optimizer()[0], method)(X, Y)
        with pytest.raises(OwnershipError, match=r"backward\(\) was called on a loss(.|\n)*Fix"):
            loss.backward()
        return loss

    alone = script()
    for loss in (*ThreadCluster(lambda _: script(), 2).run(), copy.deepcopy(alone)):
        assert torch.equal(loss, alone)
    torch.save({"loss": alone}, tmp_path / "loss.pt")
    assert torch.equal(torch.load(tmp_path / "loss.pt")["loss"], alone)
    own = alone.clone().requires_grad_()
    (own * 2).backward()
    assert own.grad == 2


@pytest.mark.usefixtures("threads_as_workers")
def test_schedules_of_learning_rates_step_as_ever() -> None:
    assert (
        ThreadCluster(lambda _: train_with_a_schedule(), 2).run() == [train_with_a_schedule()] * 2
    )


@pytest.mark.parametrize("method", STEPS)
def test_an_own_loop_goes_on_in_one_process(method: str) -> None:
    model, optimizer, net = model_and_optimizer()
    getattr(model, method)(X, Y)
    before = net[0].weight.detach().clone()
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(X), Y).backward()
    optimizer.step()

    assert not torch.equal(net[0].weight, before)


def states() -> Any:
    model, optimizer, _ = model_and_optimizer()
    model.train_step(X, Y)
    refused = None
    try:
        optimizer.state_dict()
    except OwnershipError as error:
        refused = str(error)
    return refused, model.optimizer_state_dict()


@pytest.mark.usefixtures("threads_as_workers")
def test_one_workers_part_of_a_state_is_not_given_for_all_of_it() -> None:
    alone, whole = states()

    assert alone is None
    for refused, state in ThreadCluster(lambda _: states(), 2).run():
        assert "Fix: call model.optimizer_state_dict() on every worker" in refused
        assert state == whole


class OwnParameter(nn.Parameter):
    """A class of the script's own."""


@pytest.mark.usefixtures("threads_as_workers")
def test_the_entry_of_a_parameter_on_another_worker_names_that_worker() -> None:
    def script(rank: int) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        for number, layer in enumerate(net):
            layer.place("MS_WORKER", number)
            layer.weight = OwnParameter(layer.weight.detach())
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        model = gs.Model(net, nn.CrossEntropyLoss(), optimizer)
        held = optimizer.state
        for step in range(1, 3):
            model.train_step(X, Y)
            mine, other = net[rank].weight, net[1 - rank].weight
            assert held is optimizer.state or step > 1
            assert optimizer.state[mine]["step"] == step
            message = rf"'{1 - rank}.weight' lives on worker {1 - rank}(.|\n)*optimizer_state_dict"
            with pytest.raises(OwnershipError, match=message):
                optimizer.state[other]["step"]
            assert all(isinstance(layer.weight, OwnParameter) for layer in net)
            model.load_optimizer_state_dict(model.optimizer_state_dict())

    ThreadCluster(script, 2, is_recoverable=False).run()
