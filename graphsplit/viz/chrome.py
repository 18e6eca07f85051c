"""Timelines as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

One process per worker; in it, for each timeline, a track for compute, one for sends and one for
receives. Arrows go from sends to their receives. Format: «Trace Event Format», JSON object form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.schedule.simulation.timeline import Span, Timeline, messages
from graphsplit.viz.names import BETWEEN, title

_TRACKS = ("compute", "send", "receive")
_US = 1e6  # the format counts in microseconds


def chrome_trace(plan: PartitionPlan, timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """The trace, ready for ``json.dumps``.

    Args:
        plan: The plan, for names.
        timelines: The timelines, by name; all begin at 0.
    """
    events: list[dict[str, Any]] = []
    for worker in range(plan.num_workers):
        events += _names(worker, list(timelines))
    for index, (name, timeline) in enumerate(timelines.items()):
        for worker, spans in enumerate(timeline.workers):
            for span in spans:
                events += _events(plan, span, worker, index, name)
        events += _arrows(timeline, index, name)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {f"{name}_step_s": t.step_s for name, t in timelines.items()},
    }


def _names(worker: int, timelines: list[str]) -> list[dict[str, Any]]:
    def metadata(kind: str, thread: int, **arguments: Any) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": worker, "tid": thread, "args": arguments}

    events = [
        metadata("process_name", 0, name=f"worker {worker}"),
        metadata("process_sort_index", 0, sort_index=worker),
    ]
    for index, timeline in enumerate(timelines):
        for track, name in enumerate(_TRACKS):
            thread = index * len(_TRACKS) + track
            events.append(metadata("thread_name", thread, name=f"{timeline}: {name}"))
            events.append(metadata("thread_sort_index", thread, sort_index=thread))
    return events


def _thread(instruction: Instruction | None, index: int) -> int:
    opcode = None if instruction is None else instruction.opcode
    track = {Opcode.SEND: 1, Opcode.RECEIVE: 2}.get(opcode, 0) if opcode is not None else 0
    return index * len(_TRACKS) + track


def _events(
    plan: PartitionPlan, span: Span, worker: int, index: int, name: str
) -> list[dict[str, Any]]:
    instruction = span.instruction
    common = {"pid": worker, "tid": _thread(instruction, index), "cat": name}
    what = BETWEEN if instruction is None else str(instruction)
    events: list[dict[str, Any]] = []
    if span.wait_s > 0:
        reason = f"wait: {what}"
        events.append({"name": reason, "ph": "B", "ts": span.begin_s * _US, **common})
        events.append({"name": reason, "ph": "E", "ts": span.start_s * _US, **common})
    about = {"about": title(plan, instruction)}
    events.append({"name": what, "ph": "B", "ts": span.start_s * _US, **common, "args": about})
    events.append({"name": what, "ph": "E", "ts": span.end_s * _US, **common})
    return events


def _arrows(timeline: Timeline, index: int, name: str) -> list[dict[str, Any]]:
    """From each send to its receive; an arrow binds to the span that is open at its time."""
    events: list[dict[str, Any]] = []
    for number, (source, sent, destination, received) in enumerate(messages(timeline)):
        common = {"name": "message", "cat": name, "id": f"{name} {number}"}
        start = {"ph": "s", "pid": source, "tid": _thread(sent.instruction, index)}
        thread = _thread(received.instruction, index)
        end = {"ph": "f", "bp": "e", "pid": destination, "tid": thread}
        middle = (received.start_s + received.end_s) / 2
        events.append({**common, **start, "ts": (sent.start_s + sent.end_s) / 2 * _US})
        events.append({**common, **end, "ts": middle * _US})
    return events
