"""One-way time of a value over gRPC and over Gloo, beside a plain gRPC stream and plain Gloo.

    python benchmarks/bench_transports.py [--rounds 5] [--json FILE]

Two processes play ping-pong, as in ``bench_hop.py``; all five sides alternate six times in every
round, as the machine changes its pace. The plain sides move the same bytes between the same two
threads, without headers, checks or credit. Plain streams that are pulled are what ours stand on.
"""

from __future__ import annotations

import multiprocessing
import statistics
from multiprocessing.connection import Connection
from typing import Any

import torch
from bench_hop import ping_pong
from common import (
    Row,
    Samples,
    compared,
    environment,
    equal_conditions,
    minor_faults,
    parser,
    write,
)
from common_cluster import free_port
from hop_peers import Ends, gloo_ends, plain_grpc_ends, pulled_grpc_ends

from graphsplit.transport import ChannelSpec, Hub, Mode, WaitPolicy

NAMES = {1 << 10: "1 KiB", 64 << 10: "64 KiB", 16 << 20: "16 MiB"}
GRPC_REACH = 1.15  # of a plain stream's time
PAIRS = {"grpc": "plain grpcio", "pulled grpcio": "plain grpcio", "gloo": "plain gloo"}
TURNS = 3
SIDES = ("grpc", "plain grpcio", "pulled grpcio", "gloo", "plain gloo")


def transport_ends(mode: Mode, rank: int, link: Connection) -> Ends:
    """Send, receive and close, through one of our transports."""
    hub = Hub(bind_host="127.0.0.1", mode=mode)
    link.send(hub.endpoints)
    other = link.recv()
    peers = [hub.endpoints, other] if rank == 0 else [other, hub.endpoints]
    transport = hub.connect(rank=rank, job="hop", generation=1, peers=peers, policy=WaitPolicy())
    sends, receives = {}, {}
    for edge, size in enumerate(NAMES):
        specs = [
            ChannelSpec(0, 2 * edge + way, way, 1 - way, torch.float32, (size // 4,), size)
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


def play(rank: int, link: Connection, port: int, rounds: int) -> dict[tuple[str, int], Samples]:
    """One of the two processes: times and page faults of every round, by side and size."""
    equal_conditions()
    ends = {
        "grpc": transport_ends("grpc", rank, link),
        "plain grpcio": plain_grpc_ends(rank, link),
        "pulled grpcio": pulled_grpc_ends(rank, link),
        "gloo": transport_ends("gloo", rank, link),
        "plain gloo": gloo_ends(rank, port),
    }
    found = {(side, size): Samples() for side in SIDES for size in NAMES}
    first = dict.fromkeys(found, 0)
    for number in range(rounds + 1):
        for size in NAMES:
            value, count = torch.zeros(size // 4), 3 if size > 1 << 20 else 100
            times: dict[str, list[float]] = {side: [] for side in SIDES}
            faults = dict.fromkeys(SIDES, 0)
            # Back and forth: no side always comes after the same one.
            for side in (SIDES + SIDES[::-1]) * TURNS:
                key, before = (side, size), minor_faults()
                times[side] += ping_pong(ends[side], rank, value, first[key], count)
                first[key] += count
                faults[side] += minor_faults() - before
            for side in SIDES if number else ():  # the first round warms up
                found[side, size].seconds.append(statistics.median(times[side]))
                found[side, size].faults.append(faults[side] / count / TURNS / 2)
    for _, _, close in ends.values():
        close()
    return found


def _child(link: Connection, port: int, rounds: int) -> None:
    play(1, link, port, rounds)


def row(ours: str, size: int, found: dict[tuple[str, int], Samples]) -> Row:
    """One size over one transport."""
    theirs = PAIRS[ours]
    sides: dict[str, Any] = {side: found[side, size] for side in (ours, theirs)}
    return compared(
        f"a value of {NAMES[size]} between two workers, one way, {ours}",
        (ours, sides[ours]),
        (theirs, sides[theirs]),
        reach=GRPC_REACH if ours == "grpc" else None,
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
    child.join(30)
    write(arguments, [row(ours, size, found) for ours in PAIRS for size in NAMES], conditions)


if __name__ == "__main__":
    main()
