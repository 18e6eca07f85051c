"""The growth of planning with the size of the graph, from placement to the proof of no deadlock.

    python benchmarks/bench_planning.py [--rounds 3] [--quick] [--json FILE]

Makes graphs of 2,000 to 100,000 operations without capturing anything, places them by layer on 64
workers (one cut per 100 operations), at random on 8 workers, and on one worker, and runs every pass
that stands between a captured graph and an agreed plan, each size in a process of its own. Prints
CPU seconds per pass, the peak of memory above that of the imports, and how both grow from a tenth
of the size (or a quarter). What needs a real network is measured apart: capture, and the code of
the segments, of a tall network of 50 and 200 layers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import Row, checked, environment, parser
from common_graphs import at_random, by_layer, layered_graph
from torch import nn

from graphsplit.batches.step_functions import run_train
from graphsplit.capture.export import CaptureRequest, capture
from graphsplit.capture.graph import Mode
from graphsplit.marks.annotations import place_module
from graphsplit.partition.checks.sound import verify
from graphsplit.partition.dump import describe_plan
from graphsplit.partition.edges import partition
from graphsplit.partition.recomputation import with_recomputation
from graphsplit.partition.spans import gradient_spans
from graphsplit.partition.splitting import with_splits
from graphsplit.placement.resolve import PlacedGraph, PlacementRules, resolve
from graphsplit.planning.task import module_annotations
from graphsplit.program.depths import channel_depths
from graphsplit.program.liveness import last_uses
from graphsplit.program.lower import describe_programs, lower
from graphsplit.program.proof import verify_programs
from graphsplit.runtime.segments.code import build_code
from graphsplit.schedule.named import one_forward_one_backward

# (placement, microbatches) and the sizes, in operations.
CASES: list[tuple[str, int, list[int]]] = [
    ("by layer", 1, [2_000, 10_000, 20_000, 100_000]),
    ("by layer", 64, [2_000, 10_000, 20_000, 100_000]),
    ("random", 1, [2_000, 10_000, 20_000, 100_000]),
    ("random", 64, [500, 2_000, 5_000]),
    ("one worker", 64, [2_000, 10_000, 20_000, 100_000]),
]
LAYERS = [50, 200]


def peak_mb() -> float:
    """The most memory this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Laps:
    """CPU seconds between one call and the next."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self._last = time.process_time()

    def __call__(self, name: str) -> None:
        """Note the time since the last call under a name."""
        now = time.process_time()
        self.found[name] = now - self._last
        self._last = now


def place(size: int, placement: str) -> tuple[PlacedGraph, Laps]:
    """A graph, and where its operations run; only the placement is timed."""
    graph = layered_graph(size)
    laps = Laps()
    if placement == "random":
        placed = at_random(graph, num_workers=8)
    elif placement == "by layer":
        placed = by_layer(graph, num_workers=64, num_cuts=size // 100)
    else:
        placed = by_layer(graph, num_workers=1, num_cuts=0)
    laps("resolve")
    return placed, laps


def plan_once(size: int, placement: str, num_microbatches: int) -> dict[str, Any]:
    """All passes once, in this process."""
    before = peak_mb()
    placed, laps = place(size, placement)
    plan = partition(placed, is_microbatched=num_microbatches > 1)
    laps("partition")
    verify(plan)
    laps("verify")
    gradient_spans(plan)
    laps("spans")
    plan = with_splits(with_recomputation(plan))
    laps("split")
    programs = lower(plan, one_forward_one_backward, num_microbatches=num_microbatches)
    laps("lower")
    last_uses(plan, programs[0])
    laps("liveness")
    depths = channel_depths(programs)
    laps("depths")
    verify_programs(plan, programs, depths=depths)
    laps("prove")
    text = "\n".join([describe_plan(plan), describe_programs(programs)])
    hashlib.sha256(text.encode()).hexdigest()
    laps("text")
    return {
        "seconds": laps.found,
        "peak_mb": peak_mb() - before,
        "nodes": len(placed.workers),
        "segments": len(plan.segments),
        "edges": len(plan.edges),
        "instructions": sum(len(program.instructions) for program in programs),
        "text_mb": len(text) / 1e6,
    }


class Block(nn.Module):
    """One layer of the tall network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.relu, self.dropout = nn.ReLU(inplace=True), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A residual layer."""
        inner = self.relu(self.first(self.norm(x))).contiguous()
        result: torch.Tensor = x + self.dropout(self.second(inner))
        return result


class Tall(nn.Module):
    """A chain of layers, whose output is its own loss."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(8) for _ in range(num_layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of the squares."""
        result: torch.Tensor = self.layers(x).square().mean()
        return result


