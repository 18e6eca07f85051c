"""Steps are measured only while somebody asks, and plans can be lowered again without a trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from simulated.simulate import SimulatedCluster
from torch import nn

import graphsplit as gs
from graphsplit.batches.microbatches import Divider
from graphsplit.capture.graph import Mode
from graphsplit.errors import ConfigurationError
from graphsplit.planning import passes
from graphsplit.planning.task import Task
from graphsplit.profiling.recorder import StepRecorder
from graphsplit.schedule.costs import Costs
from graphsplit.schedule.named import gpipe, one_forward_one_backward

BATCH = ((torch.arange(24.0).reshape(8, 3) / 24, torch.arange(8) % 2), {})


class Net(nn.Module):
    """Two linear layers with dropout between them, on two workers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.tanh(self.first(x))))


def cluster_of(schedule: str = "1f1b", **options: Any) -> SimulatedCluster:
    def make_task() -> Task:
        net = Net()
        net.first.place("MS_WORKER", 0)
        net.second.place("MS_WORKER", 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        return Task(net, nn.CrossEntropyLoss(), optimizer, "affinity", False,
                    divider=Divider(4), schedule=schedule, **options)  # fmt: skip

    torch.manual_seed(0)
    return SimulatedCluster(make_task, 2)


def parameters_of(cluster: SimulatedCluster) -> dict[str, torch.Tensor]:
    names = [name for name, _ in cluster.workers[0].task.network.named_parameters()]
    return {
        name: cluster.owner_of(name).task.network.get_parameter(name).detach().clone()
        for name in names
    }


def assert_same(mine: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_a_runner_that_nobody_watches_runs_what_it_was_bound_to() -> None:
    cluster = cluster_of()
    cluster.train_step(BATCH)
    for worker in cluster.workers:
        planned = worker.planner.latest(Mode.TRAIN)
        assert planned is not None
        runner = planned.runner
        bound = list(runner._bound)
        assert runner._actions is runner._bound
        runner.watch(lambda position, action: lambda state: action(state))
        assert all(a is not b for a, b in zip(runner._actions, bound, strict=True))
        runner.watch(None)
        assert runner._actions is runner._bound
        assert all(a is b for a, b in zip(runner._actions, bound, strict=True))


def test_recorders_count_bytes_first_and_then_time_and_change_no_bit() -> None:
    plain, watched = cluster_of(), cluster_of()
    for cluster in (plain, watched):
        cluster.train_step(BATCH)
    recorders = []
    for worker in watched.workers:
        planned = worker.planner.latest(Mode.TRAIN)
        assert planned is not None
        recorders.append(StepRecorder(planned.runner, num_runs=2))
    for step in range(1, 6):
        plain.train_step(BATCH)
        for recorder in recorders:
            recorder.begin(step)
        watched.train_step(BATCH)
        for recorder in recorders:
            recorder.end()
    assert_same(parameters_of(watched), parameters_of(plain))
    for recorder, worker in zip(recorders, watched.workers, strict=True):
        planned = worker.planner.latest(Mode.TRAIN)
        assert planned is not None
        assert [run.step for run in recorder.runs] == [2, 3]
        assert recorder.runs[0].before_ns > 0
        assert all(size > 0 for size in recorder.activations.values()) and recorder.activations
        for run in recorder.runs:
            assert len(run.ends_ns) == len(planned.runner.instructions)
            assert sorted(run.ends_ns) == list(run.ends_ns)
            assert sorted(run.ends_cpu_ns) == list(run.ends_cpu_ns)
        assert planned.runner._actions is planned.runner._bound  # it has stopped by itself


def lowered_by(plan: Any, number: int, costs: Costs | None = None) -> Any:
    return (one_forward_one_backward if costs is None else gpipe)(plan, number)


def test_a_plan_is_lowered_again_with_costs_and_the_bits_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(passes, "policy_of", lambda schedule, number: lowered_by)
    plain, measured = cluster_of(), cluster_of("auto")
    for step in range(5):
        plain.train_step(BATCH)
        measured.train_step(BATCH)
        planned = [worker.planner.latest(Mode.TRAIN) for worker in measured.workers]
        assert all(p is not None and p.wants_costs == (step < 3) for p in planned)
        if step == 2:
            for worker, found in zip(measured.workers, planned, strict=True):
                assert found is not None
                worker.planner.use_costs(found, Costs({}, {}, {}))
                assert worker.planner.lowers_again
    first, second = plain.latest(Mode.TRAIN), measured.latest(Mode.TRAIN)
    assert first is not None and second is not None
    assert first.programs != second.programs
    assert second.runner.plan_number == first.runner.plan_number + 1
    assert not measured.workers[0].planner.lowers_again
    channels = measured._shared.fabric.channels
    assert {plan for plan, _ in channels if plan >= 0} == {0, 1}
    assert_same(parameters_of(measured), parameters_of(plain))


def test_costs_that_change_nothing_leave_the_channels_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always = lambda plan, number, costs=None: gpipe(plan, number)  # noqa: E731
    monkeypatch.setattr(passes, "policy_of", lambda schedule, number: always)
    cluster = cluster_of("auto")
    cluster.train_step(BATCH)
    before = cluster.latest(Mode.TRAIN)
    for worker in cluster.workers:
        planned = worker.planner.latest(Mode.TRAIN)
        assert planned is not None
        worker.planner.use_costs(planned, Costs({}, {}, {}))
    cluster.train_step(BATCH)
    after = cluster.latest(Mode.TRAIN)
    assert before is not None and after is not None
    assert after.runner is before.runner
    assert not after.wants_costs


def test_only_auto_with_several_microbatches_asks_for_costs() -> None:
    for schedule in ("1f1b", "gpipe"):
        cluster = cluster_of(schedule)
        cluster.train_step(BATCH)
        planned = cluster.latest(Mode.TRAIN)
        assert planned is not None and not planned.wants_costs


def test_one_process_has_nothing_to_profile() -> None:
    net = nn.Linear(2, 2)
    model = gs.Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match=r"this is one process\n  Fix: .*torch.profiler"):
        model.profile()
