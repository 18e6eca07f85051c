"""Workers by name: that of a host, or a label. Known once the job has been joined.

``b`` is the worker on host ``b``, or with that label, if there is one; ``b:1`` the second of
several in the order of ranks, and ``b:*`` all of them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_NAME = re.compile(r"(?P<name>[\w.%/@-]+)(?::(?P<which>[0-9]{1,4}|\*))?", re.A)
_MOST_NAMED = 10


class UnknownWorkerError(Exception):
    """A name of workers that names none, or too many; has the problem and the fix."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem, self.fix = problem, fix


class _Names:
    """The names of this process's job: None before it is joined, empty in one process."""

    found: Mapping[str, Sequence[int]] | None = None


def set_names(names: Mapping[str, Sequence[int]]) -> None:
    """Let these names stand for these workers, by rank; none: this process is alone."""
    _Names.found = names


def names_of(hosts: Iterable[tuple[str, Sequence[str]]]) -> dict[str, list[int]]:
    """The workers that each name stands for.

    Args:
        hosts: The host and the labels of each worker, by rank.
    """
    found: dict[str, list[int]] = {}
    for rank, (host, labels) in enumerate(hosts):
        for name in dict.fromkeys((host, host.partition(".")[0], *labels)):
            found.setdefault(name, []).append(rank)
    return found


def numbered(ranks: Any) -> Any:
    """Ranks, with the names of workers among them replaced; whatever else it is stays.

    Raises:
        UnknownWorkerError: A name names no worker, or several.
    """
    if isinstance(ranks, str):
        found = _ranks_of(ranks)
        return found if ranks.endswith(":*") else found[0]
    if isinstance(ranks, (list, tuple)) and any(isinstance(one, str) for one in ranks):
        each = [_ranks_of(one) if isinstance(one, str) else [one] for one in ranks]
        every = [rank for some in each for rank in some]
        return list(dict.fromkeys(every)) if _Names.found == {} else every
    return [*ranks] if isinstance(ranks, range) else ranks


def _ranks_of(text: str) -> list[int]:
    parts = _NAME.fullmatch(text)
    if parts is None or text.isdecimal():
        raise UnknownWorkerError(
            f"rank {text!r} is a str; expected an int, or the name of a host or label",
            "pass the worker's number, for example 3, or a name as in 'b', 'b:1' or 'b:*'",
        )
    if _Names.found is None:
        raise UnknownWorkerError(
            f"{text!r} is the name of a worker, and names are not known before gs.init()",
            "call gs.init() first, or pass the worker's number",
        )
    if not _Names.found:
        return [0]
    ranks = _Names.found.get(parts["name"])
    if ranks is None:
        raise UnknownWorkerError(
            f"no worker is called {parts['name']!r}; there are {_in_words(_Names.found)}",
            f"{_near(parts['name'], _Names.found)}give a worker that label: GS_WORKER_LABELS",
        )
    which = parts["which"]
    if which == "*":
        return list(ranks)
    if (which is None and len(ranks) > 1) or (which is not None and int(which) >= len(ranks)):
        raise UnknownWorkerError(
            f"{text!r} names {len(ranks)} workers: {', '.join(map(str, ranks))}"
            if which is None
            else f"{text!r}: {parts['name']!r} names {len(ranks)} alone",
            f"'{parts['name']}:0' is the first of them, '{parts['name']}:*' are all",
        )
    return [ranks[int(which or 0)]]


def _in_words(names: Mapping[str, Sequence[int]]) -> str:
    shown = ", ".join(sorted(names)[:_MOST_NAMED])
    return f"{shown}, ..." if len(names) > _MOST_NAMED else shown


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}? Else " if near else ""
