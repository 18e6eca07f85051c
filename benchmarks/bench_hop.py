"""One-way time of a value between workers on one host, over every transport and its plain peer.

    python benchmarks/bench_hop.py [--rounds 5] [--only shm grpc gloo TLS ring] [--cores 0 1]

Two processes play ping-pong: worker 0 sends, worker 1 receives and sends back; half of a round
trip is one hop, with its Python. All sides alternate six times in every round, back and forth, as
the machine changes its pace. The plain sides move the same bytes between the same threads without
headers, checks or credit: Gloo, and a stream of grpcio. Gloo by hand has all three. Plain streams
that are pulled are what ours over gRPC stand on. A round's figure is its median; p10 stands in the
notes, because on busy cores Gloo's times fall in two heaps, and its median may be in either. Page
faults are those of one round trip in one process, which is one send and one receive.

``ring``: one hop of 16 KiB among five busy workers. A value goes around. Every worker computes on
it for a while before it sends it on, as the layers of a network that are spread over workers do; so
there is always one that computes, and the next one's core has other things to do. A hop is the time
from the call of send on one worker to the return of receive on the next, on one clock. As the
runtime does, a worker announces the value when it begins to compute; Gloo has no such thing. Bare
copies are what is left without headers, checks and sleep: what this machine takes in any case.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from by_hand import is_possible, shared_file
from common import (
    Row,
    Samples,
    compared,
    environment,
    equal_conditions,
    minor_faults,
    parser,
    tell_measuring,
    timed,
    write,
)
from hop_ends import (
    Ends,
    bare_ends,
    gloo_ends,
    hand_gloo_ends,
    our_ends,
    plain_grpc_ends,
    pulled_grpc_ends,
)

from graphsplit.security.issue import fill_folder
from graphsplit.security.names import WORKER
from graphsplit.security.options import SecurityOptions
from graphsplit.security.protection import Protection, load_protection

NAMES = {1 << 10: "1 KiB", 64 << 10: "64 KiB", 16 << 20: "16 MiB"}
SIZES = tuple(NAMES)
TURNS = 3
PLAIN_GLOO, PLAIN_GRPC, PULLED, BARE = "plain gloo", "plain grpcio", "pulled grpcio", "bare copies"
HAND_GLOO = "gloo by hand"
CORES = "GS_BENCH_CORES"  # of the processes that are measured


@dataclass(frozen=True)
class Pair:
    """Two sides, and how much of the other's time ours may take, by size."""

    ours: str
    theirs: str
    reach: dict[int, float] = field(default_factory=dict)


PAIRS = {
    "shm": [Pair("shm", PLAIN_GLOO, {64 << 10: 0.3, 16 << 20: 0.5})],
    "grpc": [Pair("grpc", PLAIN_GRPC, dict.fromkeys(SIZES, 1.15)), Pair(PULLED, PLAIN_GRPC)],
    "gloo": [
        Pair("gloo", HAND_GLOO, dict.fromkeys(SIZES, 1.15)),
        Pair("gloo", PLAIN_GLOO, {16 << 20: 1.2}),
        Pair(HAND_GLOO, PLAIN_GLOO),
    ],
    "TLS": [Pair("TLS", "grpc")],
}
RING = "ring"
RING_SHAPE, RING_BYTES = (64, 64), 16 << 10
RING_REACH_S, RING_STEPS = 12e-6, 200
RING_SIDES = ("shm", PLAIN_GLOO, BARE) if is_possible() else ("shm", PLAIN_GLOO)
Worker = Callable[..., Any]


