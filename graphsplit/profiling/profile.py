"""Measure training steps, and predict them: where the time of a step goes.

A profile needs steps that are trained anyway. Of each plan the first run is left alone, in the
second one bytes are counted, and the following ones are timed::

    run 0   as it is      first use of memory and channels
    run 1   counted       what segments save for backward
    run 2.. timed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from graphsplit.encoding import records
from graphsplit.errors import ConfigurationError
from graphsplit.job.group import WorkerGroup
from graphsplit.job.job import Job
from graphsplit.partition.plan import PartitionPlan
from graphsplit.planning.ready_plan import ReadyPlan
from graphsplit.profiling import pings
from graphsplit.profiling.estimate import MIN_RUNS, estimate
from graphsplit.profiling.measurements import (
    Estimate,
    Measurements,
    read_estimate,
    read_measurements,
)
from graphsplit.profiling.recorder import StepRecorder
from graphsplit.profiling.trial_run import bounding_line, compute_lines
from graphsplit.program.lower import WHOLE_STEP, StepPart, WorkerProgram
from graphsplit.runtime.runner import ProgramRunner
from graphsplit.schedule.costs import Costs
from graphsplit.schedule.simulation.simulate import simulate
from graphsplit.viz.report import StepReport, describe_report, seconds_in_words, write_report

# Steps that are simulated one after the other, until they repeat.
_STEPS = 3
_NUM_RUNS = 10  # timed for each plan, at the most
_ENOUGH = 4  # for a schedule that waits for costs


@dataclass(frozen=True, kw_only=True)
class Profile(StepReport):
    """Where the time of a training step goes, measured and predicted; equal on all workers.

    Attributes:
        costs: What computing and moving costs, measured; ``predicted`` follows from them.
        programs: All workers' programs.
        part: Which part of a step the plan runs: all of it, unless the microbatches of a batch are
            not alike and run one after the other.
    """

    costs: Costs
    programs: tuple[WorkerProgram, ...]
    part: StepPart = WHOLE_STEP

    def __str__(self) -> str:
        return describe_report(self)

    def step_times(self) -> list[str]:
        """Predicted and measured step time, and the worker that bounds it, in words."""
        return [
            f"predicted {seconds_in_words(self.predicted.step_s)}, measured "
            f"{seconds_in_words(self.measured.step_s)}; costs {self.source}",
            bounding_line(self.measured),
        ]

    def compute(self) -> list[str]:
        """Each worker's computing in a step, as a table."""
        return compute_lines(self.plan, self.costs, self.part.num_microbatches)

    def save(self, folder: str | Path) -> None:
        """Write ``trace.json``, ``timeline.svg``, ``summary.txt`` and ``summary.json``.

        Args:
            folder: Made if it is not there.
        """
        write_report(self, Path(folder))


