"""Parts of an own loop's snapshot, put together for another number of workers."""

from __future__ import annotations

import pytest
import torch

from graphsplit.encoding.packed import FlatTensors
from graphsplit.errors import ConfigurationError
from graphsplit.recovery.loops.disk import merged
from graphsplit.recovery.snapshot.shard import SnapshotShard


def part(rank: int, **numbers: float) -> SnapshotShard:
    """The part of one worker, with what it keeps and draws."""
    flat = FlatTensors()
    flat.copy({name.replace("_", "/"): torch.tensor(value) for name, value in numbers.items()})
    values = {"number": 3, "rank": rank, "networks": [], "optimizers": [], "kept": []}
    return SnapshotShard(values, flat.memory, flat.slots)


def test_what_all_keep_alike_and_what_lives_on_one_are_put_together() -> None:
    whole = merged([part(0, keep0_a=1.0, net0_w=2.0), part(1, keep0_a=1.0, net0_b=3.0)], 4)

    assert (whole.number, whole.rank) == (3, 4)
    assert {n: float(whole.tensor(n)) for n in whole.slots} == {
        "keep0/a": 1.0,
        "net0/w": 2.0,
        "net0/b": 3.0,
    }


def test_generators_that_differ_are_those_of_the_first() -> None:
    whole = merged([part(0, generators_1=1.0), part(1, generators_1=2.0)], 0)
    assert float(whole.tensor("generators/1")) == 1.0


def test_what_each_has_kept_for_itself_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigurationError, match=r"on which keep0/a was not the same") as caught:
        merged([part(0, keep0_a=1.0), part(1, keep0_a=2.0)], 0)
    assert "Fix: start the job with 2 workers" in str(caught.value)
