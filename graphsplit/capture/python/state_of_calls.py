"""State that calls kept whole change, and the code around them reads.

A call kept whole leaves no trace while a step is recorded. So what is read after it, outside of it,
is not what eager mode would find there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from graphsplit.capture.operations.opaque_call import OpaqueCall
from graphsplit.errors import CaptureError
from graphsplit.guards.values import differences, freeze
from graphsplit.guards.visitor import Noted


def refuse_reads_of_changed(calls: Iterable[OpaqueCall], noted: Iterable[Noted]) -> None:
    """Refuse forward that reads what a call kept whole changes when it is called.

    What is changed only in backward is what eager's forward finds at the next step, too; but not
    at the next microbatch. There it counts as if the call read it.

    Args:
        calls: The calls.
        noted: The places that were read outside of them.

    Raises:
        CaptureError: Names both lines.
    """
    places = [one for one in noted if one.is_read]
    for call in calls:
        for one in _touched(call, call.reached.left, places):
            raise _refusal(call, one[0])
        late = frozenset(key for _, key in _touched(call, call.reached.left_late, places))
        call.reached.in_forward |= late


def _touched(
    call: OpaqueCall, left: Mapping[Any, Any], places: Iterable[Noted]
) -> Iterator[tuple[Noted, Any]]:
    """The places that hold something else after a change, each with the key of what changed."""
    for key, state in left.items():
        holder = call.reached.holders[key]
        if not holder.decides or holder.is_tensor or holder.is_generator:
            continue
        before = [(one, freeze(one.place.read())) for one in places]
        with call.reached.as_left(key, state):
            found = [one for one, was in before if any(differences(was, one.place.read()))]
        yield from ((one, key) for one in found)


def _refusal(call: OpaqueCall, one: Noted) -> CaptureError:
    return CaptureError(
        f"{call.label} changes {one.place.label}, which is read outside of it as well; the graph "
        f"would keep what was there before the change\n  {call.source}\n  {one.place.source}\n"
        f"  Fix: return what it counts as a tensor, or keep all that reads it whole together, with "
        f"gs.opaque."
    )
