"""Measure the first training steps of a job, and write where their time goes: ``GS_TRACE``."""

from __future__ import annotations

from graphsplit.errors import ConfigurationError
from graphsplit.job.job import Job
from graphsplit.logs import say
from graphsplit.planning.step_plan import PlannedStep
from graphsplit.profiling.profile import Profiler


class Trace:
    """Writes one profile into a folder, once enough steps are measured, or at the end of the job.

    Args:
        job: The job; worker 0 writes.
        profiler: Measures the engine's steps.

    Attributes:
        is_due: Whether a trace was asked for, and is not written yet.
    """

    def __init__(self, job: Job, profiler: Profiler) -> None:
        self._job = job
        self._profiler = profiler
        self._folder = job.take_trace_folder()
        self.is_due = bool(self._folder) and job.generation == 1  # else others may have written it
        if self.is_due:
            profiler.turn_on()
            job.at_end.append(self._at_end)

    def start_over(self) -> None:
        """A worker was lost, and with it what it had measured: there will be no trace."""
        if self.is_due:
            self.is_due = self._profiler.is_on = False
            if self._job.rank == 0:
                say("no trace is written: a worker was lost, and its measurements with it")

    def after_step(self, planned: PlannedStep) -> None:
        """A step has been trained."""
        if self.is_due and not any(plan.wants_costs for plan in planned.plans):
            most = self._profiler.most_timed()
            if most is not None and self._profiler.has_all(most):
                self._write()

    def _at_end(self) -> None:
        if self.is_due:
            try:
                self._write()
            except ConfigurationError as error:
                if self._job.rank == 0:
                    say(f"no trace was written: {error}")

    def _write(self) -> None:
        self.is_due = self._profiler.is_on = False
        try:
            profile = self._profiler.measured()
        finally:
            self._profiler.forget()
        if self._job.rank == 0:
            profile.save(self._folder)
            say(f"wrote a trace of {profile.costs.source.partition(' over ')[2]}: {self._folder}")
