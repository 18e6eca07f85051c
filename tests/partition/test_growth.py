"""Large graphs are planned in seconds: what takes the square of their size would take minutes.

How time and memory grow is measured by ``benchmarks/bench_planning.py``.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphsplit.partition.checks.sound import verify
from graphsplit.partition.dump import describe_plan
from graphsplit.partition.edges import partition
from graphsplit.partition.spans import gradient_spans
from graphsplit.placement.resolve import PlacedGraph
from graphsplit.program.depths import channel_depths
from graphsplit.program.lower import describe_programs, lower
from graphsplit.program.proof import verify_programs
from graphsplit.schedule.named import gpipe

GRAPHS = Path(__file__).parents[2] / "benchmarks" / "common_graphs.py"
_spec = importlib.util.spec_from_file_location("benchmarks_graphs", GRAPHS)
assert _spec is not None
assert _spec.loader is not None
_graphs: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_graphs)

DEADLINE_S = 30.0  # about ten times what it takes


def over_64_workers() -> PlacedGraph:
    placed: PlacedGraph = _graphs.by_layer(
        _graphs.layered_graph(20_000), num_workers=64, num_cuts=200
    )
    return placed


def on_any_of_8_workers() -> PlacedGraph:
    return _graphs.at_random(_graphs.layered_graph(20_000), num_workers=8)


def on_one_worker() -> PlacedGraph:
    return _graphs.by_layer(_graphs.layered_graph(20_000), num_workers=1, num_cuts=0)


@pytest.mark.parametrize(
    ("make", "num_microbatches"),
    [(over_64_workers, 8), (on_any_of_8_workers, 1), (on_one_worker, 64)],
)
def test_twenty_thousand_operations_are_planned_in_seconds(
    make: Callable[[], PlacedGraph], num_microbatches: int
) -> None:
    start = time.process_time()
    placed = make()
    plan = partition(placed, is_microbatched=num_microbatches > 1)
    verify(plan)
    assert len(gradient_spans(plan)) <= len(plan.edges)
    programs = lower(plan, gpipe, num_microbatches=num_microbatches)
    verify_programs(plan, programs, depths=channel_depths(programs))
    assert describe_plan(plan)
    assert describe_programs(programs)
    assert time.process_time() - start < DEADLINE_S


def test_layers_are_placed_with_the_number_of_cuts_asked_for() -> None:
    placed = _graphs.by_layer(_graphs.layered_graph(1_000), num_workers=4, num_cuts=9)
    workers = [
        worker
        for worker, node in zip(placed.workers, placed.graph.nodes, strict=True)
        if node.module_path.startswith("layers.") and not node.is_state
    ]
    assert sum(a != b for a, b in zip(workers[1:], workers, strict=False)) == 9
    assert set(workers) == {0, 1, 2, 3}
