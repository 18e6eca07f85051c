"""Switches of PyTorch's own give the same graph other bits; other threads are no part of a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from simulated.simulate import SimulatedCluster
from torch import nn
from torch.overrides import TorchFunctionMode

from graphsplit.errors import ConfigurationError, PlanMismatchError
from graphsplit.planning.task import Task

SWITCHES: dict[str, tuple[Callable[[], object], str]] = {
    "precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        "switch float32_matmul_precision is 'medium' on worker 1, 'highest' on worker 0",
    ),
    "determinism": (
        lambda: torch.use_deterministic_algorithms(True),
        r"are_deterministic_algorithms_enabled\(\) is True on worker 1, False on worker 0",
    ),
    "cudnn": (
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        "switch cudnn_benchmark is True on worker 1, False on worker 0",
    ),
}


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """Leave everything as it was."""
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_default_device(None)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark


def _task() -> Task:
    net: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    net[0].place("MS_WORKER", 0)
    net[1].place("MS_WORKER", 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    return Task(net, rows_against_target, optimizer, unplaced="affinity", with_loss=True)


@pytest.mark.parametrize("name", SWITCHES)
def test_a_worker_that_alone_switches_is_named(name: str) -> None:
    switch, told = SWITCHES[name]
    cluster, arguments = SimulatedCluster(_task, 2), (batches_of(8, 3)[0], {})
    cluster.train_step(arguments)

    def step(worker: Any) -> None:
        if worker.rank == 1:  # worker 0 waits for it by then
            switch()
        worker.engine.train_step(worker.task.divider.divide_arguments(arguments))

    with pytest.raises(PlanMismatchError, match=told):
        cluster.run(step)


def test_a_worker_that_has_switched_before_the_first_step_is_named() -> None:
    cluster, arguments = SimulatedCluster(_task, 2), (batches_of(8, 3)[0], {})

    def step(worker: Any) -> None:
        if worker.rank == 1:
            SWITCHES["precision"][0]()
        worker.engine.train_step(worker.task.divider.divide_arguments(arguments))

    with pytest.raises(PlanMismatchError, match="float32_matmul_precision medium"):
        cluster.run(step)


def test_all_workers_may_switch_between_steps() -> None:
    assert_same_bits(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)),
        batches_of(8, 3, num=4),
        num_workers=2,
        loss_fn=rows_against_target,
        before_step=lambda step, net, loss: torch.set_float32_matmul_precision(
            "medium" if step % 2 else "highest"
        ),
        plan_everywhere=True,
    )


class _Halving(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 0.5 if func is torch.relu else made


def test_a_function_mode_around_a_step_is_refused_before_it_and_later() -> None:
    cluster, arguments = SimulatedCluster(_task, 2), (batches_of(8, 3)[0], {})
    cluster.train_step(arguments)

    def step(worker: Any) -> None:
        with _Halving():
            worker.engine.train_step(worker.task.divider.divide_arguments(arguments))

    for found in (cluster, SimulatedCluster(_task, 2)):
        with pytest.raises(ConfigurationError, match="_Halving, a TorchFunctionMode, is on around"):
            found.run(step)


class _InForward(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with _Halving():
            made: torch.Tensor = super().forward(torch.relu(x))
        return made


class _ByDevice(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = super().forward(x)
        return made * (2 if torch.get_default_device().index == 0 else 3)


def test_a_function_mode_in_forward_is_that_of_the_plain_loop() -> None:
    assert_same_bits(
        lambda: _InForward(nn.Linear(3, 4), nn.Linear(4, 4)),
        batches_of(8, 3),
        num_workers=2,
        loss_fn=rows_against_target,
    )


def test_a_default_device_is_watched() -> None:
    def task() -> Task:
        torch.manual_seed(0)
        net = _ByDevice(nn.Linear(3, 4), nn.Linear(4, 4))
        return Task(net, rows_against_target, None, unplaced="affinity", with_loss=True)

    cluster, (inputs, _) = SimulatedCluster(task, 2), batches_of(8, 3)[0]
    net: Any = task().network
    for device in ("cpu", "cpu:0", "cpu"):

        def step(worker: Any, device: str = device) -> torch.Tensor:
            with torch.device(device):
                found: torch.Tensor = worker.engine.predict(((inputs,), {}))
            return found

        with torch.device(device), torch.no_grad():
            expected = net(inputs)
        assert all(torch.equal(found, expected) for found in cluster.run(step))


def _twice(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return outputs * 2


def test_hooks_on_all_modules_are_watched_as_they_come_and_go() -> None:
    cluster, (inputs, _) = SimulatedCluster(_task, 2), batches_of(8, 3)[0]
    net: Any = _task().network
    for is_hooked in (False, True, False):
        # The threads of the simulator share it: it stands as long as all of them step.
        hook = nn.modules.module.register_module_forward_hook(_twice) if is_hooked else None
        try:
            with torch.no_grad():
                expected = net(inputs)
            found = cluster.run(lambda worker: worker.engine.predict(((inputs,), {})))
        finally:
            if hook is not None:
                hook.remove()
        assert all(torch.equal(one, expected) for one in found)


class _Shared:
    def __init__(self) -> None:
        self.rate, self.of_another_thread = 0.5, 1


class _Reading(nn.Module):
    """Another thread reads an attribute while forward runs, as one that sends a snapshot does."""

    def __init__(self, shared: _Shared) -> None:
        super().__init__()
        self.inner, self.shared = nn.Linear(3, 4), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x) * self.shared.rate
        _look(self.shared)
        return made


def _look(shared: _Shared) -> None:
    thread = threading.Thread(target=lambda: shared.of_another_thread)
    thread.start()
    thread.join()


def test_what_another_thread_reads_meanwhile_is_no_part_of_the_step() -> None:
    net = _Reading(_Shared())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    task = Task(net, rows_against_target, optimizer, unplaced="affinity", with_loss=True)
    cluster = SimulatedCluster(lambda: task, 1)
    cluster.train_step((batches_of(8, 3)[0], {}))
    (recording,) = cluster.workers[0].planner.recordings
    labels = [watched.place.label for watched in recording.graph.state.guards.watched]
    assert any("shared.rate" in label for label in labels)
    assert not any("of_another_thread" in label for label in labels)