def capture_once(num_layers: int) -> dict[str, Any]:
    """Capture the tall network, and make the code of all its segments: one per layer."""
    before = peak_mb()
    network = Tall(num_layers)
    for index, layer in enumerate(network.layers):
        place_module(layer, "MS_WORKER", index % 8)
    batch = (torch.zeros(2, 8),)
    laps = Laps()
    torch.export.export(network, batch, strict=False)
    laps("export alone")
    request = CaptureRequest(network, None, run_train, Mode.TRAIN, 0, batch, {})
    graph = capture(request)
    laps("capture")
    plan = partition(resolve(graph, PlacementRules(8, module_annotations(network, None))))
    laps("plan")
    for segment in plan.segments:
        build_code(plan, segment.index)
    laps("code")
    return {
        "seconds": laps.found,
        "peak_mb": peak_mb() - before,
        "nodes": len(graph.nodes),
        "segments": len(plan.segments),
    }


def in_fresh_process(*arguments: str) -> dict[str, Any]:
    """The findings of this script for one job."""
    command = [sys.executable, __file__, "--job", *arguments]
    done = checked(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The last run, with the medians of its times and memory."""
    names = runs[0]["seconds"]
    seconds = {name: statistics.median(run["seconds"][name] for run in runs) for name in names}
    peak = statistics.median(run["peak_mb"] for run in runs)
    return {**runs[-1], "seconds": seconds, "peak_mb": peak}


def measure(name: str, jobs: dict[int, list[str]], rounds: int) -> dict[str, Any]:
    """All sizes of one case, ``rounds`` times in turn; prints a line for each."""
    runs: dict[int, list[dict[str, Any]]] = {size: [] for size in jobs}
    for _ in range(rounds):
        for size, arguments in jobs.items():
            runs[size].append(in_fresh_process(*arguments))
    print(f"\n{name}")
    result: dict[str, Any] = {}
    for size in jobs:
        found = result[str(size)] = medians(runs[size])
        found["total_s"] = sum(found["seconds"].values())
        times = "  ".join(f"{key} {value:.2f}" for key, value in found["seconds"].items())
        line = f"  {size:7,}: {found['total_s']:7.2f} s  {found['peak_mb']:6.0f} MB  ({times})"
        smaller = next((s for s in (size // 10, size // 4) if s in jobs), None)
        if smaller is not None:
            last = result[str(smaller)]
            found["growth"] = {
                "size": size / smaller,
                "time": found["total_s"] / last["total_s"],
                "memory": found["peak_mb"] / max(last["peak_mb"], 1.0),
            }
            growth = {name: f"x{value:.1f}" for name, value in found["growth"].items()}
            line += "\n           size {size}: time {time}, memory {memory}".format(**growth)
        print(line, flush=True)
    return result


def rows_of(name: str, found: dict[str, Any]) -> list[Row]:
    """The row of the table: the largest graph, against one of a tenth of its size."""
    large = max(map(int, found))
    small = large // 10
    if str(small) not in found:
        return []
    seconds = {size: found[str(size)]["total_s"] for size in (small, large)}
    growth = seconds[large] / seconds[small]
    return [
        Row(
            work=f"planning, verification and lowering of {large:,} operations, {name}",
            against=f"{small:,} operations",
            figure="time of the large graph ÷ time of the small one",
            ratio=growth,
            spread=(growth, growth),
            reach=12.0,
            at_most=True,
            sides={f"{size:,} operations": f"{seconds[size]:.2f} s" for size in (small, large)},
        )
    ]


def main() -> None:
    """Measure and print."""
    options = parser(__doc__, rounds=3)
    options.add_argument("--quick", action="store_true", help="nothing above 10,000 operations")
    options.add_argument("--job", nargs="+", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.job:
        size, *rest = arguments.job
        found = plan_once(int(size), rest[0], int(rest[1])) if rest else capture_once(int(size))
        print(json.dumps(found))
        return
    results = environment() | {"rounds": arguments.rounds, "notes": arguments.notes}
    for placement, number, sizes in CASES:
        kept = [size for size in sizes if size <= 10_000 or not arguments.quick]
        name = f"{placement}, {number} microbatch{'es' if number > 1 else ''}"
        jobs = {size: [str(size), placement, str(number)] for size in kept}
        results[name] = measure(name, jobs, arguments.rounds)
        if number > 1 and placement == "by layer":
            results["rows"] = [asdict(row) for row in rows_of(name, results[name])]
    jobs = {layers: [str(layers)] for layers in LAYERS}
    results["tall network, layers"] = measure("tall network, layers", jobs, arguments.rounds)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
