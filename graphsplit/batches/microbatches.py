"""How a batch becomes microbatches, and what each one's loss is multiplied by.

The reference, for any placement, is this loop in one process::

    for m, (microbatch, weight) in enumerate(gs.split_microbatches(batch, M)):
        torch.default_generator.set_state(gs.microbatch_rng_state(seed, step, m))
        loss = loss_of(microbatch)
        (loss * weight).backward()
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graphsplit.batches import records
from graphsplit.batches.signature import Arguments, Signature, inputs_of, split_batch
from graphsplit.errors import ConfigurationError
from graphsplit.text import called
from graphsplit.torch_ext.private import pytree

Split = Callable[[Any, int], Sequence[Any]]
LossWeight = Callable[..., Any]

_OWN_SPLIT = "let the Model split it: Model(..., split=fn), fn(batch, M) -> sequence of batches"


@called("gs.split_microbatches")
def split_microbatches(batch: Any, num_microbatches: int) -> list[tuple[Any, float]]:
    """Split a batch along dimension 0 into microbatches, as a Model does.

    Every tensor with dimensions is split by ``torch.tensor_split``: with n rows the first
    ``n % num_microbatches`` microbatches get one row more than the others. Tensors without
    dimensions and plain values go whole to each. A batch with fewer rows gives one microbatch per
    row.

    Args:
        batch: Tensors in tuples, lists, mappings or dataclasses.
        num_microbatches: How many microbatches to make of it.

    Returns:
        For each microbatch, views of the batch in its structure, and its share of the rows: what
        the mean over its rows is multiplied by to give its part of the mean over all.

    Raises:
        ConfigurationError: Tensors disagree in their number of rows, or none has any.
    """
    _check_number(num_microbatches)
    tree = open_batch(batch)
    num_rows = _num_rows(tree, what="a batch", fix=_OWN_SPLIT)
    if num_rows == 0:
        return [(tree, 1.0)]
    leaves, spec = pytree.tree_flatten(tree)
    number = min(num_microbatches, num_rows)
    pieces = [
        torch.tensor_split(leaf, number) if _has_rows(leaf) else (leaf,) * number for leaf in leaves
    ]
    sizes = [num_rows // number + (m < num_rows % number) for m in range(number)]
    return [
        (pytree.tree_unflatten([piece[m] for piece in pieces], spec), size / num_rows)
        for m, size in enumerate(sizes)
    ]


def _check_number(number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigurationError(
            f"the number of microbatches is {number!r}; expected an int of 1 or more"
        )


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def open_batch(batch: Any) -> Any:
    """A batch as something whose parts are found: a mapping of any kind becomes a dictionary."""
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        batch = dict(batch)
    while any([records.fields_of(leaf) for leaf in pytree.tree_leaves(batch)]):
        pass  # that has made dataclasses known: now they are taken apart, and may hold others
    return batch


def _num_rows(tree: Any, *, what: str, fix: str) -> int:
    """The size that all tensors have in dimension 0."""
    found, _ = pytree.tree_flatten_with_path(tree)
    with_rows = [(path, leaf) for path, leaf in found if _has_rows(leaf)]
    if not with_rows:
        raise ConfigurationError(f"{what} holds no tensor with a dimension to split\n  Fix: {fix}.")
    (first, leading), *others = with_rows
    for path, leaf in others:
        if leaf.shape[0] != leading.shape[0]:
            raise ConfigurationError(
                f"{what} cannot be split along dimension 0: batch{pytree.keystr(path)} has "
                f"{leaf.shape[0]} rows (shape {list(leaf.shape)}), batch{pytree.keystr(first)} has "
                f"{leading.shape[0]}\n"
                f"  Fix: {fix}."
            )
    return int(leading.shape[0])


class BatchDescription(NamedTuple):
    """A batch as all workers must know it before its step, whether they have it or not.

    Attributes:
        whole: Signature of the batch.
        parts: Signatures of its microbatches, each with how many follow each other that have it;
            empty where the batch is not split.
        weights: What the loss of each microbatch is multiplied by; empty where it is not split.
    """

    whole: Signature
    parts: tuple[tuple[Signature, int], ...] = ()
    weights: tuple[float, ...] = ()

    @property
    def first(self) -> Signature:
        """The signature of what runs first."""
        return self.parts[0][0] if self.parts else self.whole

    def describe(self) -> str:
        """The microbatches in words, for errors."""
        runs = ", ".join(f"{count} of {signature.text}" for signature, count in self.parts)
        return f"microbatches {runs or 'none'} with weights {list(self.weights)}"


@dataclass(frozen=True)
class Division:
    """A batch, divided.

    Attributes:
        arguments: The whole batch.
        microbatches: Its microbatches; itself where it is not split.
        weights: What the loss of each is multiplied by; empty where it is not split.
    """

    arguments: Arguments
    microbatches: tuple[Arguments, ...]
    weights: tuple[float, ...] = ()

    def shape(self) -> BatchDescription:
        """The description that other workers must have of it."""
        whole = Signature.of(self.arguments)
        if not self.weights:
            return BatchDescription(whole)
        groups = itertools.groupby(map(Signature.of, self.microbatches))
        parts = [(signature, len(list(group))) for signature, group in groups]
        return BatchDescription(whole, tuple(parts), self.weights)


@dataclass(frozen=True)
class Divider:
    """How a Model divides its batches.

    Attributes:
        num_microbatches: Into how many microbatches; 1: not at all.
        split: The user's way to split a batch; None: ``split_microbatches``.
        loss_weight: What the loss of a microbatch counts; None: the number of its rows.
        has_targets: Whether the target is a part of what a batch gives.
    """

    num_microbatches: int = 1
    split: Split | None = None
    loss_weight: LossWeight | None = None
    has_targets: bool = True

    def arguments(self, batch: Any, *, has_loss_fn: bool) -> Arguments:
        """A loader's batch, or some rows of it, as the arguments of a step."""
        open_it = split_batch if self.has_targets else inputs_of
        return open_it(batch, has_loss_fn=has_loss_fn)

    def divide(self, batch: Any, *, has_loss_fn: bool) -> Division:
        """Divide a loader's batch.

        Raises:
            ConfigurationError: The batch does not fit, cannot be split, or has no valid weights.
        """
        arguments = self.arguments(batch, has_loss_fn=has_loss_fn)
        if self.num_microbatches == 1:
            return Division(arguments, (arguments,))
        pieces, weights = self._pieces(batch)
        found = tuple(self.arguments(piece, has_loss_fn=has_loss_fn) for piece in pieces)
        weighed = [((), dict(p)) for p in pieces] if isinstance(batch, Mapping) else found
        return Division(arguments, found, self._weights(weighed) or weights)

    def divide_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_loss_fn: bool
    ) -> Division:
        """Divide a batch that was passed to a call, as training divides a loader's."""
        if args and kwargs:
            if has_loss_fn:
                raise ConfigurationError(
                    "a batch is given both by position and by keyword, and the Model has a loss_fn"
                )
            return self.divide_arguments((args, kwargs))
        whole = kwargs or (args[0] if len(args) == 1 else args)
        return self.divide(whole, has_loss_fn=has_loss_fn)

    def divide_arguments(self, arguments: Arguments) -> Division:
        """Divide a batch given both by position and by keyword."""
        if self.num_microbatches == 1:
            return Division(arguments, (arguments,))
        if self.split is not None:
            raise ConfigurationError(
                "a batch is given both by position and by keyword, and the Model has split=fn, "
                "which takes one batch\n  Fix: pass all of it by keyword, or all by position."
            )
        found, weights = zip(*split_microbatches(arguments, self.num_microbatches), strict=True)
        return Division(arguments, found, self._weights(found) or weights)

    def _pieces(self, batch: Any) -> tuple[tuple[Any, ...], tuple[float, ...]]:
        if self.split is None:
            pieces, weights = zip(*split_microbatches(batch, self.num_microbatches), strict=True)
            return pieces, weights
        made = self.split(batch, self.num_microbatches)
        if not isinstance(made, Sequence) or isinstance(made, (str, bytes)) or not made:
            raise ConfigurationError(
                f"split returned {_describe(made)}; expected a list of one or more batches"
            )
        if self.loss_weight is not None:
            return tuple(made), (1.0,) * len(made)
        fix = "say what each microbatch's loss counts: Model(..., loss_weight=fn)"
        rows = [
            _num_rows(open_batch(piece), what="a microbatch of split", fix=fix) for piece in made
        ]
        return tuple(made), _shares(rows, "rows")

    def _weights(self, microbatches: Sequence[Arguments]) -> tuple[float, ...]:
        if self.loss_weight is None:
            return ()
        return _shares([self.loss_weight(*args, **kwargs) for args, kwargs in microbatches])


