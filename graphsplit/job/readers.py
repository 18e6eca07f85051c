"""Which workers have read a loader from its first batch on, and so may go on reading it.

Reading may change what a loader is made of: a counter in a data set, a cache, an iterator that is
used up. Only the workers that read it see that. One that has missed a part must not read on by
itself; it is sent the batches.
"""

from __future__ import annotations

import enum
import functools
import gc
import itertools
import logging
import re
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import data

from graphsplit.guards.classes import attributes_of

# Never changed by being read, or shared by what has nothing else in common.
_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, types.ModuleType,
    types.BuiltinFunctionType, np.ndarray, np.generic, torch.Tensor, torch.dtype, torch.device,
    nn.Module, enum.Enum, re.Pattern, PurePath, logging.Logger,
)  # fmt: skip
# Most of what stands in a data set's rows: of these classes, and of none that is made of them.
_PLAIN = frozenset((type(None), bool, int, float, str, bytes, np.ndarray, torch.Tensor))
_FIXED = (tuple, frozenset)  # looked into, and nothing by themselves
_CONTAINERS = (list, set, deque, *_FIXED)
# Reading changes nothing in these but generators, whose states all workers are told.
_TOLD = frozenset(
    (
        *(torch.Generator, data.DataLoader, data.TensorDataset, data.Subset, data.ConcatDataset),
        *(data.BatchSampler, data.SequentialSampler, data.RandomSampler),
        *(data.SubsetRandomSampler, data.WeightedRandomSampler),
    )
)
_TOLD_ALONE = _TOLD | {list, dict}  # where nobody else's code could change them
_MAX_ITEMS = 100  # of one container: a data set of a million rows has objects like these
_MAX_PARTS = 2000


@dataclass(frozen=True)
class Reading:
    """A loader that is read next.

    Attributes:
        parts: What it is made of, before it is read: an iterator that is used up holds nothing.
        ranks: The workers that may read it: they have read all that was read of its parts.
        is_tracked: Whether reading may change it in a way that only readers see.
        version: How often anything was noted before.
    """

    parts: tuple[Any, ...]
    ranks: frozenset[int]
    is_tracked: bool
    version: int


