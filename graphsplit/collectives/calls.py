"""Collectives for scripts, and point to point: the public functions.

All work between two steps, on the script's own values; in a network placements move values, and
gradients flow. Nothing here has a gradient. Sums run from the lowest rank to the highest, so their
bits depend on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import torch

from graphsplit.collectives.exchange import PartOfJob
from graphsplit.collectives.making import Making, check_value, pass_value
from graphsplit.collectives.reductions import (
    check_reduction,
    check_whole,
    described,
    reduced,
    tensor_of,
)
from graphsplit.errors import ConfigurationError
from graphsplit.text import called

Value = TypeVar("Value", torch.Tensor, int, float, bool, complex)
Op = Literal["sum", "mean", "prod", "min", "max"]


@called("gs.all_reduce")
def all_reduce(value: Value, op: Op = "sum", *, ranks: Iterable[int] | None = None) -> Value:
    """The values of all workers, reduced to one, on all of them.

    Args:
        value: A tensor of any dtype, with the same shape and dtype on every worker, or a number.
        op: ``"sum"``, ``"mean"``, ``"prod"``, ``"min"`` or ``"max"``, element by element, from the
            lowest rank to the highest, in the tensor's own dtype.
        ranks: The workers that take part; None for all. Others may make the call too, and get their
            argument back; where lost workers may come back (``GS_RECOVERY``), they must.

    Returns:
        A new tensor, the same on all workers, on the argument's device; or a number. In one process
        the argument.

    Raises:
        ConfigurationError: An argument is of a wrong kind, or has no such reduction; or whole
            numbers add up to more than 64 bits.
        CollectiveMismatchError: Workers made different calls, or passed other shapes or dtypes;
            names workers, calls and lines.
        JobFailedError: The job was ended elsewhere meanwhile: also where a worker never makes this
            call.
    """
    found: Value = _reduced("all_reduce", value, op, None, ranks)
    return found


@called("gs.reduce")
def reduce(
    value: Value, dst: int = 0, op: Op = "sum", *, ranks: Iterable[int] | None = None
) -> Value | None:
    """The values of all workers, reduced to one, on worker ``dst``.

    Args:
        value: as ``all_reduce``.
        dst: The worker that gets the result.
        op: as ``all_reduce``.
        ranks: as ``all_reduce``.

    Returns:
        The result on ``dst``; None on other workers that take part. In one process the argument.

    Raises:
        ConfigurationError, CollectiveMismatchError, JobFailedError: as ``all_reduce``.
    """
    found: Value | None = _reduced("reduce", value, op, dst, ranks)
    return found


@called("gs.broadcast")
def broadcast(value: Value, src: int = 0, *, ranks: Iterable[int] | None = None) -> Value:
    """The value of worker ``src``, on all workers.

    Args:
        value: A tensor or a number. Only that of ``src`` counts; others may pass anything.
        src: The worker whose value it is.
        ranks: as ``all_reduce``.

    Returns:
        The argument, or an equal copy, on ``src`` and in one process; elsewhere a new tensor with
        its dtype, shape and strides (those of an expanded tensor become plain), or a number.

    Raises:
        ConfigurationError, CollectiveMismatchError, JobFailedError: as ``all_reduce``.
    """
    making = Making.of("broadcast", ranks, src)
    if making.is_root:
        check_value("broadcast", value)
    found: Value = making.make(value, f"src={src}", _deliver(making))
    return found


@called("gs.broadcast_object")
def broadcast_object(value: Any, src: int = 0, *, ranks: Iterable[int] | None = None) -> Any:
    """A nested Python value of worker ``src``, on all workers.

    Nothing is pickled: it may consist of None, booleans, numbers, strings, bytes, tensors, dtypes,
    members of enumerations, and lists, tuples, sets and dictionaries of them.

    Args:
        value: The value, on ``src``; anything elsewhere.
        src: The worker whose value it is.
        ranks: as ``all_reduce``.

    Returns:
        The argument, or an equal copy, on ``src`` and in one process; elsewhere a value of its own.

    Raises:
        ConfigurationError: Something in the value is of another kind; names the way to it.
        CollectiveMismatchError, JobFailedError: as ``all_reduce``.
    """
    making = Making.of("broadcast_object", ranks, src)
    return making.make(value, f"src={src}", _deliver(making))


@called("gs.all_gather")
def all_gather(value: Value, *, ranks: Iterable[int] | None = None) -> torch.Tensor:
    """The tensors of all workers, one after the other, on all of them.

    Args:
        value: A tensor, which may have another size in dimension 0 on each worker; dtype and the
            other sizes are the same. A number, or a tensor without dimensions, is one row.
        ranks: as ``all_reduce``.

    Returns:
        The tensors joined along dimension 0, in the order of ranks. In one process the argument, as
        one row if it has no dimensions.

    Raises:
        ConfigurationError, CollectiveMismatchError, JobFailedError: as ``all_reduce``.
    """
    found: torch.Tensor = _gathered("all_gather", value, None, ranks)
    return found


@called("gs.gather")
def gather(
    value: Value, dst: int = 0, *, ranks: Iterable[int] | None = None
) -> torch.Tensor | None:
    """The tensors of all workers, one after the other, on worker ``dst``.

    Args:
        value: as ``all_gather``.
        dst: The worker that gets them.
        ranks: as ``all_reduce``.

    Returns:
        On ``dst`` as ``all_gather``; None on other workers that take part.

    Raises:
        ConfigurationError, CollectiveMismatchError, JobFailedError: as ``all_reduce``.
    """
    found: torch.Tensor | None = _gathered("gather", value, dst, ranks)
    return found


@called("gs.scatter")
def scatter(
    value: torch.Tensor | None, src: int = 0, *, ranks: Iterable[int] | None = None
) -> torch.Tensor:
    """An equal part of the tensor of worker ``src`` for each worker, along dimension 0.

    Args:
        value: The tensor, on ``src``; anything elsewhere. Its first size is a multiple of the
            number of workers.
        src: The worker that has it.
        ranks: as ``all_reduce``.

    Returns:
        This worker's part, by its place among the ranks. In one process the argument.

    Raises:
        ConfigurationError: It cannot be split so.
        CollectiveMismatchError, JobFailedError: as ``all_reduce``.
    """
    making = Making.of("scatter", ranks, src)
    if making.is_root:
        check_value("scatter", value)
        num = making.num_members
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or len(value) % num:
            raise ConfigurationError(
                f"scatter: {described(value)} cannot be split into {num} equal parts along "
                f"dimension 0\n  Fix: pass a tensor whose first size is a multiple of {num}."
            )

    def move(part: PartOfJob, tensor: Any) -> Any:
        parts = tensor.detach().tensor_split(part.num_workers) if making.is_root else ()
        mine = part.deal(parts.__getitem__, root=making.root)
        return mine.clone() if making.is_root else mine

    found: torch.Tensor = making.make(value, f"src={src}", move)
    return found


@called("gs.send")
def send(value: Any, dst: int) -> None:
    """Give worker ``dst`` a value, which it takes by ``recv``.

    Values between two workers arrive in the order in which they were sent, whatever other calls
    both make in between. A large one waits until the other worker takes it.

    Args:
        value: A tensor, a number, or what ``broadcast_object`` takes.
        dst: The other worker.

    Raises:
        ConfigurationError: The worker does not exist or is this one; or the value cannot be sent;
            or lost workers may come back to the job, for which nothing of this is remembered.
        JobFailedError: The job was ended elsewhere meanwhile.
    """
    pass_value("send", dst, [value])


@called("gs.recv")
def recv(src: int) -> Any:
    """Take the value that worker ``src`` gives by ``send``; waits until it is there.

    Args:
        src: The other worker.

    Returns:
        The value; tensors in it have the sender's dtype, shape and strides.

    Raises:
        ConfigurationError: as ``send``.
        JobFailedError: The job was ended elsewhere meanwhile.
    """
    return pass_value("recv", src, [])


def _deliver(making: Making) -> Any:
    return lambda part, value: part.deliver(value, root=making.root)


def _reduced(name: str, value: Any, op: str, dst: int | None, ranks: Iterable[int] | None) -> Any:
    making = Making.of(name, ranks, dst)
    check_value(name, value)
    check_reduction(name, op, value)

    def move(part: PartOfJob, argument: Any) -> Any:
        values = part.collect(tensor_of(argument), root=making.root)
        is_tensor = isinstance(argument, torch.Tensor)
        if values and not is_tensor:
            check_whole(op, values)
        result = reduced(op, values) if values else None
        if dst is None:
            result = part.deliver(result, root=making.root)
        if isinstance(result, torch.Tensor):
            return result.to(argument.device) if is_tensor else result.item()
        return None

    where = "" if dst is None else f"dst={dst}, "
    return making.make(value, f"{where}op={op!r}, {described(value)}", move)


def _gathered(name: str, value: Any, dst: int | None, ranks: Iterable[int] | None) -> Any:
    making = Making.of(name, ranks, dst)
    check_value(name, value)
    rows = tensor_of(value)
    rows = rows.reshape(1) if rows.dim() == 0 else rows

    def move(part: PartOfJob, rows: Any) -> Any:
        values = part.collect(rows, root=making.root)
        result = torch.cat([one.to(rows.device) for one in values]) if values else None
        if dst is None:
            result = part.deliver(result, root=making.root)
        return None if result is None else result.to(rows.device)

    where = "" if dst is None else f"dst={dst}, "
    sizes = ", ".join(map(str, ("*", *rows.shape[1:])))
    dtype = str(rows.dtype).removeprefix("torch.")
    argument = value if isinstance(value, torch.Tensor) and value.dim() else rows
    return making.make(argument, f"{where}{dtype} of [{sizes}]", move)
