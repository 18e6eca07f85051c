"""What a script changes of a network between steps, compared with the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from equivalence_helpers import batches_of, rows_against_target
from simulated.equivalence import assert_same_bits
from torch import nn

from graphsplit.errors import OwnershipError

Change = Callable[[int, Any, Any], Any]
Make, Place = Callable[[], nn.Module], Callable[[Any], None]


def assert_written_on_the_owner(make: Make, place: Place, change: Change, **options: Any) -> None:
    """Change a network before each of four steps, and evaluate it after two of them."""
    assert_same_bits(
        make,
        batches_of(8, 3, num=4),
        num_workers=2,
        place=place,
        loss_fn=rows_against_target,
        before_step=change,
        evaluate_after=(1, 3),
        **options,
    )


def assert_refused_elsewhere(make: Make, place: Place, use: Callable[[Any], object]) -> None:
    """Use a network after a step in a way that takes values which live on another worker."""
    with pytest.raises(OwnershipError, match="lives on worker"):
        assert_same_bits(
            make,
            batches_of(8, 3, num=2),
            num_workers=2,
            place=place,
            loss_fn=rows_against_target,
            before_step=lambda step, net, loss_fn: use(net) if step else None,
            plan_everywhere=True,
        )
