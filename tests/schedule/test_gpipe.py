"""GPipe: all microbatches forward, then all backward, in the order of the microbatches."""

from __future__ import annotations

from pass_helpers import Op, placed_graph

from graphsplit.partition.edges import partition
from graphsplit.partition.plan import PartitionPlan
from graphsplit.schedule.named import gpipe


def there_and_back() -> PartitionPlan:
    """Worker 0, then worker 1, then worker 0 again: seg0, seg1, seg2."""
    ops = {"a": Op(0, ("x", "w")), "b": Op(1, ("a",)), "c": Op(0, ("b",))}
    return partition(placed_graph(ops, parameters={"w": 0}))


def order(plan: PartitionPlan, worker: int, num_microbatches: int) -> list[str]:
    names = {"FORWARD": "F", "BACKWARD": "B"}
    return [
        f"{names[i.opcode.value]}{i.microbatch}.{i.operand}"
        for i in gpipe(plan, num_microbatches)[worker]
    ]


def test_forward_of_all_microbatches_comes_before_any_backward() -> None:
    assert order(there_and_back(), 1, 3) == ["F0.1", "F1.1", "F2.1", "B0.1", "B1.1", "B2.1"]


def test_a_worker_does_something_else_while_another_one_works_for_it() -> None:
    plan = there_and_back()
    assert order(plan, 0, 2) == ["F0.0", "F1.0", "F0.2", "F1.2", "B0.2", "B1.2", "B0.0", "B1.0"]


def test_with_one_microbatch_segments_run_by_rising_level_and_back() -> None:
    assert order(there_and_back(), 0, 1) == ["F0.0", "F0.2", "B0.2", "B0.0"]


def test_segments_without_gradients_do_not_run_backward() -> None:
    ops = {
        "metric": Op(1, ("x",), requires_grad=False),
        "loss": Op(0, ("x", "w")),
    }
    plan = partition(placed_graph(ops, parameters={"w": 0}))
    assert order(plan, 1, 1) == ["F0.1"]


def test_a_worker_without_segments_computes_nothing() -> None:
    plan = partition(placed_graph({"a": Op(0, ("x",))}, num_workers=2))
    assert order(plan, 1, 4) == []
