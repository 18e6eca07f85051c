"""``gs.loop``: what a script's own loop goes through, in a job that recovers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from graphsplit.job import joined
from graphsplit.recovery.loops.body import Body
from graphsplit.recovery.loops.script import LoopScript
from graphsplit.text import called, need


@called("gs.loop")
def loop(
    source: Iterable[Any], keep: Sequence[Any] = (), *, numbered: bool = False
) -> Iterator[Any]:
    """Go through a loader, in a training loop of the script's own that survives lost workers.

    In a job that recovers (``GS_RECOVERY=wait_rejoin`` or ``restart``), the state is kept every
    ``GS_SNAPSHOT_EVERY`` batches: distributed networks, generators, the place in the loader, and
    what ``keep`` names. After a loss all workers, or the job, start the script anew, and the loop
    goes on at that batch, with the same bits as if nothing had happened. Elsewhere it only
    iterates.

    Loops stand one inside the other, for epochs::

        for epoch in gs.loop(range(3), keep=[optimizer, scheduler, counts]):
            for x, y in gs.loop(loader):
                ...

    Args:
        source: The loader; or anything that can be gone through again, as a range.
        keep: Optimizers, schedulers, scalers, averaged models, metrics, other loaders: what has
            ``state_dict`` and ``load_state_dict``; and dictionaries, lists, sets and generators,
            which are filled again in place. Given to the outermost loop. With a scheduler its
            optimizer is kept.
        numbered: Whether to yield pairs of number and batch, as ``enumerate`` does; the number
            goes on where the loop does.

    Returns:
        An iterator over the batches.

    Raises:
        StoppedInOrder: The job was asked to end (SIGTERM); a snapshot was taken.
        ConfigurationError: The loop could not go on after a loss: its body changes a variable, or
            uses an object with a state, that is not kept; an object to be kept has no state.
    """
    is_loader = isinstance(source, Iterable) and not isinstance(source, (str, bytes))
    need("gs.loop", "source", source, is_loader, "a loader, or a range as in range(3)")
    is_several = isinstance(keep, Sequence) and not isinstance(keep, str)
    need("gs.loop", "keep", keep, is_several, "a list, as in keep=[optimizer, scheduler]")
    need("gs.loop", "numbered", numbered, isinstance(numbered, bool), "True or False")
    job = joined.current()
    if job is None or not isinstance(job.script, LoopScript):
        return enumerate(source) if numbered else iter(source)
    with job.reporting():
        body = Body(sys._getframe(2))
    return job.script.rounds(source, keep, body, numbered=numbered)
