"""Peak memory of a GPT-like model on two workers with 32 microbatches, against torch's 1F1B.

    python benchmarks/bench_peak_memory.py [--rounds 5] [--microbatches 32] [--json FILE]

Each side runs in processes of its own, so that one's memory is not the other's. What counts is the
highest resident memory of each worker while it trains, above what it held when both sides had
imported everything and nothing was built. Shared memory counts on both workers.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path

from bench_pipeline import TorchPipeline, place
from common import Row, environment, equal_conditions, parser, write
from common_cluster import free_port, is_worker, launch, report
from common_models import GPT, made, token_batches
from torch.nn import functional as F

STEPS = 3
SIDES = ("graphsplit", "torch 1F1B")


def _memory_mb(name: str) -> float:
    """A figure of /proc/self/status in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def work(arguments: argparse.Namespace) -> None:
    """One worker of one side."""
    equal_conditions()
    import torch
    import torch.distributed.pipelining

    import graphsplit as gs

    gs.init()
    # What export imports when it is first called.
    torch.export.export(torch.nn.Linear(1, 1), (torch.zeros(1, 1),), strict=False)
    rank, number = gs.get_rank(), arguments.microbatches
    batches = token_batches(STEPS)
    before = _memory_mb("VmRSS")
    if arguments.side == SIDES[0]:
        net, optimizer = made(GPT)
        place(net)
        model = gs.Model(net, F.cross_entropy, optimizer, microbatches=number)
        model.train(1, batches[:1])
        Path("/proc/self/clear_refs").write_text("5")  # planning is another row's matter
        model.train(1, batches)
    else:
        theirs = TorchPipeline(rank, arguments.port, number)
        theirs.train(batches[:1])
        Path("/proc/self/clear_refs").write_text("5")
        theirs.train(batches)
        theirs.close()
    gs.barrier()
    report({"peak_mb": _memory_mb("VmHWM") - before})


def rows(arguments: argparse.Namespace) -> list[Row]:
    """The row."""
    found: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    for _ in range(arguments.rounds):
        for side in SIDES:
            options = ["--side", side, "--port", str(free_port())]
            options += ["--microbatches", str(arguments.microbatches)]
            reports = launch(os.path.abspath(__file__), 2, options)
            found[side].append([worker["peak_mb"] for worker in reports])
    ours, theirs = (
        [max(workers) for workers in found[side]] for side in SIDES
    )  # the machine must have room for the larger worker
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    medians = {
        side: "peak MB, worker by worker: "
        + ", ".join(f"{statistics.median(w):.1f}" for w in zip(*found[side], strict=True))
        for side in SIDES
    }
    return [
        Row(
            work=f"GPT-like, 2 workers, {arguments.microbatches} microbatches, 1f1b: peak memory",
            against=SIDES[1],
            figure="graphsplit ÷ torch 1F1B, peak memory of the larger worker",
            ratio=statistics.median(ratios),
            spread=(min(ratios), max(ratios)),
            reach=1.0,
            at_most=True,
            sides=medians,
        )
    ]


def main() -> None:
    """Read the command line."""
    made_parser = parser(__doc__)
    made_parser.add_argument("--microbatches", type=int, default=32)
    made_parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    made_parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = made_parser.parse_args()
    if is_worker():
        work(arguments)
    else:
        conditions = environment()
        write(arguments, rows(arguments), conditions)


if __name__ == "__main__":
    main()
