"""Memory of two workers: what a split model takes while it is built, and while it trains.

    python benchmarks/bench_memory.py [--rounds 3] [--only plain deferred training] [--json FILE]

``plain`` and ``deferred``: a model of 400 MB in two halves, made as it is and under
``gs.deferred_init``. What each worker holds after planning, and its peak until then, above what a
process holds that captured a toy model, by its bound: owned plus 120 MB after planning; the whole
model plus 60 MB at the peak, or owned plus 120 MB with ``deferred_init``.

``training``: a GPT-like model with 32 microbatches, against torch's 1F1B. Each side runs in
processes of its own, so that one's memory is not the other's. What counts is the peak of each
worker while it trains, above what it held when both sides had imported everything and nothing was
built. Shared memory counts on both workers.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from common import Row, parser
from common_cluster import free_port, launch, report, run
from common_models import GPT, made, place_gpt, token_batches
from torch.nn import functional as F

import graphsplit as gs

MB = 1e6
LAYERS, WIDTH = 100, 1000  # 100 layers of 4 MB
OWNED_MB = LAYERS // 2 * (WIDTH * WIDTH + WIDTH) * 4 / MB
MORE_MB, PEAK_MORE_MB = 120, 60
STEPS = 3
SIDES = ("graphsplit", "torch 1F1B")


def resident_mb(key: str) -> float:
    """``VmRSS``, or the peak ``VmHWM``, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024 / MB


def begin_peak() -> None:
    """The peak starts anew."""
    Path("/proc/self/clear_refs").write_text("5")


def work(arguments: argparse.Namespace) -> None:
    """One worker's part."""
    (kind,) = arguments.only
    measure_training(arguments) if kind == "training" else measure_building(kind == "deferred")


def measure_building(is_deferred: bool) -> None:
    """Plan a chain of equal linear layers."""
    batch = (torch.zeros(2, WIDTH), torch.zeros(2, WIDTH))
    loss_fn = torch.nn.MSELoss()
    toy = torch.nn.Sequential(torch.nn.Linear(WIDTH, 2), torch.nn.Linear(2, WIDTH))
    toy[0].place("MS_WORKER", 0)
    toy[1].place("MS_WORKER", 1)
    gs.Model(toy, loss_fn, torch.optim.SGD(toy.parameters(), lr=0.1)).train_step(*batch)
    base = resident_mb("VmRSS")
    begin_peak()
    with gs.deferred_init() if is_deferred else contextlib.nullcontext():
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    for index, layer in enumerate(net):
        layer.place("MS_WORKER", index * 2 // LAYERS)
    model = gs.Model(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1))
    model.predict(batch[0])  # plans; activations are small
    report({"planned_mb": resident_mb("VmRSS") - base, "peak_mb": resident_mb("VmHWM") - base})


def measure_training(arguments: argparse.Namespace) -> None:
    """Train by one of the two sides."""
    from torch_pipeline import TorchPipeline, dist, join

    # What export imports when it is first called.
    torch.export.export(torch.nn.Linear(1, 1), (torch.zeros(1, 1),), strict=False)
    number, batches = arguments.microbatches, token_batches(STEPS)
    before = resident_mb("VmRSS")
    if arguments.side == SIDES[0]:
        net, optimizer = made(GPT)
        place_gpt(net)
        model = gs.Model(net, F.cross_entropy, optimizer, microbatches=number)
        model.train(1, batches[:1])
        begin_peak()  # planning is another row's matter
        model.train(1, batches)
    else:
        join(gs.get_rank(), arguments.port)
        theirs = TorchPipeline(SIDES[1], gs.get_rank(), number)
        theirs.train(batches[:1])
        begin_peak()
        theirs.train(batches)
        dist.destroy_process_group()
    gs.barrier()
    report({"peak_mb": resident_mb("VmHWM") - before})


def larger(rounds: Sequence[Sequence[float]]) -> list[float]:
    """The machine must have room for the larger worker."""
    return [max(workers) for workers in rounds]


def in_words(rounds: Sequence[Sequence[float]]) -> str:
    """The medians of each worker."""
    medians = (statistics.median(worker) for worker in zip(*rounds, strict=True))
    return "MB, worker by worker: " + ", ".join(f"{one:.1f}" for one in medians)


def memory_row(
    work: str, ours: Sequence[Sequence[float]], against: str, theirs: Sequence[Sequence[float]]
) -> Row:
    """A row from each worker's memory, round by round."""
    ratios = [a / b for a, b in zip(larger(ours), larger(theirs), strict=True)]
    return Row(
        work=work,
        against=against,
        figure=f"graphsplit ÷ {against}, memory of the larger worker",
        ratio=statistics.median(ratios),
        spread=(min(ratios), max(ratios)),
        reach=1.0,
        at_most=True,
        sides={"graphsplit": in_words(ours), against: in_words(theirs)},
    )


def building_rows(arguments: argparse.Namespace, kind: str) -> Iterator[Row]:
    """The memory after planning, and at the peak until then, by the bounds."""
    rounds = [launch(__file__, 2, arguments, only=[kind]) for _ in range(arguments.rounds)]
    planned = OWNED_MB + MORE_MB
    peak = planned if kind == "deferred" else 2 * OWNED_MB + PEAK_MORE_MB
    for what, bound in (("planned", planned), ("peak", peak)):
        found = [[one[f"{what}_mb"] for one in reports] for reports in rounds]
        title = f"400 MB on 2 workers, {kind}, {what}"
        yield memory_row(title, found, "its bound", [[bound, bound]] * len(rounds))


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Two rows for each way to build, and one for training."""
    for kind in arguments.only:
        if kind != "training":
            yield from building_rows(arguments, kind)
            continue
        found: dict[str, list[list[float]]] = {side: [] for side in SIDES}
        for _ in range(arguments.rounds):
            for side in SIDES:
                given = {"only": [kind], "side": side, "port": free_port()}
                reports = launch(__file__, 2, arguments, **given)
                found[side].append([one["peak_mb"] for one in reports])
        number = arguments.microbatches
        title = f"GPT-like, 2 workers, {number} microbatches, 1f1b: peak memory"
        yield memory_row(title, found[SIDES[0]], SIDES[1], found[SIDES[1]])


def main() -> None:
    """Read the command line."""
    kinds = ["plain", "deferred", "training"]
    options = parser(__doc__, rounds=3)
    options.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    options.add_argument("--microbatches", type=int, default=32)
    options.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options.add_argument("--port", type=int, help=argparse.SUPPRESS)
    run(options, work, rows)


if __name__ == "__main__":
    main()
