"""A loader's batches as one worker reads them: whole, or its own rows where that is safe.

In an evaluation its own rows are those of the batches that it runs.

A ``DataLoader`` asks its batch sampler which samples the next batch has. All workers ask theirs, so
that shuffling is that of one process; a replica then reads the samples of its own microbatches
alone, and one more, which all read and compare.

Who needs what follows from a plan, so the first batch of each size is read whole. The leader
decides by a later one (``data_watch``), and tells the others by its ticket from which batch on: a
loader with processes has asked for some more by then. Whatever is not as it was then is an error,
or read whole again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from graphsplit.batches.microbatches import BatchDescription, Divider, Division
from graphsplit.batches.rows import (
    NOT_HERE,
    BatchRequest,
    RowLayout,
    RowsRead,
    are_divided,
    divide_rows,
    rows_in_words,
)
from graphsplit.batches.signature import fingerprint
from graphsplit.checkpoint.position import EpochStart
from graphsplit.errors import ConfigurationError
from graphsplit.feeding.data_watch import (
    FIX,
    ProcessWatch,
    ReadWatch,
    fetch,
    is_power,
    probe,
    why_whole,
)
from graphsplit.feeding.groups import Group, batches_of, grouped, num_batches
from graphsplit.logs import say
from graphsplit.planning.step_plan import PlannedStep


class OwnRows:
    """The batches of one loader, through all epochs.

    Attributes:
        loader: The loader.
        turns: The numbers of the batches in the epoch at which reading changes: they are read whole
            at first, by rows from the first of these on, whole again from the second one, ...
        line: Who reads what, in words; empty where nothing is decided.

    Args:
        loader: See above.
        divider: Divides its batches.
        rank: This worker.
        has_loss_fn: As for ``split_batch``.
        why: Why batches are read whole, if that is decided.
        is_grouped: Whether replicas run batches that follow each other, each one of them.
    """

    def __init__(
        self,
        loader: Any,
        divider: Divider,
        rank: int,
        *,
        has_loss_fn: bool,
        why: str = "",
        is_grouped: bool = False,
    ) -> None:
        self.loader = loader
        self.turns: tuple[int, ...] = ()
        self.line = ""
        self._divide = partial(divider.divide, has_loss_fn=has_loss_fn)
        self._opening = partial(divider.arguments, has_loss_fn=has_loss_fn)
        self._rank = rank
        self._is_grouped = is_grouped
        self._why = why or why_whole(loader, divider, is_grouped=is_grouped)
        self._stops = ""  # why reading own rows ends, once all have been told
        # By the number of rows; for each batch of a group.
        self._layouts: dict[int, tuple[RowLayout, ...]] = {}
        self._requests: deque[BatchRequest | None] = deque()
        self._num_asked = 0  # batches of this epoch
        self._run = 0, 0  # the number of rows of the last ones, and how many these are
        self._readers: Sequence[int] = ()
        self._leads = self._is_tried = False
        self._found = ""
        self._hook: _Hook | None = None
        self._watch: ReadWatch | None = None
        if not self._why:
            self._watch = ReadWatch(loader)

    def is_by_rows(self, number: int) -> bool:
        """Whether workers read their own rows of a batch, by its number in the epoch."""
        return sum(turn <= number for turn in self.turns) % 2 == 1

    @property
    def _is_on(self) -> bool:
        return len(self.turns) % 2 == 1

    def divisions(self, start: EpochStart, *, leads: bool) -> Iterator[Division]:
        """The batches of an epoch, divided.

        Args:
            start: Where it begins.
            leads: Whether this worker reads first, and decides.
        """
        self._leads = leads
        if self._watch is None:
            batches = start.open(self.loader)
            # In a generator: what it raises never ends the epoch.
            return (self._divide(batch) for batch in batches)
        if leads:
            self.turns = (0,) if self._is_on else ()
        read = start.open(self.loader, self._iterate)
        return (self._divided(batch, request) for batch, request in read)

    def _iterate(self, loader: Any) -> Iterator[tuple[Any, BatchRequest | None]]:
        """Iterate over a loader whose batch sampler names the rows of this worker."""
        self._requests.clear()
        self._num_asked, self._run = 0, (0, 0)
        self._hook = _hook_of(loader)
        return self._read(self._hook.iterate(loader, self._ask))

    def _ask(self, number: int, indices: Any) -> Any:
        """The samples to read of a batch; all of it is what the sampler has named."""
        self._num_asked = number + 1
        if self._watch is None or not isinstance(indices, (list, tuple)) or not indices:
            self._requests.append(None)
            return indices
        layout, by_rows = self._layout_of_next(len(indices)), self.is_by_rows(number)
        may_try = self._leads and not (self._why or by_rows or self._processes)
        self._is_tried = may_try and layout is not None
        request = BatchRequest(number, tuple(indices), layout if by_rows else None, self._rank)
        if len(request.positions) == len(indices):
            request = request.whole()
        self._requests.append(request)
        if by_rows and self._processes is not None:
            self._processes.put(is_on=True)
        elif by_rows or self._is_tried:
            self._watch.begin(has_state=self._is_tried or is_power(number))
        if request.layout is None:
            return indices
        return [indices[position] for position in request.positions]

    def _layout_of_next(self, size: int) -> RowLayout | None:
        """How the next batch is read, by its number of rows and of those like it before it."""
        before, count = self._run
        count = count if size == before else 0
        self._run = size, count + 1
        layouts = self._layouts.get(size)
        return layouts[count % len(layouts)] if layouts else None

    @property
    def _processes(self) -> ProcessWatch | None:
        return None if self._hook is None else self._hook.processes

    def _read(self, batches: Iterator[Any]) -> Iterator[tuple[Any, BatchRequest | None]]:
        assert self._watch is not None
        for batch in batches:
            request = self._requests.popleft() if self._requests else None
            if request is not None:
                request = replace(request, by_rows=self.is_by_rows(request.number))
            by_rows = request is not None and request.by_rows
            if self._processes is not None:
                if not by_rows:
                    self._processes.put(is_on=False)
            elif by_rows:
                self._watch.check()
            elif self._is_tried:
                self._found = self._found or self._watch.found()
            yield batch, request
        if self._processes is not None:
            self._processes.put(is_on=False)

    def _divided(self, batch: Any, request: BatchRequest | None) -> Division:
        if request is not None and request.layout is not None:
            found = divide_rows(batch, request, self._opening)
            is_like = found is not None and request.by_rows and found.looks_like_others()
            return found if found is not None and is_like else self._whole(request)
        division = self._divide(batch)
        return division if request is None else RowsRead(**vars(division), request=request)

    def _whole(self, request: BatchRequest) -> RowsRead:
        """All of a batch of which some rows were read."""
        assert self._watch is not None
        self._watch.begin(has_state=is_power(request.number))
        batch = fetch(self.loader, request.indices)
        self._watch.check()
        division = self._divide(batch)
        return RowsRead(**vars(division), request=request.whole())

    def decide(self, division: Division) -> Division:
        """The leader has read a batch; its ticket tells how those are read that it asks for next.

        Returns:
            The batch; all of it where it looks otherwise than others of its size.
        """
        is_tried = self._is_tried or self._processes is not None
        found, self._is_tried, self._found = self._found, False, ""
        if type(division) is Division:  # no loader whose sampler is asked
            return division
        is_on, batches = self._is_on, list(map(self._as_it_looks, batches_of(division)))
        if is_on and self._stops:
            self._turn()
            self._why, self._stops = self._stops, ""
            self._say(f"each replica reads whole batches from now on: {self._why}")
        elif is_tried and not (is_on or self._why):
            self._try(batches[-1], found)
        return grouped(batches)

    def _as_it_looks(self, batch: Division) -> Division:
        """A batch; all of it where it looks otherwise than others of its size."""
        if not isinstance(batch, RowsRead):
            return batch
        size = len(batch.request.indices)
        known = self._layouts.get(size)
        if known is None or fit(batch, known[0].description):
            return batch
        self.stop(f"batches of {size} rows look otherwise from one to the next")
        return batch if batch.is_whole else self._whole(batch.request)

    def _try(self, batch: Division, found: str) -> None:
        """Decide, by a batch that was read whole; what reading it has changed is found."""
        if not isinstance(batch, RowsRead):
            return
        layouts = self._layouts.get(len(batch.request.indices), ())
        if not are_divided(layouts):
            return
        for layout in layouts:
            found = found or probe(self.loader, batch, layout, self._readers, self._opening)
        self._why = found
        if found:
            self._say(f"each replica reads whole batches: {found}")
        else:
            self._turn()
            self._say(self._in_words(layouts))

    def _turn(self) -> None:
        self.turns = (*self.turns, self._num_asked)

    def stop(self, why: str) -> None:
        """Read whole batches again, once all have been told."""
        if self._is_on:
            self._stops = self._stops or why

    def refuse(self, why: str) -> None:
        """Read whole batches, before an epoch; again, if it is on."""
        self.stop(why)
        if not self._is_on:
            self._why = self._why or why

    def note(
        self, division: Division | None, shape: BatchDescription, planned: PlannedStep
    ) -> None:
        """The plan of a batch is known: remember who needs what of those of its size."""
        if not planned.has_lanes:
            return
        if self._is_grouped and not num_batches(shape) == planned.first.plan.together > 1:
            return
        self._readers = planned.consumers
        is_told = not (self._why and self._leads) or bool(self.line)
        if not is_told and are_divided(self._layouts_by(shape, planned)):
            self._say(f"each replica reads whole batches: {self._why}")
        batch = None if division is None else batches_of(division)[0]
        if isinstance(batch, RowsRead) and not planned.writes_inputs:
            size = len(batch.request.indices)
            self._layouts[size] = layouts = self._layouts_by(shape, planned, size)
            if not self._leads:
                self.line = self._in_words(layouts) if self._is_on else ""

    def _layouts_by(
        self, shape: BatchDescription, planned: PlannedStep, size: int = 0
    ) -> tuple[RowLayout, ...]:
        """The way to read the batches of a step, each of a number of rows."""
        read = planned.microbatches_read()
        if not self._is_grouped:
            return (RowLayout(shape, size, read),)
        look = BatchDescription(shape.first)
        return tuple(
            RowLayout(look, size, tuple((0,) if place in parts else () for parts in read))
            for place in range(num_batches(shape))
        )

    def _in_words(self, layouts: Sequence[RowLayout]) -> str:
        rows = rows_in_words(layouts, self._readers)
        of_each = " of each batch" if self._is_grouped else ""
        return f"each replica reads its own rows: {rows}, and one{of_each} to compare"

    def enough(
        self, division: Division, planned: PlannedStep, shape: BatchDescription, *, is_sent: bool
    ) -> Division:
        """The batch with all that a step needs of it.

        Args:
            division: The batch, as it was read.
            planned: The step.
            shape: How it was announced.
            is_sent: Whether others are sent it.

        Raises:
            ConfigurationError: More was read of it, and it looks otherwise.
        """
        if type(division) is Division:
            return division
        needed = planned.microbatches_read()[self._rank]
        found, start = [], 0
        for batch in batches_of(division):
            if isinstance(batch, RowsRead) and not batch.is_whole:
                here = [p - start for p in needed if 0 <= p - start < len(batch.microbatches)]
                is_missing = any(batch.microbatches[part] is NOT_HERE for part in here)
                if is_missing or is_sent or planned.writes_inputs:
                    batch = self._whole(batch.request)
            start += len(batch.microbatches)
            found.append(batch)
        enough = grouped(found)
        is_new = any(a is not b for a, b in zip(found, batches_of(division), strict=True))
        if is_new and not fit(enough, shape):
            raise ConfigurationError(
                f"a batch looks otherwise when all of it is read\n  Fix: {FIX}"
            )
        return enough

    def target_senders(self, planned: PlannedStep, first: int) -> tuple[int | None, ...]:
        """For each batch of an evaluation's step, who sends its target to where metrics are.

        Args:
            planned: The step.
            first: The number of its first batch in the epoch.

        Returns:
            None for those that are read there.
        """
        read, home = planned.microbatches_read(), planned.first.plan.home
        return tuple(
            None
            if place in read[home] or not self.is_by_rows(first + place)
            else next(worker for worker, parts in enumerate(read) if place in parts)
            for place in range(planned.sizes[0])
        )

    def _say(self, line: str) -> None:
        self.line = line
        say(line, event="reading")


def is_all_read(division: Division) -> bool:
    """Whether all of a step's batches were read whole."""
    return all(not isinstance(x, RowsRead) or x.is_whole for x in batches_of(division))


