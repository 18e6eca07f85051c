"""What of a slot is put aside because nobody can tell the difference.

[Note: hearing at once] A slot at which nothing will ever go wrong hears what is sent to it, and
sees the end of its stream, at once. No state of a worker or of the scheduler is missed by that.
Take any order of events, and move each hearing to right after the event that sent what is heard:

* Hearing changes this slot only, and adds answers at the end of its queue to the scheduler. So it
  can change places with whatever happens at other slots, and with what the scheduler hears, be it
  from the other end of the same queue.
* What the worker itself does between the sending and the hearing, it can do before the sending as
  well: being sent something changes nothing at the worker. That order is looked at.
* If the scheduler ends the stream between the two, or is killed, the answer is lost. Now it is
  sent before that, and gets lost with the scheduler, or comes to it on a stream of which it has no
  note any more, where nothing that comes has an effect.
* A worker that is over does nothing but leave, whatever it hears.

Two cases are left in which the worker might do something between that it could not do before: two
messages that one event sends, of which the first one lets the worker do something; and things that
were under way when something went wrong here, up to when nothing was to be heard at once. In both
it hears in turn, like a slot at which something may go wrong, until nothing is under way.
"""

from __future__ import annotations

from dataclasses import replace

from membership_moves import heard_by_worker, steps
from membership_slot import Slot, Stream
from membership_view import View

from graphsplit.cluster.wire.messages import Fence


def is_to_hear(slot: Slot) -> bool:
    """Whether there is something that the worker has yet to hear."""
    return next(heard_by_worker(slot), None) is not None


def hear_at_once(slot: Slot, view: View) -> None:
    """Have the worker hear all that was sent to it, unless that would hide what it may do first."""
    could = None
    while move := next(heard_by_worker(slot), None):
        can = {one.name for one in steps(slot, view)}
        if could is not None and not slot.worker.state.is_over and not can <= could:
            slot.hears_in_turn = True
        if slot.hears_in_turn:
            return
        could = can if could is None else could
        move.act(slot)
    slot.hears_in_turn = False


def forget_streams(slot: Slot, view: View, *, forgets: bool) -> None:
    """Drop streams that nobody looks at any more, and what nobody will look at of the others."""
    worker = slot.process
    for node, stream in list(slot.streams.items()):
        is_left = worker is None or worker.node != node
        is_ended = stream.scheduler_sees_end or not view.is_there
        if is_left and is_ended:
            del slot.streams[node]
            continue
        if is_left:
            stream.to_member.clear()
        if is_ended:
            stream.to_scheduler.clear()
        if forgets:
            _count_anew(stream, is_left=is_left, is_ended=is_ended)


def _count_anew(stream: Stream, *, is_left: bool, is_ended: bool) -> None:
    """Fences only compare numbers: the last one that was taken is 1 from now on."""
    for way, is_over in enumerate((is_ended, is_left)):
        guard = stream.guards[way]
        if is_over:
            stream.numbers[way] = guard._number = 0
            guard.why_broken = ""
        elif (further := guard._number - 1) > 0:
            guard._number = 1
            stream.numbers[way] -= further
            queue = stream.queue(way)
            queue[:] = [(_earlier(fence, further), message) for fence, message in queue]


def _earlier(fence: Fence, by: int) -> Fence:
    return replace(fence, number=fence.number - by)
