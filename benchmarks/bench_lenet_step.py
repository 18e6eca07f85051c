"""Step time of LeNet on five workers against a plain eager loop in one process.

    python benchmarks/bench_lenet_step.py [--rounds 9] [--steps 200] [--json FILE]

Starts a scheduler and five workers of this very script. In every round worker 0 first runs the
plain loop while the others wait at a barrier, then all five run the same batches through the
Model: A B A B ..., in one run, with the same threads and malloc settings. Prints medians, the
ratio's spread, minor page faults per step, and where the time of a step goes on each worker.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import graphsplit as gs
from graphsplit.capture.graph import Mode

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "lenet_mnist"
sys.path.insert(0, str(EXAMPLE))
PLACEMENT = {"fc1": 0, "fc2": 1, "fc3": 2, "conv1": 3, "conv2": 4}
BATCH = 32


def make(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A LeNet and its optimizer, the same for a seed."""
    from lenet import LeNet5

    torch.manual_seed(seed)
    net = LeNet5()
    return net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def make_batches(num_steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random batches, made before anything is timed."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(BATCH, 1, 32, 32, generator=generator),
            torch.randint(0, 10, (BATCH,), generator=generator),
        )
        for _ in range(num_steps)
    ]


def plain_loop(
    net: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
) -> float:
    """The reference: ordinary PyTorch. Returns the last loss."""
    loss_fn = torch.nn.CrossEntropyLoss()
    loss = torch.zeros(())
    for inputs, target in batches:
        optimizer.zero_grad()
        loss = loss_fn(net(inputs), target)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def faults() -> int:
    """Minor page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class LastLoss(gs.callbacks.Callback):
    """Keeps the last loss, to compare it with the plain loop's."""

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        """Remember it."""
        self.loss = context.loss


def breakdown(model: gs.Model, batches: list[Any]) -> dict[str, float]:
    """Milliseconds a step of each kind of instruction, in a round of its own with timers in it."""
    planned = model._engine.planner.latest(Mode.TRAIN)
    runner = planned.runner
    spent: Counter[str] = Counter()
    plain_actions = runner._actions

    def timed(kind: str, action: Any) -> Any:
        def run(state: Any) -> None:
            start = time.perf_counter()
            action(state)
            spent[kind] += time.perf_counter() - start

        return run

    instructions = planned.programs[gs.get_rank()].instructions
    runner._actions = [
        timed(instruction.opcode.value, action)
        for instruction, action in zip(instructions, plain_actions, strict=True)
    ]
    gs.barrier()
    start = time.perf_counter()
    model.train(1, batches)
    whole = time.perf_counter() - start
    runner._actions = plain_actions
    spent["rest"] = whole - sum(spent.values())
    return {kind: seconds * 1e3 / len(batches) for kind, seconds in spent.items()}


def work(arguments: argparse.Namespace) -> None:
    """One worker's part."""
    gs.init()
    batches = make_batches(arguments.steps)
    plain_net, plain_optimizer = make()
    net, optimizer = make()
    for name, rank in PLACEMENT.items():
        getattr(net, name).place("MS_WORKER", rank)
    model = gs.Model(net, torch.nn.CrossEntropyLoss(), optimizer)
    keep = LastLoss()
    rows = []
    for round_number in range(arguments.rounds + 1):  # the first round warms up
        row = {}
        gs.barrier()
        if gs.get_rank() == 0:
            start, before = time.perf_counter(), faults()
            plain_loss = plain_loop(plain_net, plain_optimizer, batches)
            row["plain_ms"] = (time.perf_counter() - start) * 1e3 / arguments.steps
            row["plain_faults"] = (faults() - before) / arguments.steps
        gs.barrier()
        start, before = time.perf_counter(), faults()
        cpu = time.process_time()
        model.train(1, batches, callbacks=[keep])
        row["split_ms"] = (time.perf_counter() - start) * 1e3 / arguments.steps
        row["cpu_ms"] = (time.process_time() - cpu) * 1e3 / arguments.steps
        row["split_faults"] = (faults() - before) / arguments.steps
        if gs.get_rank() == 0:
            assert float(keep.loss) == plain_loss, "the bits differ"
        if round_number:
            rows.append(row)
    report = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    if gs.get_rank() == 0:
        ratios = sorted(row["split_ms"] / row["plain_ms"] for row in rows)
        report |= {
            "ratio": statistics.median(ratios),
            "ratio_min": ratios[0],
            "ratio_max": ratios[-1],
        }
    report["rank"] = gs.get_rank()
    report["breakdown_ms"] = breakdown(model, batches)
    Path(f"{arguments.report}.{gs.get_rank()}").write_text(json.dumps(report))


def start(arguments: argparse.Namespace) -> None:
    """Run the job, then print what its workers measured."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "graphsplit.cli", "run", "-n", "5", "--",
            __file__, "--report", f"{folder}/report",
            "--rounds", str(arguments.rounds), "--steps", str(arguments.steps),
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout[-4000:], done.stderr[-4000:], sep="\n")
            raise SystemExit(done.returncode)
        reports = [json.loads(Path(f"{folder}/report.{rank}").read_text()) for rank in range(5)]
    first = reports[0]
    print(
        f"plain loop, one process   {first['plain_ms']:7.3f} ms a step, "
        f"{first['plain_faults']:.1f} minor faults"
    )
    print(f"graphsplit, five workers  {first['split_ms']:7.3f} ms a step")
    print(
        f"ratio                     {first['ratio']:7.3f}   "
        f"({first['ratio_min']:.3f} to {first['ratio_max']:.3f}, {arguments.rounds} rounds)"
    )
    for report in reports:
        print(
            f"  worker {report['rank']}: {report['cpu_ms']:.3f} ms of CPU, "
            f"{report['split_faults']:.1f} minor faults a step"
        )
    print_breakdown(reports)
    if arguments.json:
        found = {
            "hardware": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "workers": reports,
        }
        Path(arguments.json).write_text(json.dumps(found, indent=2))


def print_breakdown(reports: list[dict[str, Any]]) -> None:
    """Where a step's time goes. LeNet's layers run one after the other, so compute adds up."""
    kinds = ["FORWARD", "BACKWARD", "OPTIMIZER", "SEND", "RECEIVE", "rest"]
    print("ms a step   " + "".join(f"{kind:>11}" for kind in kinds))
    for report in reports:
        spent = report["breakdown_ms"]
        row = "".join(f"{spent.get(kind, 0.0):11.3f}" for kind in kinds)
        print(f"  worker {report['rank']}  {row}")
    compute = sum(
        report["breakdown_ms"].get(kind, 0.0)
        for report in reports
        for kind in ("FORWARD", "BACKWARD")
    )
    sends = sum(report["breakdown_ms"].get("SEND", 0.0) for report in reports)
    step = reports[0]["split_ms"]
    print(
        f"on the critical path: {compute:.2f} ms of forward and backward, {sends:.2f} ms of sends, "
        f"{step - compute - sends:.2f} ms of wake-ups, receives, tickets and one optimizer step"
    )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json")
    parser.add_argument("--report", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if os.environ.get("MS_ROLE"):
        work(arguments)
    else:
        start(arguments)


if __name__ == "__main__":
    main()
