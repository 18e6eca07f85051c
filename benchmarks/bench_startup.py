"""Start-up of LeNet on five workers against six processes that import torch and capture it once.

    python benchmarks/bench_startup.py [--rounds 5] [--json FILE]

A: six processes started together, each imports torch and captures LeNet's train step once by
torch.export; until the last has ended. B: a scheduler and five workers of the example, from launch
to the end of step 1 on all five. Then README's example on three workers against one process, from
launch to exit, with the time between the last line and the exit; and a process that imports torch
and graphsplit against one that imports torch. Alternating A B A B ...; medians, and the spread of
the ratio.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common import Row, Samples, checked, compared, environment, parser, write

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
        checked([*command, folder], env=ENVIRONMENT)
        return max(float((Path(folder) / str(rank)).read_text()) for rank in range(5)) - start


def readme_example() -> str:
    """The program of README that trains."""
    blocks = (HERE.parent / "README.md").read_text().split("```python\n")[1:]
    (found,) = (b.partition("```")[0] for b in blocks if "load_digits" in b)
    return found


def until_exit(command: list[str]) -> tuple[float, float]:
    """Seconds from launch to exit, and from the last line to exit."""
    start = last = time.monotonic()
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        for _ in process.stdout:
            last = time.monotonic()
    end = time.monotonic()
    if process.returncode:
        raise SystemExit(f"{command} ended with status {process.returncode}")
    return end - start, end - last


def example_row(rounds: int) -> Row:
    """README's example on three workers and in one process."""
    workers, alone, ends = Samples(), Samples(), Samples()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "example.py"
        script.write_text(readme_example())
        launch = [sys.executable, "-m", "graphsplit.cli", "run", "-n", "3", str(script)]
        for _ in range(rounds):
            alone.seconds.append(until_exit([sys.executable, str(script)])[0])
            whole, end = until_exit(launch)
            workers.seconds.append(whole)
            ends.seconds.append(end)
    return compared(
        "README's example, from launch to exit",
        ("three workers", workers),
        ("one process", alone),
        reach=1.8,
        further_sides={"from the last line to exit": ends.summary()},
    )


def import_row(rounds: int) -> Row:
    """What graphsplit's import costs beside torch's, and what the first use of it imports."""
    torch = "import torch"
    own = f"{torch}; import graphsplit as gs"
    sides = {torch: Samples(), own: Samples(), f"{own}; gs.init, gs.Model": Samples()}
    for _ in range(rounds):
        for code, side in sides.items():
            start = time.monotonic()
            checked([sys.executable, "-c", code], env=ENVIRONMENT)
            side.seconds.append(time.monotonic() - start)
    alone, ours, used = sides.items()
    return compared("imports", ours, alone, reach=None, further_sides={used[0]: used[1].summary()})


def rows(rounds: int) -> Iterator[Row]:
    """The rows."""
    six_captures()  # warms the page cache
    captures, workers = Samples(), Samples()
    for _ in range(rounds):
        captures.seconds.append(six_captures())
        workers.seconds.append(five_workers())
    yield compared(
        "LeNet on 5 workers, from launch to the end of step 1",
        ("five workers", workers),
        ("six captures", captures),
        reach=None,
    )
    yield example_row(rounds)
    yield import_row(rounds)


def main() -> None:
    """Read the command line."""
    arguments = parser(__doc__).parse_args()
    conditions = environment()
    write(arguments, rows(arguments.rounds), conditions)


if __name__ == "__main__":
    main()