class LoaderReaders:
    """The workers that have read every batch that a job has read from a loader.

    Two loaders may share a data set, or a sampler: what is noted of one counts for each part of it.
    All workers note the same.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, frozenset[int], bool]] = {}
        self._version = 0
        self._leaders: list[tuple[Reading, int]] = []  # of the epochs under way

    def reading(self, loader: Any, num_workers: int) -> Reading:
        """The readers of a loader that is read next, as far as is known."""
        self._drop_what_is_gone()
        parts = tuple(parts_of(loader))
        known = [self._known[id(part)] for part in parts if id(part) in self._known]
        was_written = any(known_written for _, _, known_written in known)
        is_tracked = was_written or not all(type(part) in _TOLD_ALONE for part in parts)
        ranks = frozenset(range(num_workers))
        if is_tracked:
            own = {id(part) for part in parts}
            for outer, leader in self._leaders:
                if not own.isdisjoint(map(id, outer.parts)):
                    ranks &= {leader}
        return self.again(Reading(parts, ranks, is_tracked, -1))

    @contextmanager
    def being_read(self, reading: Reading, leader: int) -> Iterator[None]:
        """An epoch is under way: what callbacks read of the same parts, its leader reads for all.

        It alone then knows what becomes of both.
        """
        entry = reading, leader
        self._leaders.append(entry)
        try:
            yield
        finally:
            self._leaders = [other for other in self._leaders if other is not entry]

    def again(self, reading: Reading) -> Reading:
        """The same, in the middle of an epoch: a callback may have read a part of it."""
        if reading.version == self._version:
            return reading
        ranks = reading.ranks
        if reading.is_tracked:
            known = (self._known.get(id(part), (None, ranks))[1] for part in reading.parts)
            ranks = ranks.intersection(*known)
        return replace(reading, ranks=ranks, version=self._version)

    def note(self, reading: Reading, ranks: Iterable[int], *, has_written: bool = False) -> None:
        """These workers have read what was read, and had missed nothing before.

        Args:
            reading: What was read.
            ranks: The workers.
            has_written: Whether steps have modified the batches, which may be the loader's own.
        """
        self._version += 1
        for part in reading.parts:
            if type(part) in _TOLD and not has_written:
                continue
            _, before, was_written = self._known.get(id(part), (None, ranks, False))
            found = frozenset(ranks).intersection(before)
            self._known[id(part)] = _held(part), found, has_written or was_written

    def _drop_what_is_gone(self) -> None:
        """Forget objects that nobody else holds: they can be no part of a loader any more.

        So it does not matter when that is noticed, which is not at the same time on all workers.
        """
        while gone := _gone(self._known):  # one may be held by another
            for key in gone:
                del self._known[key]

    def forget(self) -> None:
        """The job starts over, with processes that have read nothing."""
        self._known.clear()
        self._leaders.clear()
        self._version += 1


def parts_of(loader: Any) -> list[Any]:
    """The objects that a loader's batches may come from, itself included.

    Found through attributes, containers, closures and iterators. What reading cannot change is left
    out: numbers, texts, tensors, classes, networks.
    """
    found: dict[int, Any] = {}
    coming = deque((loader,))
    while coming and len(found) < _MAX_PARTS:
        part = coming.popleft()
        if id(part) not in found and not _is_atom(part):
            found[id(part)] = part
            coming.extend(_inside(part))
    return [part for part in found.values() if not isinstance(part, _FIXED)]


def _held(part: Any) -> Any:
    """A guard that keeps a part's identity from becoming another's unnoticed."""
    try:
        return weakref.ref(part)
    except TypeError:  # lists, dictionaries, iterators
        return part


def _gone(known: Mapping[int, tuple[Any, ...]]) -> list[int]:
    """The keys of those that nobody else holds."""
    return [
        key
        for key, entry in known.items()
        if (
            entry[0]() is None
            if isinstance(entry[0], weakref.ref)
            else sys.getrefcount(entry[0]) <= _OWN_REFERENCES
        )
    ]


_ENTRY: tuple[Any, ...] = ([],)
_OWN_REFERENCES = sys.getrefcount(_ENTRY[0])  # of what stands in one entry and nowhere else


def _is_atom(part: Any) -> bool:
    is_function = isinstance(part, types.FunctionType)
    return isinstance(part, _ATOMS) or (
        is_function and (part.__module__ or "").startswith("torch.")
    )


def _leads_nowhere(item: Any) -> bool:
    """Whether an item is plain, or a tuple of what is plain: a loader may be a list of those."""
    kind = type(item)
    return kind in _PLAIN or (kind is tuple and _PLAIN.issuperset(map(type, item[:_MAX_ITEMS])))


def _inside(part: Any) -> Iterator[Any]:
    """The objects that an object holds, one step further."""
    if isinstance(part, dict):
        yield from itertools.islice(part.values(), _MAX_ITEMS)
    elif isinstance(part, _CONTAINERS):
        items = itertools.islice(part, _MAX_ITEMS)
        yield from itertools.filterfalse(_leads_nowhere, items)
    elif isinstance(part, types.FunctionType):
        filled = filter(gc.get_referents, part.__closure__ or ())  # empty until a variable is set
        yield from (cell.cell_contents for cell in filled)
        yield from part.__defaults__ or ()
    elif isinstance(part, types.MethodType):
        yield from (part.__self__, part.__func__)
    elif isinstance(part, functools.partial):
        yield from (part.func, *part.args, *part.keywords.values())
    elif isinstance(part, types.GeneratorType):
        yield from part.gi_frame.f_locals.values() if part.gi_frame is not None else ()
        yield part.gi_yieldfrom
    elif type(part).__module__ in ("builtins", "itertools"):  # map, zip, islice, ...
        yield from gc.get_referents(part)
    yield from (attributes_of(part) or {}).values()