def run_workers(worker: Worker, num_workers: int, *given: Any) -> list[Any]:
    """Run a function in some processes; what each of them returned.

    The function is called with its rank, a link, and what is given. Whatever it sends, all get as a
    list by rank, as soon as everybody has sent something.
    """
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(num_workers)]
    processes = [
        context.Process(target=_call, args=(worker, rank, theirs, *given), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    links = [mine for mine, _ in pipes]
    while True:
        said = [link.recv() for link in links]
        if all(isinstance(one, _Done) for one in said):
            break
        for link in links:
            link.send(said)
    for process in processes:
        process.join(30)
    return [one.found for one in said]


@dataclass
class _Done:
    found: Any


def _call(worker: Worker, rank: int, link: Connection, *given: Any) -> None:
    equal_conditions()
    if cores := os.environ.get(CORES):
        chosen = cores.split(",")
        os.sched_setaffinity(0, {int(chosen[rank % len(chosen)])})
    link.send(_Done(worker(rank, link, *given)))


def certified(folder: str, rank: int) -> Protection:
    """The worker's certificate in a folder that ``fill_folder`` has filled."""
    files = (f"{folder}/{name}" for name in ("ca.pem", f"worker-{rank}.pem", f"worker-{rank}.key"))
    return load_protection(SecurityOptions(*files), role=WORKER, rank=rank)


def pair_ends(side: str, rank: int, link: Connection, folder: str) -> Ends:
    """This worker's ends of one side."""
    if side == PLAIN_GLOO:
        return gloo_ends(rank, link)
    if side == HAND_GLOO:
        return hand_gloo_ends(rank, link)
    if side in (PLAIN_GRPC, PULLED):
        return (plain_grpc_ends if side == PLAIN_GRPC else pulled_grpc_ends)(rank, link)
    if side == "TLS":
        return our_ends("grpc", rank, link, SIZES, protection=certified(folder, rank))
    return our_ends(side, rank, link, SIZES)  # type: ignore[arg-type]  # one of our modes


def ping_pong(ends: Ends, rank: int, value: torch.Tensor, first: int, count: int) -> list[float]:
    """Seconds of each hop, as this worker sees them."""
    times = []
    for step in range(first, first + count):
        start = time.perf_counter()
        if rank == 0:
            ends.send(value, step)
            ends.receive(value, step)
        else:
            ends.send(ends.receive(value, step), step)
        times.append((time.perf_counter() - start) / 2)
    return times


def play_pairs(
    rank: int, link: Connection, sides: Sequence[str], rounds: int, folder: str
) -> dict[tuple[str, int], list[tuple[list[float], float]]]:
    """One of two processes: times and page faults of every round, by side and size."""
    ends = {side: pair_ends(side, rank, link, folder) for side in sides}
    found: dict[tuple[str, int], Any] = {(side, size): [] for side in sides for size in SIZES}
    first = dict.fromkeys(found, 0)
    if rank == 0:
        tell_measuring(True)
    for number in range(rounds + 1):
        for size in SIZES:
            value, count = torch.zeros(size // 4), 8 if size > 1 << 20 else 100
            times: dict[str, list[float]] = {side: [] for side in sides}
            faults = dict.fromkeys(sides, 0)
            # Back and forth: no side always comes after the same one.
            for side in [*sides, *reversed(sides)] * TURNS:
                key, before = (side, size), minor_faults()
                times[side] += ping_pong(ends[side], rank, value, first[key], count)
                first[key] += count
                faults[side] += minor_faults() - before
            for side in sides if number else ():  # the first round warms up
                found[side, size].append((times[side], faults[side] / len(times[side])))
    for one in ends.values():
        one.close()
    return found


def in_words(times: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Where most of each side's times lie, of all rounds."""
    tens = {side: statistics.quantiles(chain(*found), n=10) for side, found in times.items()}
    return "; ".join(
        f"{side} p10 {ten[0] * 1e6:.1f}, p90 {ten[-1] * 1e6:.1f} µs" for side, ten in tens.items()
    )


def pair_rows(names: Sequence[str], rounds: int) -> Iterator[Row]:
    """A row for each pair and size."""
    pairs = [pair for name in names for pair in PAIRS[name]]
    sides = list(dict.fromkeys(side for pair in pairs for side in (pair.ours, pair.theirs)))
    with tempfile.TemporaryDirectory() as folder:
        fill_folder(Path(folder), num_workers=2, hosts=[], days=1)
        found, _ = run_workers(play_pairs, 2, sides, rounds, folder)
    tell_measuring(False)
    for pair in pairs:
        for size in SIZES:
            samples = {
                side: Samples(
                    [statistics.median(times) for times, _ in found[side, size]],
                    [faults for _, faults in found[side, size]],
                )
                for side in (pair.ours, pair.theirs)
            }
            times = {side: [one for one, _ in found[side, size]] for side in samples}
            yield compared(
                f"a value of {NAMES[size]} between two workers, one way, {pair.ours}",
                *samples.items(),
                reach=pair.reach.get(size),
                notes=in_words(times),
            )


def compute_for(value: torch.Tensor, weight: torch.Tensor, repeats: int) -> torch.Tensor:
    """Something to do, which takes always the same."""
    for _ in range(repeats):
        value = value @ weight
    return value


def repeats_for(seconds: float, weight: torch.Tensor) -> int:
    """The number of products that take that long here."""
    value = torch.randn(RING_SHAPE)
    best, _ = min(timed(lambda: compute_for(value, weight, 20)) for _ in range(20))
    return max(1, round(20 * seconds / best))


def go_round(
    ends: Ends, rank: int, first: int, weight: torch.Tensor, repeats: int
) -> tuple[list[float], list[float]]:
    """The moments when this worker sent each value, and received each."""
    sent, received = [], []
    value = torch.randn(RING_SHAPE)
    for step in range(first, first + RING_STEPS):
        if rank > 0 or step > first:
            value = ends.receive(value, step if rank else step - 1).view(RING_SHAPE)
            received.append(time.perf_counter())
        ends.announce()
        made = compute_for(value, weight, repeats).view(-1)
        sent.append(time.perf_counter())
        ends.send(made, step)
    if rank == 0:
        ends.receive(value, first + RING_STEPS - 1)
        received.append(time.perf_counter())
    return sent, received


def play_ring(
    rank: int, link: Connection, workers: int, path: str, rounds: int, seconds: float
) -> dict[str, list[Any]]:
    """One worker of the ring: its moments, and its page faults, by side and round."""
    ends = {
        "shm": our_ends("shm", rank, link, [RING_BYTES], num_workers=workers),
        PLAIN_GLOO: gloo_ends(rank, link, num_workers=workers),
    }
    if BARE in RING_SIDES:
        ends[BARE] = bare_ends(rank, workers, path, RING_BYTES)
    weight = torch.linalg.qr(torch.randn(RING_SHAPE))[0]
    repeats = repeats_for(seconds, weight)
    found: dict[str, list[Any]] = {side: [] for side in ends}
    if rank == 0:
        tell_measuring(True)
    for number in range(rounds + 1):
        for side, one in ends.items():
            link.send("ready")
            link.recv()
            before = minor_faults()
            moments = go_round(one, rank, number * RING_STEPS, weight, repeats)
            found[side].append((*moments, (minor_faults() - before) / RING_STEPS))
    for one in ends.values():
        one.close()
    return found


def hops(of_workers: Sequence[Any]) -> list[float]:
    """Seconds of each hop of a round: sent by one worker, received by the next."""
    following = [*of_workers[1:], of_workers[0]]
    return [
        taken - given
        for (sent, _, _), (_, received, _) in zip(of_workers, following, strict=True)
        for given, taken in zip(sent, received, strict=True)
    ]


def ring_rows(workers: int, rounds: int, seconds: float) -> Iterator[Row]:
    """The hop of the ring, against the others' and against its bound."""
    with shared_file(workers, RING_BYTES) as path:
        found = run_workers(play_ring, workers, workers, path, rounds, seconds)
    tell_measuring(False)
    samples, times = {}, {}
    for side in RING_SIDES:
        by_round = list(zip(*(worker[side] for worker in found), strict=True))[1:]
        times[side] = [hops(one) for one in by_round]
        faults = [max(faults for _, _, faults in one) for one in by_round]
        samples[side] = Samples([statistics.median(one) for one in times[side]], faults)
    work, ours = f"a hop of 16 KiB among {workers} busy workers", ("shm", samples["shm"])
    notes = in_words(times)
    for side in RING_SIDES[1:]:
        yield compared(work, ours, (side, samples[side]), reach=None, notes=notes)
    notes = f"every worker computes {seconds * 1e6:.0f} µs before it sends"
    yield compared(work, ours, ("12 µs", Samples([RING_REACH_S] * rounds)), reach=1.0, notes=notes)


def rows(arguments: Namespace) -> Iterator[Row]:
    """The rows of all pairs that are asked for, then those of the ring."""
    names = [name for name in arguments.only if name != RING]
    if names:
        yield from pair_rows(names, arguments.rounds)
    if RING in arguments.only:
        yield from ring_rows(arguments.workers, arguments.rounds, arguments.compute_us * 1e-6)


def main() -> None:
    """Read the command line."""
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=[*PAIRS, RING], default=[*PAIRS, RING])
    options.add_argument("--workers", type=int, default=5, help="of the ring")
    options.add_argument("--compute-us", type=float, default=300.0, help="in the ring")
    options.add_argument("--cores", nargs="+", default=[], help="one for each process, in turn")
    arguments = options.parse_args()
    os.environ[CORES] = ",".join(arguments.cores)
    conditions = environment()
    write(arguments, rows(arguments), conditions)


if __name__ == "__main__":
    main()
