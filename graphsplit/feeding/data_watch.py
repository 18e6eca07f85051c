"""Whether the samples of a loader may be read apart: each worker those that it needs, no others.

A sample must not depend on what was read before it, nor a row of a batch on the rows beside it.
Before replicas read apart, one batch is watched while it is read, and read once more in a forked
child, in pieces and in another order: what that changes is gone with the child. While they do,
generators are watched at every batch, and all Python state that the data set leads to now and then;
a loader's processes do so by themselves.
"""

from __future__ import annotations

import gc
import itertools
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from graphsplit.batches.microbatches import Divider
from graphsplit.batches.rows import (
    BatchRequest,
    Opening,
    RowLayout,
    RowsRead,
    divide_rows,
    may_be_mask,
    why_no_rows,
)
from graphsplit.batches.signature import Signature, leaves
from graphsplit.capture.reach.holders import ALL_OF_THE_PROCESS, GENERATORS, Holder
from graphsplit.capture.reach.names import CodeNames
from graphsplit.capture.reach.reach import Walk, holders
from graphsplit.checkpoint.position import generators_of
from graphsplit.errors import ConfigurationError
from graphsplit.guards.classes import own_dictionary
from graphsplit.job.process_generators import GeneratorWatch
from graphsplit.optimizers.child_process import ChildError, ForkedTrial, raised_where
from graphsplit.tensor_meta import has_same_bits

FIX = 'Model(..., reading="batches"): each replica then reads whole batches.'
OTHER_BATCH = (
    "training step {} is done again after a worker was lost, and its batch has other values now\n"
    "  what a data set keeps, and reading or a callback changes, is not brought back\n"
    "  Fix: give the loader state_dict() and load_state_dict(); or let a callback with a state set "
    "it in its load_state_dict()."
)
_DEADLINE_S = 60.0
_FEW = 256
_MOST_ITEMS = 1000  # of one container; it is held as a whole all the same
_MOST_COPIED = 1 << 20  # bytes of an array
_LARGE = (list, dict, set, frozenset, tuple, deque)


def why_whole(loader: Any, divider: Divider, *, is_grouped: bool) -> str:
    """The reason to read whole batches that is known before; empty if there is none.

    Args:
        loader: The loader.
        divider: Divides its batches.
        is_grouped: Whether replicas run batches that follow each other, each one of them.
    """
    data = getattr(loader, "dataset", None)
    if divider.num_microbatches == 1 and not is_grouped:
        return "batches are not split"
    if type(loader) is not DataLoader:
        return f"the loader is a {type(loader).__name__}, no DataLoader of torch"
    if isinstance(data, IterableDataset):
        return f"the data set, a {type(data).__name__}, has no samples by index"
    if type(data).__module__.startswith("torch.utils.data.datapipes"):
        return "the data set is a DataPipe"
    if loader.batch_sampler is None:
        return "the loader has batch_size=None: its samples are batches"
    if not getattr(loader, "in_order", True):
        return "the loader has in_order=False"
    for name in ("split", "loss_weight"):
        if getattr(divider, name) is not None:
            return f"the Model has {name}=, which sees all of a batch"
    return ""


class DrawWatch:
    """Tells whether generators of random numbers are drawn from, as while a batch is read.

    Args:
        loader: A loader; its generators are watched, and those of the process. None: only these.
        others: More generators.
    """

    def __init__(self, loader: Any, others: Sequence[Holder] = ()) -> None:
        self._watch = GeneratorWatch()
        self._others = others
        own = [("torch's generator", torch.default_generator)]
        self._generators = [*own, *((f"{p}", g) for p, g in generators_of(loader).items())]
        self._before: list[torch.Tensor] = []

    def begin(self) -> None:
        """Note the states before what is watched."""
        self._watch.look()
        self._before = [generator.get_state() for _, generator in self._generators]
        for one in self._others:
            one.note()

    def drawn(self) -> str:
        """The generator that was drawn from since; empty if none was."""
        found = self._watch.look()
        pairs = zip(self._generators, self._before, strict=True)
        names = [name for (name, own), before in pairs if not torch.equal(own.get_state(), before)]
        names += ["Python's random"] * bool(found.python) + ["numpy.random"] * bool(found.numpy)
        names += [f"a generator in {one.name}" for one in self._others if one.has_changed()]
        return ", ".join(names)


def generators_near(frame: FrameType, apart: Iterable[Any]) -> list[Holder]:
    """Generators of a script's own that code may draw from where it stands.

    Args:
        frame: The frame of the code. Its variables are looked at, the globals that it names, what
            these hold, and what functions among them read.
        apart: Objects that are passed over.
    """
    near = [*frame.f_locals.values(), *map(frame.f_globals.get, frame.f_code.co_names)]
    passed = {id(torch.default_generator), *map(id, apart)}
    found: dict[int, Any] = {}
    for _ in range(3):
        near = [one for one in near if id(one) not in passed]
        passed.update(map(id, near))
        found.update((id(one), one) for one in near if isinstance(one, GENERATORS))
        near = [inner for one in near for inner in _held_by(one)]
    return holders(found.values())[0]


