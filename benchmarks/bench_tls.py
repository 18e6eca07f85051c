"""What mutual TLS costs: a hop between two processes, and a step of LeNet on five workers.

    python benchmarks/bench_tls.py [--rounds 5] [--step-rounds 3] [--json FILE]

Both sides move values by gRPC over loopback; one of them encrypts. Hops alternate within every
round. A step's sides are jobs of their own, which alternate: their figure is the median step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from bench_one_worker import digits, lenet
from common import Row, Samples, checked, compared, environment, equal_conditions, parser, write
from common_cluster import is_worker
from common_models import made
from torch.nn import functional as F

from graphsplit.security.issue import fill_folder
from graphsplit.security.names import WORKER
from graphsplit.security.options import SecurityOptions
from graphsplit.security.protection import UNPROTECTED, Protection, load_protection
from graphsplit.transport import ChannelSpec, Hub, Receiver, Sender, Transport, WaitPolicy

SIZES = {1 << 10: "1 KiB", 64 << 10: "64 KiB", 16 << 20: "16 MiB"}
SIDES = ("TLS", "plain")
PLACEMENT = {"fc1": 0, "fc2": 1, "fc3": 2, "conv1": 3, "conv2": 4}
Found = dict[tuple[str, int], list[float]]


class End:
    """One worker's end of a channel in each direction and of each size."""

    def __init__(self, rank: int, link: Connection, protection: Protection) -> None:
        hub = Hub(bind_host="127.0.0.1", mode="grpc", protection=protection, num_workers=2)
        link.send(hub.endpoints)
        other = link.recv()
        peers = [hub.endpoints, other] if rank == 0 else [other, hub.endpoints]
        policy = WaitPolicy()
        self.transport: Transport = hub.connect(
            rank=rank, job="hop", generation=1, peers=peers, policy=policy
        )
        self.senders: dict[int, Sender] = {}
        self.receivers: dict[int, Receiver] = {}
        for edge, size in enumerate(SIZES):
            for way in (0, 1):
                spec = ChannelSpec(
                    *(0, 2 * edge + way, way, 1 - way, torch.float32, (size // 4,), size)
                )
                if way == rank:
                    self.senders[size] = self.transport.open_sender(spec)
                else:
                    self.receivers[size] = self.transport.open_receiver(spec)

    def hop(self, rank: int, value: torch.Tensor, step: int) -> float:
        """Seconds of half a round trip."""
        send, receive = self.senders[value.nbytes], self.receivers[value.nbytes]
        start = time.perf_counter()
        if rank == 0:
            send.send(value, step=step, microbatch=0)
            receive.receive(step=step, microbatch=0)
        else:
            received = receive.receive(step=step, microbatch=0)
            send.send(received, step=step, microbatch=0)
        return (time.perf_counter() - start) / 2


def play(rank: int, link: Connection, folder: str, rounds: int) -> Found:
    """One of the two processes; a round's figure is its median."""
    equal_conditions()
    files = (f"{folder}/{name}" for name in ("ca.pem", f"worker-{rank}.pem", f"worker-{rank}.key"))
    tls = load_protection(SecurityOptions(*files), role=WORKER, rank=rank)
    ends = {"TLS": End(rank, link, tls), "plain": End(rank, link, UNPROTECTED)}
    found: Found = {(side, size): [] for side in SIDES for size in SIZES}
    step = 0
    for number in range(rounds + 1):
        for size in SIZES:
            value, count = torch.zeros(size // 4), 8 if size > 1 << 20 else 200
            for side in SIDES:
                times = [ends[side].hop(rank, value, step + one) for one in range(count)]
                if number:  # the first round warms up
                    found[side, size].append(statistics.median(times))
            step += count
    for end in ends.values():
        end.transport.close()
    return found


def _child(link: Connection, folder: str, rounds: int) -> None:
    play(1, link, folder, rounds)


def hops(folder: str, rounds: int) -> list[Row]:
    """A row for each size."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    child = context.Process(target=_child, args=(theirs, folder, rounds), daemon=True)
    child.start()
    found = play(0, mine, folder, rounds)
    child.join(30)
    return [
        compared(
            f"a value of {name} over gRPC, one way",
            ("TLS", Samples(found["TLS", size])),
            ("plain", Samples(found["plain", size])),
            reach=None,
        )
        for size, name in SIZES.items()
    ]


def train(steps: int) -> None:
    """One worker of a job: worker 0 writes its median step."""
    equal_conditions()
    import graphsplit as gs

    gs.init()
    net, optimizer = made(lenet)
    for name, rank in PLACEMENT.items():
        getattr(net, name).place("MS_WORKER", rank)
    model = gs.Model(net, F.cross_entropy, optimizer)
    times = []
    for inputs, target in digits(steps):
        start = time.perf_counter()
        model.train_step(inputs, target)
        times.append(time.perf_counter() - start)
    if gs.get_rank() == 0:
        Path(os.environ["GS_BENCH_REPORT"]).write_text(repr(statistics.median(times[20:])))


def one_job(folder: str, side: str, steps: int) -> float:
    """The median step of a job."""
    out = Path(folder, "step")
    command = [sys.executable, "-m", "graphsplit.cli", "run", "-n", "5"]
    command += ["--certs", folder] if side == "TLS" else []
    variables = {"OMP_NUM_THREADS": "1", "GS_TRANSPORT": "grpc", "GS_BENCH_REPORT": str(out)}
    script = [os.path.abspath(__file__), "--steps", str(steps)]
    checked([*command, "--", *script], env={**os.environ, **variables})
    return float(out.read_text())


def step_row(folder: str, arguments: argparse.Namespace) -> Row:
    """Jobs with and without TLS, in turn."""
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(arguments.step_rounds):
        for side in SIDES:
            found[side].append(one_job(folder, side, arguments.steps))
    return compared(
        "a step of LeNet on 5 workers over gRPC, batch 32",
        ("TLS", Samples(found["TLS"])),
        ("plain", Samples(found["plain"])),
        reach=None,
    )


def main() -> None:
    """Read the command line."""
    made_parser = parser(__doc__)
    made_parser.add_argument("--steps", type=int, default=150)
    made_parser.add_argument("--step-rounds", type=int, default=3)
    arguments = made_parser.parse_args()
    if is_worker():
        train(arguments.steps)
        return
    conditions = environment()
    with tempfile.TemporaryDirectory() as folder:
        fill_folder(Path(folder), num_workers=5, hosts=[], days=1)
        rows = hops(folder, arguments.rounds)
        if arguments.step_rounds:
            rows.append(step_row(folder, arguments))
    write(arguments, rows, conditions)


if __name__ == "__main__":
    main()