class Profiler:
    """Measures the runs of an engine's plans.

    Args:
        job: The job.
        group: Gives what exchanges texts between the workers that are there now.

    Attributes:
        is_on: Whether every plan is measured; plans that ask for it are in any case.
        latest: What was found last.
    """

    def __init__(self, job: Job, group: Callable[[], WorkerGroup]) -> None:
        self.is_on = False
        self.latest: Profile | None = None
        self._found: Profile | None = None  # since it was turned on
        self._job = job
        self._group = group
        self._recorders: dict[ProgramRunner, tuple[ReadyPlan, StepRecorder]] = {}

    def turn_on(self) -> None:
        """Measure every plan from now on."""
        self.is_on = True
        self._found = None

    def begin(self, planned: ReadyPlan, step: int) -> None:
        """A plan runs next."""
        known = self._recorders.get(planned.runner)
        if known is not None:
            known[1].begin(step)

    def end(self, planned: ReadyPlan) -> None:
        """It has run."""
        known = self._recorders.get(planned.runner)
        if known is None:
            self._recorders[planned.runner] = (planned, StepRecorder(planned.runner, _NUM_RUNS))
        else:
            known[1].end()

    def has_enough(self, planned: ReadyPlan) -> bool:
        """Whether a plan's costs are known well enough to choose a schedule."""
        return self.num_timed(planned) >= _ENOUGH

    def has_all(self, planned: ReadyPlan) -> bool:
        """Whether as many of a plan's runs were timed as ever are."""
        return self.num_timed(planned) >= _NUM_RUNS

    def num_timed(self, planned: ReadyPlan) -> int:
        """How many runs of a plan were timed."""
        known = self._recorders.get(planned.runner)
        return 0 if known is None else len(known[1].runs)

    def forget(self, planned: ReadyPlan | None = None) -> None:
        """Measure a plan no longer, or none at all, and drop what was measured."""
        for runner in list(self._recorders) if planned is None else [planned.runner]:
            known = self._recorders.pop(runner, None)
            if known is not None:
                known[1].stop()

    def most_timed(self) -> ReadyPlan | None:
        """The plan with the most timed runs, the latest of those; None if there is none."""
        found = [planned for planned, _ in self._recorders.values()]
        return max(reversed(found), key=self.num_timed, default=None)

    def measured(self) -> Profile:
        """Of the plan with the most timed runs, or, if it has too few, what a schedule asked for.

        Collective. A plan that waited for its costs is not measured any more once it has them.

        Raises:
            ConfigurationError: Too few steps were measured; on every worker.
            FrameError: A worker sent what is no measurement.
        """
        most = self.most_timed()
        if self._found is not None and (most is None or self.num_timed(most) < MIN_RUNS):
            return self._found
        return self.collect(most)

    def collect(self, planned: ReadyPlan | None) -> Profile:
        """Exchange what all workers measured of a plan. Collective.

        Raises:
            ConfigurationError: Too few steps were measured; on every worker.
            FrameError: A worker sent what is no measurement.
        """
        if planned is None:
            raise ConfigurationError(
                "no training step was run, so nothing was measured\n"
                "  Fix: train ten or more steps with batches of one size."
            )
        _, recorder = self._recorders[planned.runner]
        recorder.stop()
        group = self._group()
        texts = group.gather(records.to_text(self._mine(planned, recorder)))
        problem = answer = ""
        if group.rank == 0:
            try:
                answer = _estimated(planned, texts)
            except ConfigurationError as error:
                problem = str(error)
        problem = group.share(problem)
        if problem:
            raise ConfigurationError(problem)
        found = read_estimate(group.share(answer), planned.programs)
        plan, programs, costs = planned.plan, planned.programs, found.costs
        self.latest = self._found = Profile(
            plan,
            simulate(plan, programs, costs, num_steps=_STEPS, leader=planned.consumers[0]),
            found.timeline,
            found.resident_bytes,
            costs.source,
            _about_part(planned.part),
            costs=costs,
            programs=programs,
            part=planned.part,
        )
        return self.latest

    def _mine(self, planned: ReadyPlan, recorder: StepRecorder) -> Measurements:
        control = self._job.control
        clock, (cores, num_cores) = pings.clock_name(), pings.usable_cores()
        return Measurements(
            worker=self._job.rank,
            clock=clock,
            host=f"{clock}.{cores}",
            cores=num_cores,
            num_threads=torch.get_num_threads(),
            offset_ns=pings.measure_offset(control),
            runs=tuple(recorder.runs),
            activations=recorder.activations,
            pings=pings.measure_links(control, _pairs(planned.plan)),
            resident_bytes=pings.most_resident_bytes(),
        )


def _about_part(part: StepPart) -> str:
    """Which part of a step is told, in words; empty where it is all of it."""
    if part.first and part.last:
        return ""
    return (
        f"only {part.num_microbatches} of a step's microbatches are shown, as they run by "
        "themselves. The others are of another size (the number of microbatches does not divide "
        "the batch) or run other operations. What they take, waiting included, stands as 'between "
        "steps', so busy and idle are not those of the whole step."
    )


def _pairs(plan: PartitionPlan) -> Iterable[tuple[int, int]]:
    return dict.fromkeys((edge.source, edge.destination) for edge in plan.edges)


def _estimated(planned: ReadyPlan, texts: list[str]) -> str:
    """On worker 0: costs and the measured timeline for all, as text."""
    measured = [
        read_measurements(
            text, worker=worker, num_instructions=len(planned.programs[worker].instructions)
        )
        for worker, text in enumerate(texts)
    ]
    costs, timeline = estimate(
        planned.plan, planned.programs, measured, leader=planned.consumers[0]
    )
    resident_bytes = tuple(found.resident_bytes for found in measured)
    return records.to_text(Estimate(costs, timeline, resident_bytes))


class Profiling:
    """Measures the training steps inside a ``with`` block; see ``Model.profile``.

    Attributes:
        result: The profile, once the block has ended.
    """

    def __init__(self, profiler: Profiler) -> None:
        self._profiler = profiler
        self._result: Profile | None = None

    @property
    def result(self) -> Profile:
        """The measurements.

        Raises:
            ConfigurationError: The block has not ended.
        """
        if self._result is None:
            raise ConfigurationError(
                "nothing is measured yet\n  Fix: look at .result after the end of the with block."
            )
        return self._result

    def __enter__(self) -> Profiling:
        if self._profiler.is_on:
            raise ConfigurationError(
                "steps are being measured already\n  Fix: leave out GS_TRACE, or end the other "
                "'with model.profile()' first."
            )
        self._profiler.turn_on()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._profiler.is_on = False
        try:
            if kind is None:
                self._result = self._profiler.measured()
        finally:
            self._profiler.forget()