def _held_by(one: Any) -> Iterable[Any]:
    """The values in an object's attributes, or that a function reads."""
    if isinstance(one, FunctionType):
        full = filter(gc.get_referents, one.__closure__ or ())
        named = map(one.__globals__.get, one.__code__.co_names)
        return [*(cell.cell_contents for cell in full), *named]
    if isinstance(one, MethodType):
        return (one.__self__, one.__func__)
    held = None if isinstance(one, (ModuleType, nn.Module)) else own_dictionary(one)
    return held.values() if held is not None else ()


class DataWatch:
    """Tells whether reading changes Python state that a data set or its ``collate_fn`` leads to.

    Args:
        loader: The loader; None in one of its processes.
        roots: The data set and ``collate_fn``.

    Attributes:
        is_quick: Whether it costs little beside the reading of a batch.
    """

    def __init__(self, loader: Any, roots: tuple[Any, Any]) -> None:
        own = {id(generator) for generator in generators_of(loader).values()} | ALL_OF_THE_PROCESS
        walk = _DataWalk(())
        found = walk.run(roots)[0]
        self._held = [one for one in found if one.decides and one.key not in own]
        self.is_quick = not walk.is_long and len(self._held) <= _FEW

    def begin(self) -> None:
        """Note what is held now."""
        for one in self._held:
            one.note()

    def changed(self) -> str:
        """The name of a thing that is otherwise than it was noted; empty if nothing is."""
        return next((one.name for one in self._held if one.has_changed()), "")


class ReadWatch:
    """Tells what reading a batch of a loader draws or changes.

    Args:
        loader: The loader; None in one of its processes.
        roots: The data set and ``collate_fn``; those of the loader if None.
    """

    def __init__(self, loader: Any, roots: tuple[Any, Any] | None = None) -> None:
        self._loader = loader
        self._roots = roots
        self._draws = DrawWatch(loader)
        self._state: DataWatch | None = None
        self._has_state = False

    def begin(self, *, has_state: bool) -> None:
        """A batch is read next.

        Args:
            has_state: Whether all state is looked at, also where that takes long.
        """
        if self._state is None or has_state:
            roots = self._roots or (self._loader.dataset, self._loader.collate_fn)
            self._state = DataWatch(self._loader, roots)
        elif self._state.is_quick:
            self._state.begin()
        self._has_state = has_state or self._state.is_quick
        self._draws.begin()

    def found(self) -> str:
        """The change that reading it has made, in words; empty if there is none."""
        drawn = self._draws.drawn()
        if drawn:
            return f"reading a batch draws from {drawn}"
        assert self._state is not None
        changed = self._state.changed() if self._has_state else ""
        return f"reading a batch changes {changed}" if changed else ""

    def check(self) -> None:
        """Refuse a change, while replicas read their own rows.

        Raises:
            ConfigurationError: There is one.
        """
        found = self.found()
        if found:
            raise ConfigurationError(
                f"{found}, while each replica reads its own rows; it did not when that was tried\n"
                f"  Fix: {FIX}"
            )


