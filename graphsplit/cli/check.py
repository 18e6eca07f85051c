"""``graphsplit check``: run a script as a job and as the plain loop, and compare the bits."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import click

from graphsplit.check.compare import RunComparison, RunDifference, compare
from graphsplit.check.pinpoint import Pinpoint, pinpoint
from graphsplit.check.record import Notes, Operation, What, read_lines
from graphsplit.check.request import (
    PLAIN,
    VARIABLE,
    NoteRequest,
    operations_file,
    read_refusals,
    records_file,
    write_request,
)
from graphsplit.check.text import Findings, difference_text, failed, findings, unstable
from graphsplit.cli.job import (
    SCRIPT_SETTINGS,
    run_job,
    script_command,
    single_job_options,
    starting,
    terminal,
)
from graphsplit.cli.launch.console import Console, Sink
from graphsplit.cli.launch.environment import lone_child
from graphsplit.cli.launch.request import JobOptions
from graphsplit.cli.launch.supervise import END_SIGNALS, say, supervise

_STEPS = "--steps"
_INTERRUPTED = frozenset(128 + signum for signum in END_SIGNALS)
# A worker that is lost would take back steps that were noted.
_OF_THE_JOB = {"GS_RECOVERY": "fail_fast", "GS_RECAPTURE_EVERY": "1"}
_NOT_OF_A_CHECK = ("GS_TRACE", "MS_RECOVERY_PATH")


class _CheckCommand(click.Command):
    """Takes ``--steps`` after the script as well, as people write it; not after ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse a command line."""
        end = args.index("--") if "--" in args else len(args)
        ours, rest = _taken_out(args[:end], _STEPS)
        tail = args[end:]
        left = super().parse_args(ctx, [*ours, *rest, *tail])
        arguments = ctx.params.get("arguments", ())
        if tail and len(arguments) >= len(tail):
            # The script came before "--", which has done its work.
            split = len(arguments) - len(tail)
            ctx.params["arguments"] = (*arguments[:split], *arguments[split + 1 :])
        return left


def _taken_out(args: list[str], option: str) -> tuple[list[str], list[str]]:
    """An option with its value, wherever it stands; and all else."""
    for index, arg in enumerate(args):
        if arg == option:
            return args[index : index + 2], args[:index] + args[index + 2 :]
        if arg.startswith(f"{option}="):
            return [arg], args[:index] + args[index + 1 :]
    return [], args


@click.command(cls=_CheckCommand, context_settings=SCRIPT_SETTINGS)
@click.option(
    _STEPS,
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="How many training steps to compare. May stand after SCRIPT as well; an option --steps "
    "of the script's own goes behind '--'.",
)
@click.option(
    "--timeout",
    "limit_s",
    type=click.FloatRange(min=1),
    default=3600.0,
    show_default=True,
    help="Seconds that each run of SCRIPT may take.",
)
@single_job_options
@click.pass_context
def check(context: click.Context, options: JobOptions, *, steps: int, limit_s: float) -> None:
    """Run SCRIPT as a job and as the plain loop, and compare both bit for bit.

    Compares losses, gradients, parameters, buffers, the states of optimizers and generators after
    each training step, and what eval and predict return; then ends the script. Where a difference
    is found, both are run once more, and step, module and operation are named. SCRIPT needs no
    change. It runs in this folder: what it writes, it writes each time.

    The exit status is 0 if all steps have the same bits, 1 after a difference, an error or fewer
    steps than asked for, 2 if the command line was wrong.

    Example: graphsplit check -n 3 train.py --steps 5
    """
    console, interrupts = terminal(), list[signal.Signals]()
    with (
        _leaving_by_signals(),
        tempfile.TemporaryDirectory(prefix="graphsplit-check-") as folder,
        starting(options, console.say, console.turn, interrupts) as start,
    ):
        how = {"limit_s": limit_s, "start": start, "interrupts": interrupts}
        found = _Check(options, _environ(os.environ), Path(folder), how).run(steps, console)
    click.echo(found.text, err=found.status != 0)
    context.exit(found.status)


def _environ(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _NOT_OF_A_CHECK}


@contextlib.contextmanager
def _leaving_by_signals() -> Iterator[None]:
    """Leave by way of ``finally`` where a signal comes between two runs."""

    def leave(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    previous = {signum: signal.signal(signum, leave) for signum in END_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@dataclass(frozen=True)
class _Pass:
    """The notes of both runs of a script.

    Attributes:
        job_status: The job's exit status.
        plain_status: That of the plain loop.
        plain: The notes of the plain loop.
        workers: The notes of each worker.
    """

    job_status: int
    plain_status: int
    plain: tuple[Notes, ...]
    workers: tuple[tuple[Notes, ...], ...]

    @property
    def has_ended_well(self) -> bool:
        """Whether both runs have come to their ends."""
        return self.job_status == 0 and self.plain_status == 0

    def compared(self) -> RunComparison:
        """Both runs, compared: whole, or as far as all came."""
        if self.has_ended_well:
            return compare(self.plain, self.workers)
        least = min(map(len, (self.plain, *self.workers)))
        return compare(self.plain[:least], [records[:least] for records in self.workers])


@dataclass(frozen=True)
class _Check:
    """One check.

    Args:
        options: The job.
        environ: The environment that all processes start from.
        folder: Where they note what they compute.
        how: For ``supervise``: how long each run may take, and how its processes are started.
    """

    _options: JobOptions
    _environ: Mapping[str, str]
    _folder: Path
    _how: Mapping[str, Any]

    def run(self, steps: int, console: Console) -> Findings:
        """Run the script both ways, and once more where they differ."""
        first = self._pass("first", NoteRequest(steps), self._options, console)
        comparison = first.compared()
        if not first.has_ended_well:
            return failed(
                comparison=comparison,
                job_status=first.job_status,
                plain_status=first.plain_status,
                refusals=() if first.plain_status else self._refusals(steps),
            )
        difference = comparison.difference
        if not isinstance(difference, RunDifference):
            return findings(comparison, asked=steps)
        console.say("graphsplit check: not the same; running both again, to see from where on")
        return self._look_closer(first, comparison, difference, steps)

    def _look_closer(
        self, first: _Pass, comparison: RunComparison, difference: RunDifference, steps: int
    ) -> Findings:
        place, value = difference.record, difference.first.value
        is_step = place.what in (What.STEP, What.BATCH)
        request = NoteRequest(
            place.number if place.what is What.STEP else steps,
            operations_of=(place.what.name, place.number) if is_step else ("", 0),
            whole=(value.kind.value, value.name),
        )
        with _silent() as console:
            options = replace(self._options, log_dir=None)
            second = self._pass("second", request, options, console)
        length = min(len(first.plain), len(second.plain))
        again = compare(first.plain[:length], [second.plain[:length]])
        if again.difference is not None:
            return Findings(1, unstable(again, again.difference))
        found = second.compared().difference
        where = Pinpoint()
        if isinstance(found, RunDifference) and found.record.place == place.place:
            difference = found
            if is_step:
                where = self._pinpoint(difference)
        return Findings(1, difference_text(comparison, difference, where))

    def _refusals(self, steps: int) -> tuple[str, ...]:
        """All that a job would refuse: a job ends with the first."""
        folder = self._folder / "refusals"
        folder.mkdir()
        write_request(folder, NoteRequest(steps, survey_for=self._options.num_workers))
        with _silent() as console:
            self._run_plain(folder, replace(self._options, log_dir=None), console)
        return read_refusals(records_file(folder, PLAIN))

    def _pinpoint(self, difference: RunDifference) -> Pinpoint:
        folder = self._folder / "second"
        plain = _operations(operations_file(records_file(folder, PLAIN)))
        workers = [_operations(operations_file(path)) for path in self._workers_files(folder)]
        return pinpoint(plain, workers, difference.first)

    def _pass(
        self, name: str, request: NoteRequest, options: JobOptions, console: Console
    ) -> _Pass:
        """Run the script as a job, then as the plain loop, which takes over the job's seed."""
        folder = self._folder / name
        folder.mkdir()
        write_request(folder, request)

        def own(process: str) -> dict[str, str]:
            return {**_OF_THE_JOB, VARIABLE: str(records_file(folder, process))}

        job_status = run_job(options, self._environ, console=console, own=own, **self._how)
        _leave_if_interrupted(job_status)
        plain_status = self._run_plain(folder, options, console)
        return _Pass(
            job_status,
            plain_status,
            _records(records_file(folder, PLAIN)),
            tuple(_records(path) for path in self._workers_files(folder)),
        )

    def _run_plain(self, folder: Path, options: JobOptions, console: Console) -> int:
        variables = {**self._environ, VARIABLE: str(records_file(folder, PLAIN))}
        ended = supervise(
            [lone_child(variables, PLAIN)],
            script_command(options),
            console=console,
            log_dir=options.log_dir,
            **self._how,
        )
        status = say(console, ended)
        _leave_if_interrupted(status)
        return status

    def _workers_files(self, folder: Path) -> list[Path]:
        return [records_file(folder, f"worker {rank}") for rank in range(self._options.num_workers)]


def _leave_if_interrupted(status: int) -> None:
    if status in _INTERRUPTED:
        raise SystemExit(status)


def _lines(path: Path) -> list[str]:
    """The lines of a file; none if the process never came so far."""
    try:
        return path.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []


def _records(path: Path) -> tuple[Notes, ...]:
    return read_lines(Notes, _lines(path))


def _operations(path: Path) -> tuple[Operation, ...]:
    return read_lines(Operation, _lines(path))


@contextlib.contextmanager
def _silent() -> Iterator[Console]:
    """A console that shows nothing."""
    with open(os.devnull, "wb") as nowhere:
        sink = Sink(nowhere, is_terminal=False)
        yield Console(sink, sink, clock=time.monotonic)
