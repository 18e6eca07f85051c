"""Start-up of LeNet on five workers against six processes that import torch and capture it once.

    python benchmarks/bench_startup.py [--rounds 5] [--json FILE]

A: six processes started together, each imports torch and captures LeNet's train step once by
torch.export; until the last has ended. B: a scheduler and five workers of the example, from launch
to the end of step 1 on all five. Alternating A B A B ...; medians, and the spread of the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "examples" / "lenet_mnist"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(
    [str(EXAMPLE), str(HERE.parent)])}  # fmt: skip

CAPTURE = """
import torch
from lenet import LeNet5
class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.loss = LeNet5(), torch.nn.CrossEntropyLoss()
    def forward(self, x, y):
        return self.loss(self.net(x), y)
batch = (torch.zeros(32, 1, 32, 32), torch.zeros(32, dtype=torch.int64))
torch.export.export(Step(), batch, strict=False)
"""

WORKER = """
import sys, time
import torch
import graphsplit as gs
from lenet import LeNet5
gs.init()
torch.manual_seed(0)
net = LeNet5()
for name, rank in {"fc1": 0, "fc2": 1, "fc3": 2, "conv1": 3, "conv2": 4}.items():
    getattr(net, name).place("MS_WORKER", rank)
model = gs.Model(net, torch.nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.01))
model.train(1, [(torch.zeros(32, 1, 32, 32), torch.zeros(32, dtype=torch.int64))])
open(f"{sys.argv[1]}/{gs.get_rank()}", "w").write(repr(time.time()))
"""


def six_captures() -> float:
    """Seconds until six processes have imported torch and captured LeNet."""
    start = time.time()
    running = [subprocess.Popen([sys.executable, "-c", CAPTURE], env=ENVIRONMENT) for _ in range(6)]
    if any(process.wait() for process in running):
        raise SystemExit("a capture failed")
    return time.time() - start


def five_workers() -> float:
    """Seconds from the launch to the end of step 1 on all five workers."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "worker.py"
        script.write_text(WORKER)
        start = time.time()
        command = [sys.executable, "-m", "graphsplit.cli", "run", "-n", "5", "--", str(script)]
        done = subprocess.run([*command, folder], env=ENVIRONMENT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
        return max(float((Path(folder) / str(rank)).read_text()) for rank in range(5)) - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    six_captures()  # warms the page cache
    rows = [(six_captures(), five_workers()) for _ in range(arguments.rounds)]
    ratios = sorted(b / a for a, b in rows)
    found = {
        "six_captures_s": statistics.median(a for a, _ in rows),
        "five_workers_s": statistics.median(b for _, b in rows),
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
    }
    print(f"six processes: import torch, one capture  {found['six_captures_s']:6.2f} s")
    print(f"five workers and scheduler, first step    {found['five_workers_s']:6.2f} s")
    print(f"ratio {found['ratio']:.3f} ({found['ratio_min']:.3f} to {found['ratio_max']:.3f})")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
