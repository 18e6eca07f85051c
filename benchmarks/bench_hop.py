"""One-way time of a value between two processes: shared memory, gRPC, and Gloo beside them.

    python benchmarks/bench_hop.py [--rounds 5] > hop.json

Two processes play ping-pong: worker 0 sends, worker 1 receives and sends back; half of a round
trip is one hop, with its Python. The transports alternate within every round, so that a noisy
minute hits all of them. Figures are medians over all rounds. Beside them stand the first and the
last tenth (on busy cores Gloo's times fall in two heaps, and its median may be in either), and the
minor page faults of one process per round trip, which is one send and one receive.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import grpc
import torch
import torch.distributed as dist

import graphsplit
from graphsplit.transport import ChannelSpec, Hub, Mode, WaitPolicy

SIZES_BYTES = (1 << 10, 16 << 10, 64 << 10, 16 << 20)
OURS: tuple[Mode, ...] = ("shm", "grpc")
TRANSPORTS = (*OURS, "gloo")
Send = Callable[[torch.Tensor, int], None]
Receive = Callable[[torch.Tensor, int], torch.Tensor]
Ends = tuple[Send, Receive, Callable[[], None]]


def graphsplit_ends(mode: Mode, rank: int, link: Connection) -> Ends:
    """Send, receive and close, through one of our transports."""
    hub = Hub(bind_host="127.0.0.1", mode=mode)
    link.send(hub.endpoints)
    other = link.recv()
    peers = [hub.endpoints, other] if rank == 0 else [other, hub.endpoints]
    transport = hub.connect(rank=rank, job="hop", generation=1, peers=peers, policy=WaitPolicy())
    sends, receives = {}, {}
    for edge, size in enumerate(SIZES_BYTES):
        shape = (size // 4,)
        specs = [
            ChannelSpec(0, 2 * edge + way, way, 1 - way, torch.float32, shape, size)
            for way in (0, 1)
        ]
        sends[size] = transport.open_sender(specs[rank])
        receives[size] = transport.open_receiver(specs[1 - rank])

    def send(value: torch.Tensor, step: int) -> None:
        sends[value.nbytes].send(value, step=step, microbatch=0)

    def receive(value: torch.Tensor, step: int) -> torch.Tensor:
        received = receives[value.nbytes].receive(step=step, microbatch=0)
        assert received is not None
        return received

    return send, receive, transport.close


def gloo_ends(rank: int, port: int) -> Ends:
    """The same through ``torch.distributed``, into fresh memory as ours."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)

    def send(value: torch.Tensor, step: int) -> None:
        dist.send(value, 1 - rank)

    def receive(value: torch.Tensor, step: int) -> torch.Tensor:
        received = torch.empty_like(value)
        dist.recv(received, 1 - rank)
        return received

    return send, receive, dist.destroy_process_group


def ping_pong(ends: Ends, rank: int, value: torch.Tensor, first: int, count: int) -> list[float]:
    """Seconds of each hop, as worker 0 sees them."""
    send, receive, _ = ends
    times = []
    for step in range(first, first + count):
        start = time.perf_counter()
        if rank == 0:
            send(value, step)
            receive(value, step)
        else:
            send(receive(value, step), step)
        times.append((time.perf_counter() - start) / 2)
    return times


def run(rank: int, link: Connection, port: int, rounds: int) -> dict[str, Any]:
    """One of the two processes; worker 0 returns the figures."""
    torch.set_num_threads(1)
    ends: dict[str, Ends] = {mode: graphsplit_ends(mode, rank, link) for mode in OURS}
    ends["gloo"] = gloo_ends(rank, port)
    times: dict[tuple[str, int], list[float]] = {}
    faults: dict[tuple[str, int], int] = {}
    steps = dict.fromkeys(((name, size) for name in TRANSPORTS for size in SIZES_BYTES), 0)
    for round_number in range(rounds + 1):
        for size in SIZES_BYTES:
            value = torch.zeros(size // 4)
            count = 8 if size > 1 << 20 else 300
            for name in TRANSPORTS:
                key = name, size
                before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                seconds = ping_pong(ends[name], rank, value, steps[key], count)
                after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                steps[key] += count
                if round_number > 0:  # The first round warms up.
                    times.setdefault(key, []).extend(seconds)
                    faults[key] = faults.get(key, 0) + after - before
    for _, _, close in ends.values():
        close()
    return {"times": times, "faults": faults}


def _child(link: Connection, port: int, rounds: int) -> None:
    run(1, link, port, rounds)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor()


def report(figures: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The figures as they are printed."""
    results = [
        {
            "transport": name,
            "bytes": size,
            "p10_us": round(statistics.quantiles(times, n=10)[0] * 1e6, 1),
            "median_us": round(statistics.median(times) * 1e6, 1),
            "p90_us": round(statistics.quantiles(times, n=10)[-1] * 1e6, 1),
            "minor_faults_per_round_trip": round(figures["faults"][name, size] / len(times), 1),
            "round_trips": len(times),
        }
        for (name, size), times in figures["times"].items()
    ]
    return {
        "benchmark": "hop",
        "rounds": rounds,
        "hardware": {"processor": _processor(), "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "grpcio": grpc.__version__,
            "graphsplit": getattr(graphsplit, "__version__", "source"),
            "kernel": platform.release(),
        },
        "load_average": os.getloadavg(),
        "omp_num_threads": os.environ["OMP_NUM_THREADS"],
        "results": results,
    }


def main() -> None:
    """Run both processes and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds after the warm-up")
    rounds = parser.parse_args().rounds
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    port = _free_port()
    child = context.Process(target=_child, args=(theirs, port, rounds), daemon=True)
    child.start()
    figures = run(0, mine, port, rounds)
    child.join(30)
    json.dump(report(figures, rounds), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