class ProcessWatch:
    """A loader's ``collate_fn`` in its processes: as it is, and watched while rows are read apart.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: Any) -> None:
        self._collate, self._start = loader.collate_fn, loader.worker_init_fn
        self._is_on = torch.zeros((), dtype=torch.bool).share_memory_()
        self._num_read = 0
        self._watch: ReadWatch | None = None  # in a process

    def put(self, *, is_on: bool) -> None:
        """Let the processes watch, or not, from the next batch on."""
        self._is_on.fill_(is_on)

    def begin(self, number: int) -> None:
        """Begin a process, as its ``worker_init_fn``."""
        if self._start is not None:
            self._start(number)
        worker = get_worker_info()
        assert worker is not None
        self._watch = ReadWatch(None, (worker.dataset, self._collate))
        self._watch.begin(has_state=False)

    def __call__(self, samples: Any) -> Any:
        """Collate the samples of a batch, just read.

        Raises:
            ConfigurationError: Reading them has drawn or changed something.
        """
        batch = self._collate(samples)
        assert self._watch is not None
        if self._is_on:
            self._watch.check()
            self._num_read += 1
        self._watch.begin(has_state=is_power(self._num_read))
        return batch


def is_power(number: int) -> bool:
    """Whether a number is 0, 1, 2, 4, 8, ...: when all state is looked at."""
    return number & (number - 1) == 0


class _DataWalk(Walk):
    """Goes through a data set, which may be large; past what code of installed packages names.

    Attributes:
        is_long: Whether it met something large.
    """

    most = 1 << 12
    is_long = False

    def _visit(self, value: Any, name: str) -> None:
        super()._visit(value, name)
        if str(type(value).__module__).startswith("torch.utils.data"):  # holds the user's data set
            self._visit_attributes(value, name)

    def _visit_names(self, held: dict[str, Any], names: frozenset[str], inner: CodeNames) -> None:
        if "site-packages" not in str(held.get("__file__")):
            super()._visit_names(held, names, inner)

    def _visit_container(self, value: Any, name: str) -> bool:
        if isinstance(value, np.ndarray) and (value.nbytes > _MOST_COPIED or value.dtype.hasobject):
            if _is_summed(value):
                self.is_long = True
                self._hold(value, name, lambda: _sum_of(value), lambda _: None)
            return True
        self.is_long |= isinstance(value, np.ndarray) and value.nbytes > _MOST_ITEMS
        if not isinstance(value, _LARGE) or len(value) <= _MOST_ITEMS:
            return super()._visit_container(value, name)
        self.is_long = True
        kind = dict if isinstance(value, dict) else list
        self._hold(value, name, lambda: kind(value), lambda _: None)
        items = value.values() if isinstance(value, dict) else value
        for item in itertools.islice(items, _MOST_ITEMS):
            self._push(item, name)
        return True


def _is_summed(array: np.ndarray[Any, Any]) -> bool:
    """Whether a large array is watched by a sum: code may write to it, and it is in memory."""
    is_whole = array.flags.c_contiguous or array.flags.f_contiguous
    is_file = isinstance(array, np.memmap) or isinstance(array.base, np.memmap)
    return is_whole and array.flags.writeable and not (is_file or array.dtype.hasobject)


def _sum_of(array: np.ndarray[Any, Any]) -> int:
    octets = array.reshape(-1, order="A").view(np.uint8)
    words = octets.view(np.uint64) if octets.size % 8 == 0 else octets
    return int(np.add.reduce(words, dtype=np.uint64))


def probe(
    loader: Any, whole: RowsRead, layout: RowLayout, readers: Sequence[int], opening: Opening
) -> str:
    """Read a batch once more, in pieces, in a process of its own.

    Args:
        loader: The loader.
        whole: The batch as it was read.
        layout: How it would be read.
        readers: The workers that would read.
        opening: As for ``divide_rows``.

    Returns:
        Why it must be read whole; empty if the pieces are those of the whole batch.
    """
    found = leaves(whole.arguments)
    why = why_no_rows(found, layout.num_rows)
    if why:
        return why
    if may_be_mask(found):
        return "a batch holds whole numbers of 0 and 1 alone, which may be a mask"
    requests = [
        BatchRequest(whole.request.number, whole.request.indices, layout, reader)
        for reader in reversed(readers)
    ]

    def work() -> str:
        watch = ReadWatch(loader)
        watch.begin(has_state=True)
        compared = [_difference(loader, request, whole, opening) for request in requests]
        return watch.found() or next(filter(None, compared), "")

    try:
        with _files_kept(), ForkedTrial(work, deadline_s=_DEADLINE_S) as trial:
            return str(trial.report())
    except ChildError as error:
        return f"reading rows by themselves could not be tried: {error}"


def fetch(loader: Any, indices: Sequence[Any]) -> Any:
    """Some samples, read and collated as a ``DataLoader`` does in its own process."""
    data = loader.dataset
    read = getattr(data, "__getitems__", None)
    samples = read(list(indices)) if read else [data[index] for index in indices]
    return loader.collate_fn(samples)


def _difference(loader: Any, request: BatchRequest, whole: RowsRead, opening: Opening) -> str:
    """The difference of rows that are read by themselves from the whole batch; empty: none."""
    try:
        batch = fetch(loader, [request.indices[position] for position in request.positions])
    except Exception as error:
        return f"rows cannot be read by themselves: {raised_where(error)}"
    mine = divide_rows(batch, request, opening)
    if mine is None or not mine.fits(whole.shape()):
        return "rows that are read by themselves look otherwise than in the whole batch"
    pairs = [
        (mine.microbatches[part], whole.microbatches[part])
        for part in (request.layout.needed[request.worker] if request.layout else ())
    ]
    for one, other in (*pairs, (mine.compared(), whole.compared())):
        is_alike = Signature.of(one) == Signature.of(other)
        if not (is_alike and all(map(has_same_bits, leaves(one), leaves(other)))):
            return "rows that are read by themselves have other values than in the whole batch"
    return ""


@contextmanager
def _files_kept() -> Iterator[None]:
    """Put the positions in open files back, which a child shares."""
    numbers = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ()
    before = {number: _position(number) for number in map(int, numbers)}
    try:
        yield
    finally:
        for number, position in before.items():
            if position is not None and _position(number) not in (None, position):
                os.lseek(number, position, os.SEEK_SET)


def _position(number: int) -> int | None:
    """The position in an open file; None where it has none."""
    try:
        is_file = stat.S_ISREG(os.fstat(number).st_mode)
        return os.lseek(number, 0, os.SEEK_CUR) if is_file else None
    except OSError:
        return None