def fit(division: Division, announced: BatchDescription) -> bool:
    """Whether what was read of a step's batches looks as a description says."""
    if isinstance(division, Group):
        look = BatchDescription(announced.first)
        same = division.weights == announced.weights
        return same and all(fit(batch, look) for batch in division.batches)
    if isinstance(division, RowsRead) and not division.is_whole:
        return division.fits(announced)
    return division.shape() == announced


def checksum_of(division: Division) -> int:
    """The checksum by which workers compare what each has read of a step's batches."""
    if type(division) is Division:
        return fingerprint(division.arguments)
    checksum = 0
    for batch in batches_of(division):
        checksum = checksum * 31 & 0xFFFFFFFF
        if isinstance(batch, RowsRead) and batch.request.by_rows:
            checksum ^= batch.checksum()
        else:
            checksum ^= fingerprint(batch.arguments)
    return checksum


class _Hook:
    """A loader's batch sampler that asks what to read of each batch that the real one names.

    Processes that persist keep it, with the iterator that they belong to, which somebody else may
    use too: so it asks while its loader is iterated over by ``iterate``, and no other time.

    Attributes:
        processes: What watches the loader's processes, if it has some.
    """

    def __init__(self, loader: Any) -> None:
        self._sampler = loader.batch_sampler
        self._ask: Callable[[int, Any], Any] | None = None
        self.processes = ProcessWatch(loader) if loader.num_workers else None

    def iterate(self, loader: Any, ask: Callable[[int, Any], Any]) -> Iterator[Any]:
        """Iterate over the loader; ``ask`` gives the samples to read of each batch."""
        held = vars(loader)
        places: dict[str, Any] = {"batch_sampler": self}
        if self.processes is not None:
            self.processes.put(is_on=False)
            places |= {"collate_fn": self.processes, "worker_init_fn": self.processes.begin}
        own = {name: held[name] for name in places}
        held.update(places)
        self._ask = ask
        try:
            return iter(loader)
        finally:
            held.update(own)
            self._ask = None

    def __iter__(self) -> Iterator[Any]:
        # Now, as a loader does: a sampler may draw here.
        named: Iterator[Any] = iter(self._sampler)
        ask = self._ask
        if ask is None:
            return named
        return (ask(number, indices) for number, indices in enumerate(named))

    def __len__(self) -> int:
        return len(self._sampler)


_hooks: WeakKeyDictionary[Any, _Hook] = WeakKeyDictionary()


def _hook_of(loader: Any) -> _Hook:
    """A new one, but where its processes may have one."""
    if not loader.persistent_workers:
        return _Hook(loader)
    if loader not in _hooks:
        _hooks[loader] = _Hook(loader)
    return _hooks[loader]