def _shares(counts: Sequence[Any], what: str = "loss_weight") -> tuple[float, ...]:
    """Each number divided by the sum of all."""
    numbers = [_as_number(count) for count in counts]
    total = sum(numbers)
    if not total > 0 or not math.isfinite(total):
        raise ConfigurationError(
            f"{what} gives {numbers} for the microbatches of a batch; expected finite numbers, of "
            f"which at least one is above 0"
        )
    return tuple(number / total for number in numbers)


def _as_number(count: Any) -> float:
    if isinstance(count, torch.Tensor) and count.numel() == 1 and not count.is_complex():
        count = count.item()
    if not isinstance(count, (int, float)) or not math.isfinite(count) or count < 0:
        raise ConfigurationError(
            f"loss_weight returned {_describe(count)}; expected a finite number of 0 or more, such "
            f"as the number of tokens that count"
        )
    return count


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, Sequence) and not value:
        return f"an empty {type(value).__name__}"
    return repr(value) if isinstance(value, (int, float)) else f"a {type(value).__name__}"


def own_views(microbatch: Arguments) -> list[Any]:
    """The leaves of a microbatch, with version counters of their own.

    Views of one batch share a counter: writing to the rows of one would void what autograd saved
    of another.
    """
    return [
        leaf.data if isinstance(leaf, torch.Tensor) else leaf
        for leaf in pytree.tree_leaves(microbatch)
    ]
