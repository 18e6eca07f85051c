"""Find the operation from which two runs of a training step differ. Pure.

Both sides noted every operation of the step with the digests of its results. They are not matched
one by one: workers overlap, and a captured graph leaves out what nobody needs. Instead: the first
operation on a worker whose result the plain loop never had, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from graphsplit.check.compare import Unequal
from graphsplit.check.record import NoteKind, Operation


@dataclass(frozen=True)
class Pinpoint:
    """Where two runs of a training step part.

    Attributes:
        found: The first operation on a worker whose result the plain loop never had.
        worker: That worker.
        plain: The first operation of the plain loop whose result no worker had.
        by_gradient: Whether forward was the same, and ``found`` is the operation whose gradient
            is another one.
        is_forward_same: Whether the operations were looked at, and all of them are the same.
    """

    found: Operation | None = None
    worker: int | None = None
    plain: Operation | None = None
    by_gradient: bool = False
    is_forward_same: bool = False


def pinpoint(
    plain: Sequence[Operation], workers: Sequence[Sequence[Operation]], first: Unequal
) -> Pinpoint:
    """Find where two runs of a training step part.

    Args:
        plain: The operations of the plain loop, in order.
        workers: Those of each worker.
        first: What differs first.
    """
    known, everywhere = _results(plain), _results(op for ops in workers for op in ops)
    forward = sorted(
        ((worker, op) for worker, ops in enumerate(workers) for op in ops if op.target),
        key=lambda one: one[1].order,
    )
    found = [(worker, op) for worker, op in forward if _is_news(op, known)]
    missed = [op for op in plain if op.module is not None and _is_news(op, everywhere)]
    if found:
        worker, operation = found[0]
        return Pinpoint(operation, worker, missed[0] if missed else None)
    reading = [
        (worker, op)
        for worker, op in forward
        if first.value.kind is NoteKind.GRADIENT and first.value.name in op.reads
    ]
    if reading:
        worker, operation = reading[-1]
        return Pinpoint(operation, worker, by_gradient=True)
    if missed:
        return Pinpoint(plain=missed[0])
    return Pinpoint(is_forward_same=bool(forward))


@dataclass(frozen=True)
class _Results:
    """The computations of one side.

    Attributes:
        digests: Of all results.
        by_name: Of those of each operation.
    """

    digests: frozenset[str]
    by_name: Mapping[str, frozenset[str]]


def _results(operations: Iterable[Operation]) -> _Results:
    by_name: dict[str, set[str]] = {}
    for operation in operations:
        by_name.setdefault(_name(operation), set()).update(operation.digests)
    frozen = {name: frozenset(digests) for name, digests in by_name.items()}
    return _Results(frozenset().union(*frozen.values()), frozen)


def _is_news(operation: Operation, other: _Results) -> bool:
    """Whether the other side never had some result of an operation.

    A product with 1.0 has the bits of its operand: so another result of the same operation counts,
    not only that somebody had those bits. But where the other side runs no such operation at all,
    it may run one of another name for it.
    """
    same = other.by_name.get(_name(operation), other.digests)
    return not same.issuperset(operation.digests)


def _name(operation: Operation) -> str:
    """``aten.relu`` for ``aten.relu_.default``: capture may take one for the other."""
    packet = operation.name.rpartition(".")[0] or operation.name
    return packet.rstrip("_")
