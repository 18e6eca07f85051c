"""Workers that have made different calls can never meet again. Pure.

Every worker makes the same calls in the same order, with the same milestones between them. What
two workers have told of that is true for ever, however late it comes: so this is a proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from graphsplit.cluster.wire.messages import (
    ASKING,
    CALL_OF,
    END_OF_SCRIPT,
    SAVING,
    CallMade,
    CallsMade,
)
from graphsplit.text import join_numbers

_MOST_GROUPS = 8
_OF_TRAINING = ("train", "train_step", "forward_backward")


def diverging_call(one: CallsMade, other: CallsMade) -> CallMade | None:
    """A call that one of two waiting workers is in, and that the other one never makes.

    None if none is known. The other one never makes it where it is past that place, or in another
    call, which the first one has not made.
    """
    for mine, theirs in ((one, other), (other, one)):
        call = mine.within
        if call is None or not _lacks(theirs, call, mine):
            continue
        is_past = theirs.milestones > call.milestones
        instead = theirs.within
        if is_past or (instead is not None and _is_instead(instead, call, mine, theirs)):
            return call
    return None


def _is_instead(instead: CallMade, call: CallMade, mine: CallsMade, theirs: CallsMade) -> bool:
    return instead.milestones == call.milestones and _lacks(mine, instead, theirs)


def _lacks(calls: CallsMade, call: CallMade, owner: CallsMade) -> bool:
    """Whether a worker has not made a call that another one is in, as far back as is known."""
    num_known = sum(one.times for one in calls.latest)
    is_known = calls.num <= num_known or calls.latest[0].milestones < call.milestones
    return is_known and _count(calls, call) < _count(owner, call)


def _count(calls: CallsMade, call: CallMade) -> int:
    place = (call.name, call.milestones)
    return sum(one.times for one in calls.latest if (one.name, one.milestones) == place)


def call_of_some(found: CallMade, calls_of: Mapping[int, CallsMade]) -> CallMade:
    """A call that some worker is in and another one has not made; the one that was found, if so.

    Two workers that meet under different names may both be in a call that all have made, and one
    of them in another call inside it.
    """
    inside = [(found, calls) for calls in calls_of.values() if calls.within == found]
    inside += [(calls.within, calls) for calls in calls_of.values() if calls.within is not None]
    for call, owner in inside:
        if any(_lacks(other, call, owner) for other in calls_of.values()):
            return call
    return found


def describe_divergence(call: CallMade, calls_of: Mapping[int, CallsMade]) -> str:
    """Who is where, the line of each, and what to do.

    Args:
        call: The call that not all have made.
        calls_of: The calls of all workers, by rank.
    """
    ranks_at: dict[str, list[int]] = {}
    for rank, calls in sorted(calls_of.items()):
        ranks_at.setdefault(_place(calls), []).append(rank)
    places = sorted(ranks_at.items(), key=lambda place: len(place[1]))[:_MOST_GROUPS]
    told = "; ".join(_group(place, ranks) for place, ranks in places)
    if _is_usual(call.name):  # whoever is not there is in a call of its own
        within = [calls.within for calls in calls_of.values() if calls.within is not None]
        others = [one for one in within if not _is_usual(one.name)]
        call = next(iter(others or [o for o in within if o.name != END_OF_SCRIPT]), call)
    if call.name == END_OF_SCRIPT:
        fix = "let every worker come to the end of the script alike"
    elif call.name.startswith(ASKING + SAVING):
        fix = (
            "torch.save() below an `if` on the rank has a value that lives on one worker. Make it "
            "a plain tensor before, on every worker: value = torch.from_numpy(value.numpy().copy())"
        )
    elif call.name.startswith(ASKING):
        fix = (
            "ask for the value on every worker, as in number = value.item(), and print it on one. "
            "A loss may be asked for on one worker alone once backward() was called on it"
        )
    elif call.name.startswith(CALL_OF):
        fix = "call the same networks on every worker, and not below an `if` on the rank"
    else:
        fix = f"call {call.name}() on every worker, and not below an `if` on the rank"
    return (
        f"the workers have made different calls, and wait for each other: {told}"
        f"{_firsts(call, calls_of)}\n"
        f"  Fix: every worker makes the same calls in the same order: {fix}"
    )


def _firsts(call: CallMade, calls_of: Mapping[int, CallsMade]) -> str:
    """Where workers began with calls of that name there, if at several lines: one did so alone."""
    place = call.name, call.milestones
    lines: dict[str, int] = {}
    for rank, calls in sorted(calls_of.items()):
        for one in calls.latest:
            if (one.name, one.milestones) == place and one.source:
                lines.setdefault(one.source, rank)
    told = [f"on worker {rank} at {line}" for line, rank in lines.items()][:_MOST_GROUPS]
    return f"; the first {call.name} there was {', '.join(told)}" if len(told) > 1 else ""


def _is_usual(name: str) -> bool:
    """Whether all should be there, sooner or later: in training, or a call of a network."""
    return name == END_OF_SCRIPT or name.endswith(_OF_TRAINING) or name.startswith(CALL_OF)


def _place(calls: CallsMade) -> str:
    call = calls.within
    if call is None:
        return "between its calls" if calls.latest else "before its first call"
    if call.name == END_OF_SCRIPT:
        return f"at {END_OF_SCRIPT}"
    shown = call.name if call.name.startswith(ASKING) else f"{call.name}()"
    return f"in {shown}{call.source and f' at {call.source}'}"


def _group(place: str, ranks: Iterable[int]) -> str:
    found = list(ranks)
    if len(found) == 1:
        return f"worker {found[0]} is {place}"
    return f"workers {join_numbers(found, most=8)} are {place.replace(' its ', ' their ')}"
