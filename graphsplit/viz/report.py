"""Reports of a measured and predicted step: a table, a trace, a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphsplit.partition.dump import human_bytes
from graphsplit.partition.plan import PartitionPlan
from graphsplit.schedule.simulation.timeline import Timeline
from graphsplit.security.private_files import open_instead
from graphsplit.text import align
from graphsplit.viz.chrome import chrome_trace
from graphsplit.viz.svg import draw_timelines

FILES = ("trace.json", "timeline.svg", "summary.txt", "summary.json")


@dataclass(frozen=True)
class StepReport:
    """A step, predicted and measured.

    Attributes:
        plan: The plan that was run.
        predicted: The step as it is predicted.
        measured: A typical step as it was measured, the one whose time is the median.
        resident_bytes: The most memory that each worker's process has held.
        source: Where the costs come from, in words.
        note: What must be known to read it, in words; empty if there is nothing.
    """

    plan: PartitionPlan
    predicted: Timeline
    measured: Timeline
    resident_bytes: tuple[int, ...]
    source: str
    note: str = ""

    @property
    def ratio(self) -> float:
        """The predicted step time as a part of the measured one."""
        return self.predicted.step_s / self.measured.step_s


def describe_report(report: StepReport) -> str:
    """Step time, and each worker's idle share and memory, as a table."""
    predicted, measured = report.predicted, report.measured
    lines = align(
        [
            ("step time", "predicted", "measured", "predicted / measured"),
            (
                "",
                seconds_in_words(predicted.step_s),
                seconds_in_words(measured.step_s),
                f"{report.ratio:.3f}",
            ),
        ],
        right=frozenset({1, 2, 3}),
    )
    rows = [
        ("worker", "busy, predicted", "measured", "idle, predicted", "measured",
         "activations and messages", "process")
    ]  # fmt: skip
    for worker in range(len(measured.workers)):
        rows.append(
            (
                str(worker),
                seconds_in_words(predicted.busy_s(worker)),
                seconds_in_words(measured.busy_s(worker)),
                f"{predicted.idle_share(worker):.0%}",
                f"{measured.idle_share(worker):.0%}",
                _bytes(predicted.peak_bytes, worker),
                _bytes(report.resident_bytes, worker),
            )
        )
    table = align(rows, right=frozenset(range(len(rows[0]))))
    notes = ["", f"note: {report.note}"] if report.note else []
    return "\n".join([f"costs {report.source}", "", *lines, "", *table, *notes])


def seconds_in_words(seconds: float) -> str:
    """Seconds, or milliseconds where it is less than one."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"


def _bytes(sizes: Sequence[int], worker: int) -> str:
    return human_bytes(sizes[worker]) if worker < len(sizes) else ""


def summary(report: StepReport) -> dict[str, object]:
    """The same numbers for programs, in seconds and bytes."""
    predicted, measured = report.predicted, report.measured
    return {
        "source": report.source,
        "note": report.note,
        "predicted_step_s": predicted.step_s,
        "measured_step_s": measured.step_s,
        "ratio": report.ratio,
        "workers": [
            {
                "worker": worker,
                "predicted_busy_s": predicted.busy_s(worker),
                "measured_busy_s": measured.busy_s(worker),
                "predicted_idle_share": predicted.idle_share(worker),
                "measured_idle_share": measured.idle_share(worker),
                "peak_bytes": predicted.peak_bytes[worker],
                "resident_bytes": report.resident_bytes[worker],
            }
            for worker in range(len(measured.workers))
        ],
    }


def write_report(report: StepReport, folder: Path) -> None:
    """Write ``FILES`` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    timelines = {"predicted": report.predicted, "measured": report.measured}
    written = {
        "trace.json": json.dumps(chrome_trace(report.plan, timelines)),
        "timeline.svg": draw_timelines(report.plan, timelines),
        "summary.txt": describe_report(report) + "\n",
        # The last one: who waits for it finds all of them.
        "summary.json": json.dumps(summary(report), indent=2) + "\n",
    }
    for name, text in written.items():
        with open_instead(folder / name, mode=0o666) as file:  # no link that was planted there
            file.write(text.encode())
