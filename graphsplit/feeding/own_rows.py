"""A loader's batches as one worker reads them: whole, or its own rows where that is safe.

A ``DataLoader`` asks its batch sampler which samples the next batch has. All workers ask theirs, so
that shuffling is that of one process; a replica then reads the samples of its own microbatches
alone, and one more, which all read and compare.

Who needs what follows from a plan, so the first batch of each size is read whole. The leader
decides by a later one (``data_watch``), and tells the others by its ticket: what that says holds
for the batches after it. Whatever is not as it was then is an error, or read whole again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from graphsplit.batches.batch import fingerprint
from graphsplit.batches.microbatches import BatchDescription, Divider, Division
from graphsplit.batches.rows import (
    NOT_HERE,
    BatchRequest,
    RowLayout,
    RowsRead,
    divide_rows,
    rows_in_words,
)
from graphsplit.checkpoint.position import EpochStart
from graphsplit.errors import ConfigurationError
from graphsplit.feeding.data_watch import DataWatch, DrawWatch, fetch, probe, why_whole
from graphsplit.logs import say
from graphsplit.planning.step_plan import PlannedStep

FIX = 'Model(..., reading="batches"): each replica then reads whole batches.'


class OwnRows:
    """The batches of one loader, through all epochs.

    Attributes:
        loader: The loader.
        is_on: Whether replicas read their own rows of the batches that are read next.
        line: Who reads what, in words; empty where nothing is decided.

    Args:
        loader: See above.
        divider: Divides its batches.
        rank: This worker.
        has_loss_fn: As for ``split_batch``.
        why: Why batches are read whole, if that is decided.
    """

    def __init__(
        self, loader: Any, divider: Divider, rank: int, *, has_loss_fn: bool, why: str = ""
    ) -> None:
        self.loader = loader
        self.is_on = False
        self.line = ""
        self._divider = divider
        self._rank = rank
        self._has_loss_fn = has_loss_fn
        self._why = why or why_whole(loader, divider)
        self._stops = ""  # why reading own rows ends, once all have been told
        self._layouts: dict[int, RowLayout] = {}  # by the number of rows
        self._requests: deque[BatchRequest | None] = deque()
        self._draws = None if self._why else DrawWatch(loader)
        self._readers: Sequence[int] = ()
        self._drawn = ""
        self._state: DataWatch | None = None
        self._leads = self._is_first = self._is_tried = False

    def divisions(self, start: EpochStart, *, leads: bool) -> Iterator[Division]:
        """The batches of an epoch, divided.

        Args:
            start: Where it begins.
            leads: Whether this worker reads first, and decides.
        """
        self._leads, self._is_first = leads, True
        divide = self._divider.divide  # in a generator: what it raises never ends the epoch
        if self._draws is None:
            batches = start.open(self.loader)
            return (divide(batch, has_loss_fn=self._has_loss_fn) for batch in batches)
        read = start.open(self.loader, self._iterate)
        return (self._divided(batch, request) for batch, request in read)

    def _iterate(self, loader: Any) -> Iterator[tuple[Any, BatchRequest | None]]:
        """Iterate over a loader whose batch sampler names the rows of this worker."""
        held = vars(loader)
        own = held["batch_sampler"]
        held["batch_sampler"] = _Asking(own, self._ask)
        self._requests.clear()
        try:
            batches = iter(loader)
        finally:
            held["batch_sampler"] = own
        return self._read(batches)

    def _ask(self, number: int, indices: Any) -> Any:
        """The samples to read of a batch; all of it is what the sampler has named."""
        if self._draws is None or not isinstance(indices, (list, tuple)) or not indices:
            self._requests.append(None)
            return indices
        layout = self._layouts.get(len(indices))
        may_try = self._leads and not (self._is_first or self._why or self.is_on)
        self._is_tried = may_try and layout is not None and layout.divides
        request = BatchRequest(
            number, tuple(indices), layout if self.is_on else None, self._rank, self.is_on
        )
        if len(request.positions) == len(indices):
            request = request.whole()
        self._requests.append(request)
        if self._is_tried or self.is_on:
            if self._state is None or self._is_tried or request.is_due:
                self._state = DataWatch(self.loader)
            elif self._state.is_quick:
                self._state.begin()
            self._draws.begin()
        if request.layout is None:
            return indices
        return [indices[position] for position in request.positions]

    def _read(self, batches: Iterator[Any]) -> Iterator[tuple[Any, BatchRequest | None]]:
        for batch in batches:
            request = self._requests.popleft()
            if request is not None and request.by_rows:
                self._check(request)
            elif self._is_tried:
                self._drawn = self._changes()
            yield batch, request

    def _changes(self, *, of_state: bool = True) -> str:
        """The change that reading a batch has made, in words; empty if there is none."""
        assert self._draws is not None and self._state is not None
        drawn = self._draws.drawn()
        if drawn:
            return f"reading a batch draws from {drawn}"
        changed = self._state.changed() if of_state else ""
        return f"reading a batch changes {changed}" if changed else ""

    def _check(self, request: BatchRequest) -> None:
        assert self._state is not None
        found = self._changes(of_state=request.is_due or self._state.is_quick)
        if found:
            raise ConfigurationError(
                f"{found}, while each replica reads its own rows; it did not when that was tried\n"
                f"  Fix: {FIX}"
            )

    def _divided(self, batch: Any, request: BatchRequest | None) -> Division:
        if request is not None and request.layout is not None:
            found = divide_rows(batch, request, has_loss_fn=self._has_loss_fn)
            return self._whole(request) if found is None else found
        division = self._divider.divide(batch, has_loss_fn=self._has_loss_fn)
        return division if request is None else RowsRead(**vars(division), request=request)

    def _whole(self, request: BatchRequest) -> RowsRead:
        """All of a batch of which some rows were read."""
        assert self._draws is not None and self._state is not None
        self._state.begin()
        self._draws.begin()
        batch = fetch(self.loader, request.indices)
        self._check(request)
        division = self._divider.divide(batch, has_loss_fn=self._has_loss_fn)
        return RowsRead(**vars(division), request=request.whole())

    def decide(self, division: Division) -> Division:
        """The leader has read a batch; its ticket tells how those after it are read.

        Returns:
            The batch; all of it where it looks otherwise than others of its size.
        """
        is_first, self._is_first = self._is_first, False
        is_tried, self._is_tried = self._is_tried, False
        if not isinstance(division, RowsRead):
            return division
        layout = division.request.layout
        if layout is not None and not division.fits(layout.description):
            division = self._whole(division.request)
            self.stop(f"batches of {layout.num_rows} rows look otherwise from one to the next")
        if self._stops and not is_first:  # what the first ticket says is for its own batch, too
            self.is_on, self._why, self._stops = False, self._stops, ""
            self._say(f"each replica reads whole batches from now on: {self._why}")
        elif is_tried:
            layout = self._layouts[len(division.request.indices)]
            readers, has_loss_fn = self._readers, self._has_loss_fn
            found = self._drawn or probe(
                self.loader, division, layout, readers, has_loss_fn=has_loss_fn
            )
            self.is_on, self._why = not found, found
            self._say(
                f"each replica reads whole batches: {found}" if found else self._in_words(layout)
            )
        return division

    def stop(self, why: str) -> None:
        """Read whole batches again, once all have been told."""
        if self.is_on:
            self._stops = self._stops or why

    def refuse(self, why: str) -> None:
        """Read whole batches, before an epoch; again, if it is on."""
        self.stop(why)
        if not self.is_on:
            self._why = self._why or why

    def note(
        self, division: Division | None, shape: BatchDescription, planned: PlannedStep
    ) -> None:
        """The plan of a batch is known: remember who needs what of those of its size."""
        if not planned.has_lanes:
            return
        self._readers = planned.consumers
        if self._why and self._leads and not self.line:
            layout = RowLayout(shape, 0, planned.microbatches_read())
            if layout.divides:
                self._say(f"each replica reads whole batches: {self._why}")
        if isinstance(division, RowsRead) and not planned.writes_inputs:
            size = len(division.request.indices)
            self._layouts[size] = layout = RowLayout(shape, size, planned.microbatches_read())
            if not self._leads:
                self.line = self._in_words(layout) if self.is_on else ""

    def _in_words(self, layout: RowLayout) -> str:
        rows = rows_in_words(layout, self._readers)
        return f"each replica reads its own rows: {rows}, and one to compare"

    def enough(self, division: Division, planned: PlannedStep, *, is_sent: bool) -> Division:
        """The batch with all that a step needs of it.

        Args:
            division: The batch, as it was read.
            planned: The step.
            is_sent: Whether others are sent it.
        """
        if not isinstance(division, RowsRead) or division.is_whole:
            return division
        needed = planned.microbatches_read()[self._rank]
        is_missing = any(division.microbatches[part] is NOT_HERE for part in needed)
        if is_missing or is_sent or planned.writes_inputs:
            return self._whole(division.request)
        return division

    def _say(self, line: str) -> None:
        self.line = line
        say(line, event="reading")


def checksum_of(division: Division) -> int:
    """The checksum by which workers compare a batch that each has read."""
    if isinstance(division, RowsRead) and division.request.by_rows:
        return division.checksum()
    return fingerprint(division.arguments)


class _Asking:
    """A batch sampler that asks what to read of each batch that another one names."""

    def __init__(self, sampler: Any, ask: Callable[[int, Any], Any]) -> None:
        self._sampler = sampler
        self._ask = ask

    def __iter__(self) -> Iterator[Any]:
        named = iter(self._sampler)  # now, as a loader does: a sampler may draw here
        return (self._ask(number, indices) for number, indices in enumerate(named))

    def __len__(self) -> int:
        return len(self._sampler)
