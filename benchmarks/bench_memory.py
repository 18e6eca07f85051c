"""Resident memory of two workers that split a 400 MB model, plain and with ``deferred_init``.

    python benchmarks/bench_memory.py [--json FILE]

Prints, for each worker, what it holds after planning and its peak, above what a process holds
that captured a toy model, against the bounds: owned plus 120 MB after planning; the whole model
plus 60 MB at the peak, or owned plus 120 MB with ``deferred_init``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import graphsplit as gs

MB = 1e6
LAYERS, WIDTH = 100, 1000  # 100 layers of 4 MB


def resident(key: str) -> float:
    """``VmRSS`` or ``VmHWM`` of this process, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024 / MB
    raise RuntimeError(f"{key} is not in /proc/self/status")


def make_network(layers: int) -> torch.nn.Sequential:
    """A chain of equal linear layers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


def work(arguments: argparse.Namespace) -> None:
    """One worker's part."""
    gs.init()
    batch = (torch.zeros(2, WIDTH), torch.zeros(2, WIDTH))
    loss_fn = torch.nn.MSELoss()
    toy = torch.nn.Sequential(torch.nn.Linear(WIDTH, 2), torch.nn.Linear(2, WIDTH))
    toy[0].place("MS_WORKER", 0)
    toy[1].place("MS_WORKER", 1)
    gs.Model(toy, loss_fn, torch.optim.SGD(toy.parameters(), lr=0.1)).train_step(*batch)
    base = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the peak starts anew
    deferred = gs.deferred_init() if arguments.deferred else contextlib.nullcontext()
    with deferred:
        net = make_network(LAYERS)
    for index, layer in enumerate(net):
        layer.place("MS_WORKER", index * 2 // LAYERS)
    model = gs.Model(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1))
    model.predict(batch[0])  # plans; activations are small
    owned = LAYERS // 2 * (WIDTH * WIDTH + WIDTH) * 4 / MB
    report = {
        "deferred": arguments.deferred,
        "owned_mb": owned,
        "after_planning_mb": resident("VmRSS") - base,
        "peak_mb": resident("VmHWM") - base,
    }
    Path(f"{arguments.report}.{gs.get_rank()}").write_text(json.dumps(report))


def start(arguments: argparse.Namespace) -> None:
    """Run both jobs, then print what their workers measured."""
    found = []
    for deferred in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable, "-m", "graphsplit.cli", "run", "-n", "2", "--",
                __file__, "--report", f"{folder}/report", *(["--deferred"] if deferred else []),
            ]  # fmt: skip
            done = subprocess.run(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
            found += [json.loads(Path(f"{folder}/report.{r}").read_text()) for r in range(2)]
    print("                      owned   after planning (bound)     peak (bound)")
    for index, row in enumerate(found):
        bound = row["owned_mb"] + 120
        peak_bound = bound if row["deferred"] else 2 * row["owned_mb"] + 60
        print(
            f"{'deferred' if row['deferred'] else 'plain':9} worker {index % 2}  "
            f"{row['owned_mb']:7.1f}  {row['after_planning_mb']:8.1f} ({bound:.0f})  "
            f"{row['peak_mb']:12.1f} ({peak_bound:.0f})"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--deferred", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--report", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if os.environ.get("MS_ROLE"):
        work(arguments)
    else:
        start(arguments)


if __name__ == "__main__":
    main()
