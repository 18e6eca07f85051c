"""Gradients of microbatches added in pairs: ``gradient_order="pairs"`` of a Model.

Each microbatch gives a parameter one *part* of its gradient. Parts are added like the digits of a
binary number: a sum of 2 ** k parts is added to its neighbour on the left of the same size::

    parts     0   1   2   3   4   5   6
    pairs     (0 + 1) (2 + 3) (4 + 5) 6
              ((0 + 1) + (2 + 3))     6       kept: sums of 4, 2 and 1
    total     ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)

So the bits depend on the number of the parts alone, not on who adds which, and for m parts at most
``ceil(log2(m)) + 1`` gradients are held. A part that is None, as of a parameter that a microbatch
does not use, has its place and adds nothing.

Between a batch's first backward and its end ``.grad`` holds what was there before the batch: zeros,
or the sum of the batches before, which the total is then added to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from graphsplit.errors import InvariantError
from graphsplit.runtime.step_state import Gradient

Block = tuple[int, int]
_NOBODYS = torch.empty(0)  # where sums of parts go elsewhere


@dataclass
class PairwiseSum:
    """The gradient of one parameter, while its parts are added.

    Attributes:
        parameter: The parameter.
        blocks: Sums of parts, the largest block of parts first.
        num_parts: How many parts have been added; those that are None included.
    """

    parameter: torch.Tensor
    blocks: list[Gradient] = field(default_factory=list)
    num_parts: int = 0

    def add(self, number: int, part: Gradient, size: int = 1) -> None:
        """Add a part, or a block of them; those between the last one and this one are None.

        Args:
            number: Its number in the batch; that of a block's first part.
            part: A tensor that nobody else holds; it may be changed.
            size: How many parts a block has: a power of two that divides its number.
        """
        if number < self.num_parts:
            raise InvariantError(f"part {number} of a gradient comes after {self.num_parts}")
        if number % size:
            raise InvariantError(f"part {number} of a gradient begins no block of {size}")
        while self.num_parts < number:
            self._carry(None, 1)
        self._carry(part, size)

    def _carry(self, part: Gradient, size: int) -> None:
        digits = self.num_parts // size
        while digits % 2:
            part = _add(self.blocks.pop(), part)
            digits //= 2
        self.blocks.append(part)
        self.num_parts += size

    def total(self) -> Gradient:
        """The sum of all parts."""
        total: Gradient = None
        for block in reversed(self.blocks):
            total = _add(block, total)
        return total


class PairwiseSums:
    """The gradients of a batch, on one worker or in one process."""

    def __init__(self) -> None:
        self._sums: dict[int, PairwiseSum] = {}  # by the parameter's id
        # Of parameters that may live elsewhere: by the parameter's node and the last part.
        self._blocks: dict[Block, PairwiseSum] = {}

    def begin_batch(self) -> None:
        """Forget what a batch has left that did not come to its end."""
        self._sums.clear()
        self._blocks.clear()

    def add_to_block(self, key: Block, part: Gradient, *, is_shared: bool) -> None:
        """Add the next part of a block of parts that are made here.

        Args:
            key: The parameter's node, and the block's last microbatch.
            part: The part.
            is_shared: Whether others hold it, too: it is then copied where it would be changed.
        """
        block = self._blocks.setdefault(key, PairwiseSum(_NOBODYS))
        is_kept = block.num_parts % 2 == 0 or block.blocks[-1] is None
        if is_shared and is_kept and part is not None:
            part = part.clone()
        block.add(block.num_parts, part)

    def take_block(self, key: Block) -> Gradient:
        """The sum of a block that is whole."""
        return self._blocks.pop(key).total()

    @contextmanager
    def apart(
        self, parameters: Sequence[torch.Tensor], number: int, size: int = 1
    ) -> Iterator[None]:
        """Take what a backward inside gives to parameters as their parts.

        Args:
            parameters: The parameters, each once.
            number: The number of the microbatch in the batch; of a block, that of the first one.
            size: How many parts it gives, added already.
        """
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
            for parameter in parameters:
                self._sum_of(parameter).add(number, parameter.grad, size)
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient

    def _sum_of(self, parameter: torch.Tensor) -> PairwiseSum:
        return self._sums.setdefault(id(parameter), PairwiseSum(parameter))

    def end_batch(self) -> None:
        """Add the totals to ``.grad``."""
        for one in self._sums.values():
            one.parameter.grad = _add(one.parameter.grad, one.total())
        self._sums.clear()


def _add(left: Gradient, right: Gradient) -> Gradient:
    """``left + right``, in the memory of ``left`` where that holds it; None adds nothing."""
    if left is None or right is None:
        return right if left is None else left
    if left.is_sparse and not right.is_sparse:
        return right + left
    left += right
    return left
