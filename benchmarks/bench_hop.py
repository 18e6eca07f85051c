"""One-way time of a value between two workers on one host: shared memory, and Gloo beside it.

    python benchmarks/bench_hop.py [--rounds 5] [--json FILE]

Two processes play ping-pong: worker 0 sends, worker 1 receives and sends back; half of a round
trip is one hop, with its Python. The transports alternate within every round, so that a noisy
minute hits both. A round's figure is its median; p10 stands in the notes, because on busy cores
Gloo's times fall in two heaps, and its median may be in either. Page faults are those of one round
trip in one process, which is one send and one receive.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from common import (
    Row,
    Samples,
    compared,
    environment,
    equal_conditions,
    minor_faults,
    parser,
    tell_measuring,
    write,
)
from common_cluster import free_port
from hop_peers import Ends, gloo_ends

from graphsplit.transport import ChannelSpec, Hub, WaitPolicy

# Bytes of a value, and how much of Gloo's time a hop may take.
REACH = {1 << 10: None, 64 << 10: 0.3, 16 << 20: 0.5}
NAMES = {1 << 10: "1 KiB", 64 << 10: "64 KiB", 16 << 20: "16 MiB"}
SIDES = ("shm", "gloo")


def shm_ends(rank: int, link: Connection) -> Ends:
    """Send, receive and close, through channels as a plan's edges have them."""
    hub = Hub(bind_host="127.0.0.1", mode="shm")
    link.send(hub.endpoints)
    other = link.recv()
    peers = [hub.endpoints, other] if rank == 0 else [other, hub.endpoints]
    transport = hub.connect(rank=rank, job="hop", generation=1, peers=peers, policy=WaitPolicy())
    sends, receives = {}, {}
    for edge, size in enumerate(REACH):
        specs = [
            ChannelSpec(
                *(0, 2 * edge + way, way, 1 - way, torch.float32, (size // 4,), size), lends=True
            )
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


def ping_pong(ends: Ends, rank: int, value: torch.Tensor, first: int, count: int) -> list[float]:
    """Seconds of each hop, as this worker sees them."""
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


def play(rank: int, link: Connection, port: int, rounds: int) -> dict[tuple[str, int], Any]:
    """One of the two processes: times and page faults of every round, by side and size."""
    equal_conditions()
    ends = {"shm": shm_ends(rank, link), "gloo": gloo_ends(rank, port)}
    found: dict[tuple[str, int], Any] = {(side, size): [] for side in SIDES for size in REACH}
    first = dict.fromkeys(found, 0)
    if rank == 0:
        tell_measuring(True)
    for number in range(rounds + 1):
        for size in REACH:
            value, count = torch.zeros(size // 4), 16 if size > 1 << 20 else 300
            for side in SIDES:
                key, before = (side, size), minor_faults()
                times = ping_pong(ends[side], rank, value, first[key], count)
                first[key] += count
                if number:  # the first round warms up
                    found[key].append((times, (minor_faults() - before) / count))
    for _, _, close in ends.values():
        close()
    return found


def _child(link: Connection, port: int, rounds: int) -> None:
    play(1, link, port, rounds)


def row(size: int, found: dict[tuple[str, int], Any]) -> Row:
    """One size."""
    samples, deciles = {}, []
    for side in SIDES:
        rounds = found[side, size]
        medians = [statistics.median(times) for times, _ in rounds]
        samples[side] = Samples(medians, [faults for _, faults in rounds])
        everything = [seconds for times, _ in rounds for seconds in times]
        tens = statistics.quantiles(everything, n=10)
        deciles.append(f"{side} p10 {tens[0] * 1e6:.1f}, p90 {tens[-1] * 1e6:.1f} µs")
    bandwidth = [f"{side} {size / samples[side].median_s / 1e9:.2f} GB/s" for side in SIDES]
    return compared(
        f"a value of {NAMES[size]} between two workers, one way",
        ("shm", samples["shm"]),
        ("gloo", samples["gloo"]),
        reach=REACH[size],
        notes="; ".join(deciles + bandwidth),
    )


def main() -> None:
    """Run both processes."""
    arguments = parser(__doc__).parse_args()
    conditions = environment()
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    port = free_port()
    child = context.Process(target=_child, args=(theirs, port, arguments.rounds), daemon=True)
    child.start()
    found = play(0, mine, port, arguments.rounds)
    tell_measuring(False)
    child.join(30)
    write(arguments, [row(size, found) for size in REACH], conditions)


if __name__ == "__main__":
    main()
