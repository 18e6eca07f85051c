"""One hop of 16 KiB among five busy workers on two cores: shared memory, Gloo, and bare copies.

    python benchmarks/bench_ring.py [--rounds 5] [--workers 5] [--compute-us 300] [--json FILE]

A value goes around a ring. Every worker computes on it for a while before it sends it on, as the
layers of a network that are spread over workers do; so there is always one that computes, and the
next one's core has other things to do. A hop is the time from the call of send on one worker to
the return of receive on the next, on one clock. As the runtime does, a worker announces the value
when it begins to compute; Gloo has no such thing. Bare copies are what is left without headers,
checks and sleep: what this machine takes in any case.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from by_hand import BareChannel, is_possible, shared_file
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

from graphsplit.transport import ChannelSpec, Hub, WaitPolicy

SHAPE = (64, 64)  # 16 KiB
VALUE_BYTES = 16 << 10
REACH_S = 12e-6
STEPS = 200
BARE = "bare copies"
SIDES = ("shm", "gloo", BARE) if is_possible() else ("shm", "gloo")
# How to announce, send and receive, then how to leave.
Ends = tuple[
    Callable[[], None],
    Callable[[torch.Tensor, int], None],
    Callable[[int], torch.Tensor],
    Callable[[], None],
]


def our_ends(rank: int, size: int, link: Connection) -> Ends:
    """Through shared memory."""
    hub = Hub(bind_host="127.0.0.1", mode="shm")
    link.send(hub.endpoints)
    peers = link.recv()
    transport = hub.connect(rank=rank, job="ring", generation=1, peers=peers, policy=WaitPolicy())
    specs = [
        ChannelSpec(0, edge, edge, (edge + 1) % size, torch.float32, SHAPE, VALUE_BYTES)
        for edge in range(size)
    ]
    sender = transport.open_sender(specs[rank])
    receiver = transport.open_receiver(specs[rank - 1])

    def receive(step: int) -> torch.Tensor:
        received = receiver.receive(step=step, microbatch=0)
        assert received is not None
        return received

    def send(value: torch.Tensor, step: int) -> None:
        sender.send(value, step=step, microbatch=0)

    return sender.announce, send, receive, transport.close


def gloo_ends(rank: int, size: int, port: int) -> Ends:
    """The same through ``torch.distributed``, into fresh memory as ours."""
    import torch.distributed as dist

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)

    def receive(step: int) -> torch.Tensor:
        received = torch.empty(SHAPE)
        dist.recv(received, (rank - 1) % size)
        return received

    def send(value: torch.Tensor, step: int) -> None:
        dist.send(value, (rank + 1) % size)

    return lambda: None, send, receive, dist.destroy_process_group


def bare_ends(rank: int, size: int, path: str) -> Ends:
    """The same by bare copies, into memory that is fresh, and taken before the value comes."""
    out, into = (BareChannel(path, edge, SHAPE, VALUE_BYTES) for edge in (rank, (rank - 1) % size))
    return (
        into.prepare,
        lambda value, step: out.send(value),
        lambda step: into.receive(),
        lambda: None,
    )


def compute_for(value: torch.Tensor, weight: torch.Tensor, repeats: int) -> torch.Tensor:
    """Something to do, which takes always the same."""
    for _ in range(repeats):
        value = value @ weight
    return value


def repeats_for(seconds: float, weight: torch.Tensor) -> int:
    """How many products take that long here."""
    value, best = torch.randn(SHAPE), 1.0
    for _ in range(20):
        start = time.perf_counter()
        compute_for(value, weight, 20)
        best = min(best, time.perf_counter() - start)
    return max(1, round(20 * seconds / best))


def go_round(
    ends: Ends, rank: int, first: int, weight: torch.Tensor, repeats: int
) -> tuple[list[float], list[float]]:
    """When each value was sent, and received, by this worker."""
    announce, send, receive, _ = ends
    sent, received = [], []
    value = torch.randn(SHAPE)
    for step in range(first, first + STEPS):
        if rank > 0 or step > first:
            value = receive(step if rank else step - 1)
            received.append(time.perf_counter())
        announce()
        made = compute_for(value, weight, repeats)
        sent.append(time.perf_counter())
        send(made, step)
    if rank == 0:
        receive(first + STEPS - 1)
        received.append(time.perf_counter())
    return sent, received


def child(
    rank: int, size: int, link: Connection, port: int, path: str, rounds: int, seconds: float
) -> None:
    """One worker."""
    equal_conditions()
    sides = {
        "shm": our_ends(rank, size, link),
        "gloo": gloo_ends(rank, size, port),
    }
    if BARE in SIDES:
        sides[BARE] = bare_ends(rank, size, path)
    weight = torch.linalg.qr(torch.randn(SHAPE))[0]
    repeats = repeats_for(seconds, weight)
    for number in range(rounds + 1):
        for name, ends in sides.items():
            link.recv()  # a barrier
            before = minor_faults()
            sent, received = go_round(ends, rank, number * STEPS, weight, repeats)
            link.send((name, sent, received, (minor_faults() - before) / STEPS))
    link.recv()
    for _, _, _, close in sides.values():
        close()


def hops(found: list[Any]) -> list[float]:
    """Seconds of each hop: sent by one worker, received by the next."""
    times = []
    for rank, (_, sent, _, _) in enumerate(found):
        received = found[(rank + 1) % len(found)][2]
        times += [b - a for a, b in zip(sent, received, strict=True)]
    return times


def rows(workers: int, rounds: int, seconds: float) -> list[Row]:
    """Start the ring, measure, and compare."""
    with shared_file(workers, VALUE_BYTES) as path:
        samples, everything = measured(workers, rounds, seconds, path)
    deciles = {name: statistics.quantiles(times, n=10) for name, times in everything.items()}
    notes = "; ".join(
        f"{name} p10 {ten[0] * 1e6:.1f}, p90 {ten[-1] * 1e6:.1f} µs"
        for name, ten in deciles.items()
    )
    work = f"a hop of 16 KiB among {workers} busy workers"
    ours = samples["shm"]
    return [
        *(
            compared(work, ("shm", ours), (name, samples[name]), reach=None, notes=notes)
            for name in SIDES[1:]
        ),
        compared(
            work,
            ("shm", ours),
            ("12 µs", Samples([REACH_S] * rounds)),
            reach=1.0,
            notes=f"every worker computes {seconds * 1e6:.0f} µs before it sends",
        ),
    ]


def measured(
    workers: int, rounds: int, seconds: float, path: str
) -> tuple[dict[str, Samples], dict[str, list[float]]]:
    """The hops of each side: their median in every round, and all of them."""
    context = multiprocessing.get_context("spawn")
    port, pipes = free_port(), [context.Pipe() for _ in range(workers)]
    processes = [
        context.Process(
            target=child,
            args=(rank, workers, theirs, port, path, rounds, seconds),
            daemon=True,
        )
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    links = [mine for mine, _ in pipes]
    endpoints = [link.recv() for link in links]
    for link in links:
        link.send(endpoints)
    samples = {name: Samples() for name in SIDES}
    everything: dict[str, list[float]] = {name: [] for name in SIDES}
    tell_measuring(True)
    for number in range(rounds + 1):
        for name in samples:
            for link in links:
                link.send("go")
            times = hops(found := [link.recv() for link in links])
            if number:
                samples[name].seconds.append(statistics.median(times))
                samples[name].faults.append(max(faults for _, _, _, faults in found))
                everything[name] += times
    tell_measuring(False)
    for link in links:
        link.send("end")
    for process in processes:
        process.join(30)
    return samples, everything


def main() -> None:
    """Read the command line."""
    made = parser(__doc__)
    made.add_argument("--workers", type=int, default=5)
    made.add_argument("--compute-us", type=float, default=300.0)
    arguments = made.parse_args()
    conditions = environment()
    found = rows(arguments.workers, arguments.rounds, arguments.compute_us * 1e-6)
    write(arguments, found, conditions)


if __name__ == "__main__":
    main()
