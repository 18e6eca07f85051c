"""How deep each channel must be, so that no sender waits for a receiver who keeps to its order.

The programs are played through on a clock of units, over channels without bounds. The most messages
that are under way at once on an edge, and one more, is the depth it gets: one is taken while the
next is made. That play is an order of all instructions in which no SEND ever finds its channel
full; so the programs cannot deadlock over channels of these depths, however long things really
take. ``program.proof`` proves it once more, without the clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphsplit.program.event_loop import ProgramPlay
from graphsplit.program.lower import WorkerProgram

SHALLOW = 2


def channel_depths(programs: Sequence[WorkerProgram]) -> dict[int, int]:
    """The edges that need a deeper channel than 2 messages, each with its depth.

    Returns what it found so far where the programs cannot go on: they deadlock over channels of any
    depth, which is for ``verify_programs`` to tell.
    """
    num_messages = max((program.num_microbatches for program in programs), default=1)
    if num_messages <= SHALLOW:
        return {}
    play = ProgramPlay([program.instructions for program in programs])
    play.run()
    depths = {edge: min(c.most + 1, num_messages) for edge, c in play.channels.items()}
    return {edge: depth for edge, depth in depths.items() if depth > SHALLOW}
