"""Hooks on parameters of several workers: each runs on its own worker, with Python of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from alone_helpers import assert_as_alone
from plain_model import PlainModel
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn
from torch.nn.utils import parametrize

import graphsplit as gs
from graphsplit.errors import OwnershipError
from graphsplit.optimizers.parameter_hooks import KeptValues, hooks_leave, state_of_hooks

assert threads_as_workers
X, Y = torch.arange(8.0).reshape(2, 4), torch.tensor([0, 1])

Register = Callable[[nn.Module, list[str]], None]
Write = Callable[[torch.Tensor], object]


def notes(net: nn.Module, log: list[str]) -> None:
    for name, parameter in net.named_parameters():
        parameter.register_hook(lambda gradient, name=name: log.append(name))


def scales_by_a_count(net: nn.Module, log: list[str]) -> None:
    def scale(gradient: torch.Tensor) -> torch.Tensor:
        log.append("")
        return gradient * len(log)

    for parameter in net.parameters():
        parameter.register_hook(scale)


def notes_afterwards(net: nn.Module, log: list[str]) -> None:
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: log.append(""))


def doubles(net: nn.Module, log: list[str]) -> None:
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: gradient * 2 + len(log))


def notes_on_one_worker(net: nn.Module, log: list[str]) -> None:
    notes(net[2], log)


def apart(net: nn.Sequential) -> None:
    net[0].place("MS_WORKER", 0)
    net[2].place("MS_WORKER", 1)


def replicas(net: nn.Sequential) -> None:
    net.place("MS_WORKER", [0, 1])


def train(
    register: Register,
    place: Callable[[nn.Sequential], None] = apart,
    microbatches: int = 1,
    at: int = 0,
) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    place(net)
    if at == 0:
        register(net, [])
    model = gs.Model(
        *(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1)),
        microbatches=microbatches,
    )
    losses = []
    for step in range(3):
        if 0 < step == at:
            register(net, [])
        losses.append(float(model.train_step(X, Y)))
    return losses


def plain(register: Register, microbatches: int = 1) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    register(net, [])
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in zip(X.chunk(microbatches), Y.chunk(microbatches), strict=True):
            loss = nn.functional.cross_entropy(net(x), y) * (1 / microbatches)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        losses.append(total.item())
    return losses


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("register", [notes, scales_by_a_count, notes_afterwards])
def test_state_that_hooks_of_several_workers_change_is_refused(register: Register, at: int) -> None:
    """Whether they were registered before the first step or after it."""
    with pytest.raises(OwnershipError, match=r"hook on a parameter .*hooks_of_parameters.*changes"):
        ThreadCluster(lambda _: train(register, at=at), 2).run()


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.parametrize("register", [doubles, notes_on_one_worker])
def test_other_hooks_have_the_bits_of_a_plain_loop(register: Register) -> None:
    assert ThreadCluster(lambda _: train(register), 2).run() == [plain(register)] * 2


def computes_with_anothers(net: nn.Module, log: list[str]) -> None:
    net[2].weight.register_hook(lambda gradient: gradient * net[0].weight.mean())


def adds_anothers(net: nn.Module, log: list[str]) -> None:
    net[2].weight.register_hook(lambda gradient: gradient.clone().add_(net[0].weight.detach()[:2]))


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.parametrize("register", [computes_with_anothers, adds_anothers])
def test_a_hook_that_needs_a_value_of_another_worker_is_refused(register: Register) -> None:
    """One worker alone runs it, so nobody has what it asks for."""
    with pytest.raises(OwnershipError, match=r"0\.weight.* lives on worker 0, not here"):
        ThreadCluster(lambda _: train(register), 2).run()


def draws(net: nn.Module, log: list[str]) -> None:
    net[0].weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))


def draws_by_numpy(net: nn.Module, log: list[str]) -> None:
    def scale(parameter: torch.Tensor) -> None:
        parameter.grad *= np.random.rand()

    net[2].bias.register_post_accumulate_grad_hook(scale)


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.parametrize("place", [apart, replicas])
@pytest.mark.parametrize("register", [draws, draws_by_numpy])
def test_a_hook_that_draws_is_refused(
    register: Register, place: Callable[[nn.Sequential], None]
) -> None:
    with pytest.raises(OwnershipError, match=r"hook on a parameter .*hooks_of_param.*draws random"):
        ThreadCluster(lambda _: train(register, place, 2), 2, is_recoverable=False).run()


class Counted(nn.Module):
    """Scales by how often a hook on its last weight has run; a part kept whole does, or forward."""

    def __init__(self, is_whole: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.log: list[str] = []
        self.scale = gs.opaque(self._scaled) if is_whole else self._scaled
        self.last.weight.register_hook(lambda gradient: self.log.append(""))

    def _scaled(self, values: torch.Tensor) -> torch.Tensor:
        return values * (1 + len(self.log))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.first(values)
        with gs.place("MS_WORKER", 0):
            hidden = self.scale(hidden)
        made: torch.Tensor = self.last(hidden)
        return made


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.parametrize(("is_whole", "microbatches"), [(True, 1), (True, 2), (False, 2)])
def test_what_a_hook_changes_is_not_read_where_its_count_is_not(
    is_whole: bool, microbatches: int
) -> None:
    """On another worker there is no count; of two microbatches the second has been computed."""

    def script(is_placed: bool) -> None:
        torch.manual_seed(0)
        net = Counted(is_whole)
        if is_placed:
            net.first.place("MS_WORKER", 0)
            net.last.place("MS_WORKER", 1 if microbatches == 1 else 0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = gs.Model(net, nn.functional.cross_entropy, optimizer, microbatches=microbatches)
        model.train_step(X, Y)

    script(is_placed=False)
    with pytest.raises(OwnershipError, match=r"hook on a parameter .*changes .*log"):
        ThreadCluster(lambda rank: script(is_placed=True), 2, is_recoverable=False).run()


def test_only_what_is_shared_is_watched() -> None:
    net, log, own = nn.Linear(1, 1), [0], [0]
    net.weight.register_hook(lambda gradient: log.append(1) or own.append(1))
    net.bias.register_hook(lambda gradient: log.append(1))
    tensors = dict(net.named_parameters())

    held = state_of_hooks(tensors, {"weight": 0, "bias": 1}, 0)

    with hooks_leave(held):
        own.append(2)
    with pytest.raises(OwnershipError, match="changes log"), hooks_leave(held):
        log.append(2)
    (generator,) = state_of_hooks(tensors, {"weight": 0, "bias": 0}, 0)
    assert generator[0].is_generator


def clamps(net: nn.Module, log: list[str]) -> None:
    net[0].weight.register_post_accumulate_grad_hook(lambda p: (p.data.clamp_(-0.1, 0.1), None)[1])


def clamps_another(net: nn.Module, log: list[str]) -> None:
    weight = net[0].weight
    net[0].bias.register_hook(lambda gradient: (weight.data.clamp_(-0.1, 0.1), None)[1])


def clamps_at_last(net: nn.Module, log: list[str]) -> None:
    def clamp(parameter: torch.Tensor) -> None:
        log.append("")
        if len(log) % 2 == 0:
            parameter.data.clamp_(-0.1, 0.1)

    net[0].weight.register_post_accumulate_grad_hook(clamp)


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.parametrize(
    ("register", "place"), [(clamps, apart), (clamps, replicas), (clamps_another, apart)]
)
def test_a_hook_that_writes_where_later_microbatches_have_run_is_refused(
    register: Register, place: Callable[[nn.Sequential], None]
) -> None:
    with pytest.raises(
        OwnershipError, match=r"hooks_of_parameters.*'0.weight' after(.|\n)*microbatches=1"
    ):
        ThreadCluster(lambda _: train(register, place, 2), 2, is_recoverable=False).run()


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.parametrize("place", [apart, replicas])
def test_a_hook_may_write_after_the_last_microbatch(
    place: Callable[[nn.Sequential], None],
) -> None:
    cluster = ThreadCluster(lambda _: train(clamps_at_last, place, 2), 2, is_recoverable=False)
    assert cluster.run() == [plain(clamps_at_last, 2)] * 2


def test_a_hook_may_write_where_one_worker_runs_microbatches_in_turn() -> None:
    assert train(clamps, microbatches=2) == plain(clamps, 2)


def test_a_hook_that_writes_once_a_step_has_the_bits_of_a_plain_loop() -> None:
    assert train(clamps) == plain(clamps)


def test_nan_that_a_hook_leaves_is_not_taken_for_a_write() -> None:
    value = torch.tensor([float("nan"), 1.0])
    parameter = nn.Parameter(value)
    parameter.register_hook(lambda gradient: None)
    with KeptValues({"w": parameter}).left_by([parameter]):
        pass


@pytest.mark.parametrize(
    ("value", "write"),
    [
        (0.0, lambda p: p.neg_()),  # -0.0 == 0.0
        (1.0, lambda p: p.mul_(float("nan"))),
    ],
)
def test_a_write_that_changes_bits_alone_is_noticed(value: float, write: Write) -> None:
    parameter = nn.Parameter(torch.full((3,), value))
    parameter.register_hook(lambda gradient: None)
    told, kept = "writes to 'w' after a microbatch", KeptValues({"w": parameter})
    with pytest.raises(OwnershipError, match=told), kept.left_by([parameter]), torch.no_grad():
        write(parameter)


def test_a_hook_on_what_a_parametrization_makes_may_be_set_on_all_workers() -> None:
    """It is for that one reading, through which no backward goes."""

    def losses(make: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        for layer in (net[0], net[2]):
            parametrize.register_parametrization(layer, "weight", nn.Tanh())
        apart(net)
        model = make(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
        found = []
        for _ in range(3):
            found.append(model.train_step(X, Y).clone())
            handles = [net[i].weight.register_hook(lambda gradient: gradient * 2) for i in (0, 2)]
            handles[0].remove()
        return found

    assert_as_alone(lambda: losses(PlainModel), lambda: losses(gs.Model))
