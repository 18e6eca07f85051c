"""The failures that the scheduler finds out by itself, in words that help."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from graphsplit.cluster.scheduler.job.roster import Worker
from graphsplit.cluster.wire import limits
from graphsplit.cluster.wire.messages import Arrive
from graphsplit.failure import FailureCause, Location
from graphsplit.text import cut_end, join_numbers

LEFT_EARLY = "lost: it left before the job was finished, and reported no error"
LINGERED = "it did not leave when the job had ended"
BROKEN = "lost: its connection broke, so its process was killed or crashed"


def silent(silence_s: float) -> str:
    """The message about a worker that fell silent."""
    return f"lost: {unheard(silence_s)}, so it is frozen or cut off"


def unheard(silence_s: float) -> str:
    """For how long nothing was heard of a worker."""
    return f"nothing was heard from it for {silence_s:g} s (see MS_NODE_TIMEOUT)"


def ended(rank: int, host: str, pid: int, how: str, error: str) -> FailureCause:
    """The launcher's report about a process that no stream can be asked about any more."""
    if error:
        return FailureCause("exception", error, rank=rank, host=host, pid=pid)
    return FailureCause("lost", ended_process(how), rank=rank, host=host, pid=pid)


def ended_process(how: str, error: str = "") -> str:
    """The message about a worker whose process the launcher saw end, and what it left as reason."""
    return f"lost: its process {how}" + (f": {error}" if error else "")


def did_not_return(silence_s: float) -> str:
    """The message about a worker that was lost while the scheduler was away."""
    return (
        f"lost: it did not come back within {silence_s:g} s (see MS_NODE_TIMEOUT) after the "
        f"scheduler did"
    )


def seen_by_others(cause: FailureCause, others: Iterable[tuple[int, Location]]) -> FailureCause:
    """A loss, and how far others were: what the lost worker said last is up to a second old.

    Args:
        cause: Any cause.
        others: Workers, and where they were, as far as they have told.
    """
    steps = [(at.step, rank) for rank, at in others if rank != cause.rank and at.step is not None]
    step, rank = max(steps, default=(0, -1))
    if cause.kind != "lost" or cause.rank < 0 or step <= (cause.location.step or 0):
        return cause
    then = f"worker {rank} was then in step {step}"
    own = cut_end(cause.position, limits.MAX_POSITION_CHARS - len(then) - 2)
    return replace(cause, position=f"{own}; {then}" if own else then)


def incomplete(topo_timeout_s: float, line: str, num_refused: int) -> FailureCause:
    """Not all workers came while the job was formed."""
    refused = f"; {num_refused} refused" if num_refused else ""
    return FailureCause(
        "timeout",
        f"not all workers came within {topo_timeout_s:g} s (MS_TOPO_TIMEOUT): {line}{refused}\n"
        f"  Fix: start the missing workers with this scheduler's address, or look in their logs "
        f"for why they ended",
    )


def unrecovered(
    first: FailureCause, topo_timeout_s: float, vacant: Sequence[int], slow: Sequence[int]
) -> FailureCause:
    """A job that recovers was not complete in time: the first cause, and who is missing."""
    parts = []
    if vacant:
        parts.append(f"nobody came for ranks {join_numbers(vacant)}")
    if slow:
        parts.append(f"workers {join_numbers(slow)} did not leave the former generation")
    message = (
        f"{first.message}\n  the job could not recover within {topo_timeout_s:g} s "
        f"(MS_TOPO_TIMEOUT): {'; '.join(parts) or 'not all workers were ready'}\n"
        f"  Fix: start the lost worker again with its MS_NODE_ID (graphsplit run --restarts N)"
    )
    return replace(first, message=message)


def in_circle(circle: str) -> FailureCause:
    """Workers wait for each other, and nothing can change that."""
    return FailureCause(
        "disagreement",
        f"the workers wait for each other in a circle, and none of them can go on: {circle}\n"
        f"  Fix: every worker makes the same calls in the same order. Where values are asked for "
        f"below an `if` on the rank (torch.save, `if is_best:`), ask before, on every worker: "
        f"is_best = bool(is_best), value = torch.from_numpy(value.numpy().copy()). For each "
        f"gs.recv another worker calls gs.send, in an order in which one of them begins",
    )


def stands_still(worker: Worker, waiting: FailureCause, timeout_s: float) -> FailureCause:
    """A worker does not go on, and others have waited for it too long."""
    message = (
        f"it made no progress for {timeout_s:g} s (MS_RECEIVE_MSG_TIMEOUT), and worker "
        f"{waiting.rank} waits for it\n"
        f"  Fix: look at what it does there; if it really takes so long, raise "
        f"MS_RECEIVE_MSG_TIMEOUT"
    )
    return worker.cause("timeout", message)


def nobody_goes_on(waiting: Sequence[Worker], timeout_s: float) -> FailureCause:
    """Some workers wait for what all have to do, and nobody makes progress."""
    ranks = join_numbers(worker.rank for worker in waiting)
    message = (
        f"worker{'s' if len(waiting) > 1 else ''} {ranks} waited for "
        f"{waiting[0].location.waits_what}, and nobody made progress for {timeout_s:g} s "
        f"(MS_RECEIVE_MSG_TIMEOUT)\n"
        f"  Fix: if they really need longer, raise MS_RECEIVE_MSG_TIMEOUT"
    )
    return waiting[0].cause("timeout", message)


def stalled(missing: Sequence[Worker], arrival: Arrive, timeout_s: float) -> FailureCause:
    """Some workers did not come to a meeting, and make no progress either."""
    ranks = join_numbers(worker.rank for worker in missing)
    message = (
        f"worker{'s' if len(missing) > 1 else ''} {ranks} did not come to "
        f"{arrival.meeting_name}, where the others wait, and made no progress for {timeout_s:g} s "
        f"(MS_RECEIVE_MSG_TIMEOUT)\n"
        f"  Fix: if they really need longer, raise MS_RECEIVE_MSG_TIMEOUT"
    )
    return missing[0].cause("timeout", message)
