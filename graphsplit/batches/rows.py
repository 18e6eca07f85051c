"""Batches of which a worker has read some rows alone: those of its own microbatches, and one more.

The one is the same on all workers, so that loaders that disagree are found::

    batch of 8 rows, 4 microbatches       0 1 | 2 3 | 4 5 | 6 7
    worker 0 runs the first two, reads    0 1   2 3         6
    worker 1 runs the others, reads                   4 5   6 7

An evaluation's batches are not split: a replica that runs one reads it all, the others one row.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from graphsplit.batches.microbatches import BatchDescription, Division, open_batch
from graphsplit.batches.signature import Arguments, Signature, fingerprint, leaves
from graphsplit.tensor_meta import ALIGNMENT, TensorMeta, begin_of, empty_beginning_at
from graphsplit.torch_ext.private import pytree

Opening = Callable[[Any], Arguments]  # what a step is given of a loader's batch, or of rows of it
NOT_HERE: Arguments = ((), {})  # the arguments of a microbatch whose rows were not read


@dataclass(frozen=True)
class RowLayout:
    """The way in which batches of one size are read.

    Attributes:
        description: How such a batch has looked.
        num_rows: The number of its rows.
        needed: For each worker, the microbatches of which its program consumes an input; number 0
            is all of a batch that is not split.
    """

    description: BatchDescription
    num_rows: int
    needed: tuple[tuple[int, ...], ...]

    @property
    def number(self) -> int:
        """How many microbatches there are."""
        return len(self.description.weights) or 1

    @cached_property
    def row_looks(self) -> list[Any]:
        """The dtype and the shape of a row, for each tensor of such a batch."""
        return _row_looks(self.description.whole.example("meta"))

    def rows(self, microbatch: int) -> range:
        """The rows of a microbatch, as ``split_microbatches`` gives them."""
        size, larger = divmod(self.num_rows, self.number)
        start = microbatch * size + min(microbatch, larger)
        return range(start, start + size + (microbatch < larger))

    def positions(self, worker: int, number: int) -> tuple[int, ...]:
        """The rows that a worker reads, in the order in which it does.

        Args:
            worker: The worker.
            number: The batch's number in the epoch.
        """
        own = [row for part in self.needed[worker] for row in self.rows(part)]
        compared = compared_row(number, self.num_rows)
        return (*own, *(() if compared in own else (compared,)))


def compared_row(number: int, num_rows: int) -> int:
    """The row that all workers read.

    Args:
        number: The batch's number in the epoch.
        num_rows: The number of its rows, 1 or more.
    """
    return zlib.crc32(number.to_bytes(8, "little")) % num_rows


@dataclass(frozen=True)
class BatchRequest:
    """A batch that is read: which one, and what is read of it.

    Attributes:
        number: Its number in the epoch.
        indices: The samples of the whole batch, as the sampler named them.
        layout: How it is read; None: all of it.
        worker: The worker that reads.
        by_rows: Whether workers read their own rows of it, and so compare one row alone.
    """

    number: int
    indices: tuple[Any, ...]
    layout: RowLayout | None
    worker: int
    by_rows: bool = False

    @property
    def positions(self) -> Sequence[int]:
        """The rows that are read, in their order."""
        if self.layout is None:
            return range(len(self.indices))
        return self.layout.positions(self.worker, self.number)

    def whole(self) -> BatchRequest:
        """The same for all of the batch."""
        return replace(self, layout=None)


@dataclass(frozen=True)
class RowsRead(Division):
    """A batch that a loader gave, or some rows of it.

    Attributes:
        request: Which ones. Of some rows, ``arguments`` are these, and microbatches that were not
            read have no arguments.
    """

    request: BatchRequest = BatchRequest(0, (), None, 0)

    @property
    def is_whole(self) -> bool:
        """Whether all rows were read."""
        return self.request.layout is None

    def shape(self) -> BatchDescription:
        """The description that other workers must have of the whole batch."""
        layout = self.request.layout
        return super().shape() if layout is None else layout.description

    def looks_like_others(self) -> bool:
        """Whether each of these rows looks as those of other batches of this size."""
        layout = self.request.layout
        return layout is None or _row_looks(self.arguments) == layout.row_looks

    def fits(self, announced: BatchDescription) -> bool:
        """Whether the microbatches that were read look as a description says."""
        if announced.weights != self.weights:
            return False
        parts = announced.parts or ((announced.whole, 1),)
        told = itertools.chain(*((part,) * count for part, count in parts))
        pairs = zip(told, self.microbatches, strict=True)
        return all(Signature.of(part) == look for look, part in pairs if part is not NOT_HERE)

    def checksum(self) -> int:
        """A checksum of the whole batch's indices, and of the values of the row that all read."""
        named = zlib.crc32(repr([str(index) for index in self.request.indices]).encode())
        return zlib.crc32(fingerprint(self.compared()).to_bytes(4, "little"), named)

    def compared(self) -> Arguments:
        """The row that all workers read, by its leaves."""
        request = self.request
        found = compared_row(request.number, len(request.indices))
        row, size = list(request.positions).index(found), len(request.positions)
        return tuple(
            leaf[row : row + 1] if not why_no_rows(leaf, size) else leaf
            for leaf in leaves(self.arguments)
        ), {}


