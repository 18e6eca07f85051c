"""The parts of gradients, added in the order that a Model asks for.

Each microbatch gives a parameter one *part* of its gradient. ``gradient_order="left"`` adds part
after part. ``"pairs"`` adds them like the digits of a binary number: a sum of 2 ** k parts is added
to its neighbour on the left of the same size::

    parts     0   1   2   3   4   5   6
    pairs     (0 + 1) (2 + 3) (4 + 5) 6
              ((0 + 1) + (2 + 3))     6       kept: sums of 4, 2 and 1
    total     ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)

So the bits depend on the number of the parts alone, not on who adds which, and for m parts pairs
hold at most ``ceil(log2(m)) + 1`` gradients. A part that is None, as of a parameter that a
microbatch does not use, has its place and adds nothing.

``gradient_dtype`` rounds each part to a smaller dtype, and each sum of two neighbours. So every
block of parts fits in that dtype, whoever adds it and sends it.

Between a batch's first backward and its end ``.grad`` holds what was there before the batch: zeros,
or the sum of the batches before, which the total is then added to.

``accumulate_by="microbatch"`` adds each part over the batches of a step first. Until the step's
last batch is done the parts are *kept*, each by who makes it, and ``.grad`` holds nothing. Those
that a save has brought *wait* on every worker for who makes the next one of their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from graphsplit.errors import InvariantError, StepFailedError
from graphsplit.marks.wire import is_wider
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.optimizers.update import GradientOrder
from graphsplit.runtime.step_state import Gradient

Block = tuple[int, int]
# A sum, and whether others may hold it, too: nothing is added to it in place then.
_Sum = tuple[Gradient, bool]
_NOBODYS = torch.empty(0)  # where sums of parts go elsewhere


@dataclass
class PartSum:
    """The gradient of one parameter, while its parts are added.

    Attributes:
        parameter: The parameter.
        order: In which order.
        blocks: Sums of parts, the largest block of parts first; one where they are added to the
            left. Each with whether others may hold it, too.
        num_parts: How many parts have been added; those that are None included.
        dtype: To what parts and their sums are rounded; None: they are left as they are.
    """

    parameter: torch.Tensor
    order: GradientOrder = "pairs"
    dtype: torch.dtype | None = None
    blocks: list[_Sum] = field(default_factory=list)
    num_parts: int = 0

    def add(self, number: int, part: Gradient, size: int = 1, *, is_shared: bool = False) -> None:
        """Add a part, or a block of them; those between the last one and this one are None.

        Args:
            number: Its number in the batch; that of a block's first part.
            part: A tensor. It may be changed, unless it is shared.
            size: How many parts a block has: a power of two that divides its number.
            is_shared: Whether others may hold it, too.
        """
        if number < self.num_parts:
            raise InvariantError(f"part {number} of a gradient comes after {self.num_parts}")
        if number % size:
            raise InvariantError(f"part {number} of a gradient begins no block of {size}")
        while self.num_parts < number:
            self._carry((None, False), 1)
        self._carry((part, is_shared), size)

    def _carry(self, part: _Sum, size: int) -> None:
        digits = self.num_parts // size if self.order == "pairs" else len(self.blocks)
        part = self._rounded(part)
        while digits % 2:
            part = self._rounded(_sum(self.blocks.pop(), part))
            digits //= 2
        self.blocks.append(part)
        self.num_parts += size

    def _rounded(self, part: _Sum) -> _Sum:
        found, _ = part
        if found is None or self.dtype is None or not is_wider(found.dtype, self.dtype):
            return part
        return found.to(self.dtype).to(found.dtype), False

    def total(self, *, is_read: bool = False) -> Gradient:
        """The sum of all parts.

        Args:
            is_read: Whether it is only read: it may then be a part that others hold, too.
        """
        total: _Sum = None, False
        for block in reversed(self.blocks):
            total = _sum(block, total)
        found, is_shared = total
        return found.clone() if found is not None and is_shared and not is_read else found


class PartSums:
    """The gradients of a batch, or of a step, on one worker or in one process.

    Args:
        order: In which order parts are added.
        by_microbatch: Whether the parts of a step's batches are kept, and added when it ends.
        dtype: To what parts and their sums are rounded; None: they are left as they are.
    """

    def __init__(
        self,
        order: GradientOrder = "pairs",
        *,
        by_microbatch: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._order: GradientOrder = order
        self._dtype = dtype
        self._by_microbatch = by_microbatch
        self._sums: dict[int, PartSum] = {}  # by the parameter's id
        # Of parameters that may live elsewhere: by the parameter's node and the last part.
        self._blocks: dict[Block, PartSum] = {}
        # By the parameter's id, or by its name where it lives elsewhere, and the part's number.
        self._kept: dict[tuple[int | str, int], Gradient] = {}
        self._parameters: dict[int, torch.Tensor] = {}  # of which parts are kept
        self._waiting: dict[tuple[str, int], Gradient] = {}  # as kept, of whoever makes them next
        self._named: dict[str, torch.Tensor] = {}  # of those that wait, by its first name
        self._names: dict[int | str, str] = {}  # the first one, by each name and the id

    def begin_step(self) -> None:
        """Forget the parts of a step that did not come to its end."""
        self._kept.clear()
        self._parameters.clear()
        for found in (self._waiting, self._named, self._names):
            found.clear()

    def begin_batch(self) -> None:
        """Forget what a batch has left that did not come to its end."""
        self._sums.clear()
        self._blocks.clear()

    def keep(
        self, owner: torch.Tensor | str, number: int, part: Gradient, *, is_shared: bool = False
    ) -> None:
        """Add a part to those of the same number that earlier batches of the step have given.

        Args:
            owner: The parameter; its name where it lives elsewhere.
            number: The number of the microbatch in its batch.
            part: The part.
            is_shared: Whether others hold it, too: it is then copied where it would be changed.
        """
        before = self.take_kept(owner, number)
        if before is None and is_shared and part is not None:
            part = part.clone()
        self._kept[_key(owner), number] = _add(before, part)
        if isinstance(owner, torch.Tensor):
            self._parameters[id(owner)] = owner

    def take_kept(self, owner: torch.Tensor | str, number: int) -> Gradient:
        """The sum of the parts of a number over the step's batches; None where there was none."""
        found = self._kept.pop((_key(owner), number), None)
        if not self._waiting:
            return found
        waited = self._waiting.pop((self._names.get(_key(owner), ""), number), None)
        return waited if found is None else found

    def kept(self, name_of: Callable[[torch.Tensor], str | None]) -> dict[str, Any]:
        """The parts that are kept here, and those that wait: by name, and by their numbers.

        Args:
            name_of: Gives the name of a parameter.
        """
        found: dict[str, Any] = {}
        for (key, number), part in self._kept.items():
            name = key if isinstance(key, str) else str(name_of(self._parameters[key]))
            if part is not None:
                found.setdefault("kept", {}).setdefault(name, {})[number] = part
        for (name, number), part in self._waiting.items():
            found.setdefault("waiting", {}).setdefault(name, {})[number] = part
        return found

    def put_back(
        self, found: Sequence[Mapping[str, Any]], named: Mapping[str, torch.Tensor], *, is_own: bool
    ) -> None:
        """Go on with what ``kept`` gave.

        Args:
            found: Of all workers; or of this one, which makes what it has made before.
            named: All parameters, by name.
            is_own: Whether it is of this worker.
        """
        self.begin_step()
        for name, parameter in named.items():
            first = self._names.setdefault(id(parameter), name)
            self._names[name], self._named[first] = first, parameter
        for kind in ("waiting", "kept"):  # what has waited elsewhere may be part of what is kept
            for one in found:
                for name, parts in one.get(kind, {}).items():
                    put = self._put_kept if is_own and kind == "kept" else self._put_waiting
                    put(name, parts)

    def _put_waiting(self, name: str, parts: Mapping[int, Gradient]) -> None:
        self._waiting.update({(self._names[name], m): part for m, part in parts.items()})

    def _put_kept(self, name: str, parts: Mapping[int, Gradient]) -> None:
        parameter = self._named[self._names[name]]
        key = name if is_elsewhere(parameter) else id(parameter)
        self._kept.update({(key, m): part for m, part in parts.items()})
        self._parameters[id(parameter)] = parameter

    def add_to_block(self, key: Block, part: Gradient, *, is_shared: bool = False) -> None:
        """Add the next part of a block of parts that are made here.

        Args:
            key: The parameter's node, and the block's last microbatch.
            part: The part.
            is_shared: Whether others may hold it, too: it is left as it is then.
        """
        block = self._blocks.setdefault(key, PartSum(_NOBODYS, dtype=self._dtype))
        block.add(block.num_parts, part, is_shared=is_shared)

    def take_block(self, key: Block, *, is_read: bool = False) -> Gradient:
        """The sum of a block that is whole.

        Args:
            key: As for ``add_to_block``.
            is_read: Whether it is only read.
        """
        return self._blocks.pop(key).total(is_read=is_read)

    @contextmanager
    def apart(
        self, parameters: Sequence[torch.Tensor], number: int, size: int | None = None
    ) -> Iterator[None]:
        """Take what a backward inside gives to parameters as their parts.

        Args:
            parameters: The parameters, each once.
            number: The number of the microbatch in the batch; of a block, that of the first one.
            size: How many parts of the whole sum it gives, added already; None: one of a batch.
        """
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
            for parameter in parameters:
                if self._by_microbatch and size is None:
                    self.keep(parameter, number, parameter.grad)
                else:
                    self._sum_of(parameter).add(number, parameter.grad, size or 1)
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient

    def _sum_of(self, parameter: torch.Tensor) -> PartSum:
        own = PartSum(parameter, self._order, self._dtype)
        return self._sums.setdefault(id(parameter), own)

    def end_batch(self) -> None:
        """Add the totals to ``.grad``; of a step, where its parts were kept.

        Raises:
            StepFailedError: Parts are kept here that were to be sent to the parameter's owner.
        """
        in_blocks = frozenset(self._sums)
        for name, number in tuple(self._waiting):
            parameter = self._named[name]
            if not is_elsewhere(parameter) and id(parameter) not in in_blocks:
                self.keep(parameter, number, None)
        for key, number in sorted(self._kept, key=lambda kept: kept[1]):
            part = self._kept[key, number]
            if part is None:
                continue
            if key in in_blocks or isinstance(key, str):
                self._refuse(key, number)
            self._sum_of(self._parameters[key]).add(number, part)
        for one in self._sums.values():
            one.parameter.grad = _add(one.parameter.grad, one.total())
        self._sums.clear()
        self.begin_step()

    @staticmethod
    def _refuse(key: int | str, number: int) -> NoReturn:
        what = key if isinstance(key, str) else "a parameter of this worker"
        raise StepFailedError(
            f"an earlier batch of the step has given {what} a gradient in microbatch {number}, and "
            f"the last batch trains it no more, or on another worker\n"
            f'  Fix: with accumulate_by="microbatch", freeze parameters and choose between '
            f"branches where a step begins, and place its module on the replicas if it stands "
            f"beside some, net.part.place([0, 1]): a ragged batch has other parts on a worker; or "
            f"leave accumulate_by out."
        )


def _key(owner: torch.Tensor | str) -> int | str:
    return owner if isinstance(owner, str) else id(owner)


def _sum(left: _Sum, right: _Sum) -> _Sum:
    """``left + right``, in the memory of one that nobody else holds; None adds nothing."""
    (one, one_shared), (other, other_shared) = left, right
    if one is None or other is None:
        return right if one is None else left
    if not one_shared:
        return _add(one, other), False
    is_strided = one.layout is other.layout is torch.strided
    if other_shared or not is_strided or one.dtype is not other.dtype:
        return one + other, False
    return torch.add(one, other, out=other), False


def _add(left: Gradient, right: Gradient) -> Gradient:
    """``left + right``, in the memory of ``left`` where that holds it; None adds nothing."""
    if left is None or right is None:
        return right if left is None else left
    if left.is_sparse and not right.is_sparse:
        return right + left
    left += right
    return left
