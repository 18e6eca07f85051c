"""When a trace is written: once enough steps are measured, or at the end of the job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from graphsplit.errors import ConfigurationError
from graphsplit.profiling.trace import Trace


class Job:
    """A job that was asked for a trace."""

    def __init__(self, folder: str) -> None:
        self.rank, self.generation = 0, 1
        self.at_end: list[Any] = []
        self._folder = folder

    def take_trace_folder(self) -> str:
        folder, self._folder = self._folder, ""
        return folder


class Profiler:
    """A profiler that has measured some steps."""

    def __init__(self, *, has_all: bool, problem: str = "") -> None:
        self.is_on = False
        self.saved: list[str] = []
        self._has_all, self._problem = has_all, problem

    def turn_on(self) -> None:
        self.is_on = True

    def most_timed(self) -> Any:
        return SimpleNamespace(wants_costs=False)

    def has_all(self, planned: Any) -> bool:
        return self._has_all

    def forget(self) -> None:
        pass

    def measured(self) -> Any:
        if self._problem:
            raise ConfigurationError(self._problem)
        costs = SimpleNamespace(source="measured over 10 steps")
        return SimpleNamespace(save=self.saved.append, costs=costs)


def step_of(*, wants_costs: bool) -> Any:
    return SimpleNamespace(plans=(SimpleNamespace(wants_costs=wants_costs),))


def trace_of(job: Job, profiler: Profiler) -> Trace:
    return Trace(cast(Any, job), cast(Any, profiler))


def test_the_first_model_of_a_job_is_traced_and_only_once() -> None:
    job, profiler, other = Job("found"), Profiler(has_all=True), Profiler(has_all=True)
    trace, second = trace_of(job, profiler), trace_of(job, other)
    assert profiler.is_on and not other.is_on
    for _ in range(3):
        trace.after_step(step_of(wants_costs=False))
        second.after_step(step_of(wants_costs=False))
    assert profiler.saved == ["found"] and not other.saved
    assert not profiler.is_on
    for action in job.at_end:
        action()
    assert profiler.saved == ["found"]


def test_nothing_is_written_while_a_plan_still_waits_for_its_costs() -> None:
    profiler = Profiler(has_all=True)
    trace_of(Job("found"), profiler).after_step(step_of(wants_costs=True))
    assert not profiler.saved


def test_at_the_end_of_a_short_job_what_was_measured_is_written() -> None:
    job, profiler = Job("found"), Profiler(has_all=False)
    trace_of(job, profiler).after_step(step_of(wants_costs=False))
    assert not profiler.saved
    (at_end,) = job.at_end
    at_end()
    assert profiler.saved == ["found"]


def test_too_few_steps_are_told_and_do_not_fail_the_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "graphsplit")
    job = Job("found")
    trace_of(job, Profiler(has_all=False, problem="1 training step(s) were measured"))
    (at_end,) = job.at_end
    at_end()
    assert "no trace was written: 1 training step(s) were measured" in caplog.text
