"""Sections of which every worker saves its own: a callback may keep what lives on its worker.

Worker 0's has the plain name, the others' have their rank in it::

    callbacks    callbacks 1    callbacks 2

As many workers as have saved each take their own, if they own the same parameters as then: a
callback may keep something of each of them. Others can do so only where all are equal.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from graphsplit.checkpoint.generators import is_same
from graphsplit.checkpoint.position import Resumption
from graphsplit.encoding.packed import Packed
from graphsplit.errors import StateError
from graphsplit.job.group import WorkerGroup

CALLBACKS, RESUMPTION = "callbacks", "resumption"
_KINDS = (CALLBACKS, RESUMPTION)
_SECTION = re.compile(rf"(?:{'|'.join(_KINDS)})(?: (?P<rank>[1-9][0-9]{{0,5}}))?")


def name_of(kind: str, rank: int) -> str:
    """The section of one worker."""
    return f"{kind} {rank}" if rank else kind


def saver_of(section: str) -> int | None:
    """The worker whose section it is; None if there is one for all."""
    found = _SECTION.fullmatch(section)
    return None if found is None else int(found["rank"] or 0)


def takers(section: str, sections: Collection[str], num_workers: int) -> Sequence[int]:
    """The workers that must look at a section of a save.

    Args:
        section: Its name.
        sections: All names in the save.
        num_workers: How many workers load it.
    """
    saver = saver_of(section)
    if saver is None or _num_savers(sections) != num_workers:
        return range(num_workers)
    return (saver,)


def own(values: Mapping[str, Any], rank: int, *, is_same_number: bool) -> dict[str, Any]:
    """The sections as one worker goes on with them: its own under the plain names.

    Args:
        values: What ``takers`` gives to this worker.
        rank: This worker.
        is_same_number: Whether as many workers have saved as load now.

    Raises:
        StateError: They are not, and what they have saved is not the same; names the callback.
    """
    found = {name: value for name, value in values.items() if saver_of(name) is None}
    for kind in _KINDS:
        saved = {saver_of(n): v for n, v in values.items() if n.partition(" ")[0] == kind}
        saved.pop(None, None)
        if is_same_number:
            found[kind] = saved.get(rank)
            continue
        found[kind] = first = saved.get(0)
        for saver, value in saved.items():
            if not is_same(value, first):
                raise StateError(
                    f"the state of {_names(first, value)} is not the same on workers 0 and {saver} "
                    f"that have saved it, and there is another number of workers now\n"
                    f"  Fix: load it with as many workers as have saved, or let state_dict() return"
                    f" the same on every worker."
                )
    return found


def check_alike(group: WorkerGroup, states: list[Any]) -> None:
    """Refuse states of callbacks that another number of workers could not take. Collective.

    Args:
        group: All workers.
        states: What this worker's callbacks keep.

    Raises:
        StateError: They are not the same on all workers; names the callback, the same everywhere.
    """
    if differing := _differing(group, states):
        raise StateError(
            f"{differing}, so under GS_RECOVERY=go_on the others could not go on without one of "
            f"them\n"
            f"  Fix: let state_dict() return the same on every worker, or set "
            f"GS_RECOVERY=wait_rejoin."
        )


def check_owners(group: WorkerGroup, saved: Resumption, now: str | None) -> None:
    """Refuse states of callbacks that belong to parameters of other workers. Collective.

    Args:
        group: All workers.
        saved: What this worker's callbacks were given, and who owned which parameter then.
        now: Who owns which now.

    Raises:
        StateError: Others own them, and the states are not the same on all workers; names the
            callback, the same everywhere.
    """
    if saved.owners in (None, now) or group.num_workers == 1:
        return
    if differing := _differing(group, saved.callbacks):
        raise StateError(
            f"{differing} that have saved it, and parameters live on other workers now than then: "
            f"what it keeps of one would not be where the parameter is\n"
            f"  Fix: load it under the placement that has saved it, or let state_dict() return the "
            f"same on every worker; train(..., resume=False) does without the saved states."
        )


def _differing(group: WorkerGroup, states: list[Any]) -> str:
    """Whose states are not the same on all workers, in words; collective."""
    what = "the states of callbacks"
    first = group.share_value(states, source=0, what=what)
    kept = Packed.of(states, what=what).value()  # as who goes on would be given it
    told = group.exchange("" if is_same(kept, first) else _names(first, kept))
    for rank, names in enumerate(told):
        if names:
            return f"the state of {names} is not the same on {group.name(0)} and {group.name(rank)}"
    return ""


def states_of(callbacks: Sequence[Any]) -> list[list[Any]]:
    """Class and state of every callback that has one, as it is on this worker."""
    found = [[type(c).__qualname__, c.state_dict()] for c in callbacks]
    return [entry for entry in found if entry[1]]


def is_same_number(sections: Collection[str], num_workers: int) -> bool:
    """Whether as many workers have saved as load now."""
    return _num_savers(sections) == num_workers


def _num_savers(sections: Collection[str]) -> int:
    return 1 + max((saver_of(section) or 0 for section in sections), default=0)


def _names(one: Any, other: Any) -> str:
    """The classes of the callbacks whose states differ, as far as they can be told."""
    lists = [v.get(CALLBACKS) if isinstance(v, dict) else v for v in (one, other)]
    found = [
        str(a[0] if a else b[0])
        for a, b in zip_longest(*(found or [] for found in lists))
        if not (a and b and is_same(a, b))
    ]
    return " and ".join(dict.fromkeys(found)) or "the callbacks"
