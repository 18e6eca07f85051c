"""Numbers in places that have changed since a graph was recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from graphsplit.guards.check import Failure
from graphsplit.guards.values import Written, is_scalar, number_of, same


def is_number(failure: Failure) -> bool:
    """Whether nothing but a number has changed, or been written to."""
    old, new = failure.old, failure.new
    if is_scalar(new):
        is_form = is_scalar(old) and (old.dtype, old.shape) == (new.dtype, new.shape)
        return is_form or isinstance(old, Written)
    return (
        (type(new) in (int, float) or isinstance(new, (np.floating, np.integer)))
        and type(old) is type(new)
        and same(new, failure.place.read())
    )


def numbers_before(changed: Sequence[Failure]) -> Iterator[list[Any]]:
    """The numbers in the earlier graph: of a tensor written to its own now, or when asked for."""
    yield [number_of(f.new if isinstance(f.old, Written) else f.old) for f in changed]
    yield [f.old.number if isinstance(f.old, Written) else number_of(f.old) for f in changed]
