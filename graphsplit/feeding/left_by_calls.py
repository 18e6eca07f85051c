"""Python values that calls kept whole leave: every worker gets those of the one that runs them.

A counter in a loss that asks for values, the best loss so far, a list of losses: in one process
the script finds them after the step, and so does code of another mode. Here only the worker that
runs the code changes its copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from graphsplit.capture.reach.holders import Holder
from graphsplit.guards.values import MISSING, freeze, put_into, same
from graphsplit.job.group import WorkerGroup
from graphsplit.planning.python_values import can_be_written
from graphsplit.planning.ready_plan import ReadyPlan


def note_left(planned: ReadyPlan, rank: int) -> list[dict[Any, Any]]:
    """The values that the calls of one worker may change, as they are before a step."""
    return [freeze(holder.entries()) for holder in planned.left_by_calls.get(rank, ())]


def share_left(group: WorkerGroup, planned: ReadyPlan, before: Sequence[Any]) -> None:
    """Give all workers what calls have changed. All call it, after the step.

    Args:
        group: All workers.
        planned: What has run.
        before: What ``note_left`` gave on this worker.
    """
    for rank, holders in sorted(planned.left_by_calls.items()):
        news = None
        if rank == group.rank:
            news = [list(_news(*pair)) for pair in zip(holders, before, strict=True)]
        what = "what code kept whole has left in Python"
        told = group.share_value(news, source=rank, what=what)
        if rank != group.rank:
            for holder, changed in zip(holders, told, strict=True):
                _take(holder, changed)


def _news(holder: Holder, before: Any) -> Iterator[list[Any]]:
    """Entries that are new, each with its key, and keys of those that are gone."""
    old, now = dict(zip(before.keys, before.items, strict=True)), holder.entries()
    for key, value in now.items():
        is_new = key not in old or not same(old[key], value)
        if is_new and can_be_written(key) and can_be_written(value):
            yield [key, value]
    for key in old.keys() - now.keys():
        if can_be_written(key):
            yield [key]


def _take(holder: Holder, news: Sequence[Sequence[Any]]) -> None:
    if not news:
        return
    entries = holder.entries()
    for key, *value in news:
        if value:
            entries[key] = put_into(freeze(value[0]), entries.get(key, MISSING))
        else:
            entries.pop(key, None)
    holder.hold_entries(entries)