def divide_rows(batch: Any, request: BatchRequest, opening: Opening) -> RowsRead | None:
    """Some rows of a batch, as a loader gives them, divided as the whole batch would be.

    Args:
        batch: The rows.
        request: Which they are.
        opening: Gives the arguments of a step.

    Returns:
        The division; None where these are not so many rows and nothing else.
    """
    tree, layout = open_batch(batch), request.layout
    assert layout is not None
    if why_no_rows(tree, len(request.positions)):
        return None
    found = [NOT_HERE] * layout.number
    start = 0
    for part in layout.needed[request.worker]:
        stop = start + len(layout.rows(part))
        found[part] = opening(_rows(tree, start, stop, layout.rows(part).start))
        start = stop
    arguments = opening(tree)
    weights = layout.description.weights
    return RowsRead(arguments, tuple(found), weights, request=request)


def _row_looks(arguments: Arguments) -> list[Any]:
    return [(leaf.dtype, leaf.shape[1:]) for leaf in leaves(arguments)]


def _rows(tree: Any, start: int, stop: int, first: int) -> Any:
    """Some rows of what was read, the first of which has a number in the whole batch.

    Small products have other bits where their operands begin elsewhere between two multiples of 64
    bytes. So rows that are views of a whole batch in the plain loop begin as there.
    """
    return pytree.tree_map(lambda leaf: _beginning_at(leaf[start:stop], first), tree)


def _beginning_at(rows: torch.Tensor, first: int) -> torch.Tensor:
    if rows.layout is not torch.strided or not rows.is_cpu or 0 in rows.stride():
        return rows
    begin = first * rows.stride(0) * rows.itemsize % ALIGNMENT
    if begin_of(rows) == begin:
        return rows
    return empty_beginning_at(TensorMeta.of(rows), begin).copy_(rows)


def why_no_rows(tree: Any, num_rows: int) -> str:
    """The part of a batch that is not so many rows, in words; empty if there is none."""
    for leaf in pytree.tree_leaves(tree):
        if not isinstance(leaf, torch.Tensor):
            return f"a batch holds a {type(leaf).__name__}, which has no rows"
        if leaf.dim() == 0 or leaf.shape[0] != num_rows:
            return f"a batch of {num_rows} rows holds a tensor of shape {list(leaf.shape)}"
    return ""


def may_be_mask(arguments: Iterable[Any]) -> bool:
    """Whether some values may be a mask, which networks leave out where it is all ones."""
    return any(
        not leaf.is_floating_point() and leaf.dim() > 1 and bool(((leaf == 0) | (leaf == 1)).all())
        for leaf in arguments
        if isinstance(leaf, torch.Tensor)
    )


def are_divided(layouts: Sequence[RowLayout]) -> bool:
    """Whether there is a worker that needs some microbatches of these batches, and not all."""
    number = sum(layout.number for layout in layouts)
    counts = [sum(map(len, needed)) for needed in zip(*(x.needed for x in layouts), strict=True)]
    return any(0 < count < number for count in counts)


def rows_in_words(layouts: Sequence[RowLayout], readers: Sequence[int]) -> str:
    """The number of rows that each reader reads of batches that follow each other."""
    found, num_rows = [], sum(layout.num_rows for layout in layouts)
    for worker in sorted(readers):
        size = sum(len(x.rows(part)) for x in layouts for part in x.needed[worker])
        found.append(f"worker {worker} {size} of {num_rows}")
    return ", ".join(found)
