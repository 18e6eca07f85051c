"""Lines of the log about the seconds before a first step: worker 0 says them, for all."""

from __future__ import annotations

from graphsplit.capture.graph import Mode
from graphsplit.logs import say
from graphsplit.partition.plan import PartitionPlan


def say_begun(rank: int, doing: str, mode: Mode, why_again: str = "") -> None:
    """Say what begins. ``graphsplit run`` shows it on a terminal while it lasts.

    Args:
        rank: This worker.
        doing: ``"capturing"`` or ``"planning"``.
        mode: Whose step it is done for.
        why_again: What is other than before, where there was such a step; else empty.
    """
    if rank == 0:
        again = f" again: {why_again}" if why_again else ""
        say(f"{doing} the {mode.value} step{again}", event=doing)


def say_planned(rank: int, plan: PartitionPlan, *, is_compiled: bool) -> None:
    """Say that a plan is ready to run."""
    if rank != 0:
        return
    mode, segments = plan.placed.graph.mode.value, len(plan.segments)
    workers = len({segment.worker for segment in plan.segments})
    text = f"planned the {mode} step: {_number(segments, 'segment')}, {_number(workers, 'worker')}"
    if is_compiled:
        text += "; compiling each segment as it first runs"
    say(text, event="planned")


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
