"""A step of data parallelism on two workers, against DistributedDataParallel on Gloo.

    python benchmarks/bench_replicas.py [--rounds 9] [--steps 4] [--launches 3] [--parts 8 2]
        [--network gpt resnet] [--order pairs left] [--cable 1000] [--json FILE]

The same two processes hold both networks, made from one seed, and train them on the same batches in
turn. A batch has 16 rows in 8 parts, or in 2. ``net.place([0, 1])`` gives each worker half of the
parts; DistributedDataParallel gets the same parts, all but the last of each process inside
``no_sync``. Both have SGD with momentum.

With ``--cable`` the workers are on two hosts, as in ``bench_hosts.py`` (as root). A second row then
tells how much of the exchange is not hidden: how much longer workers wait than on a cable that is
not shaped, and the seconds that a worker's bytes take on it, less the backward of its last part.

Ours is compared with the plain loop over all parts, after the first epoch, byte by byte.
DistributedDataParallel adds in another order, so its bits are its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product

import torch
import torch.distributed as dist
from bench_hosts import FAST, on_cable
from common import Row, parser
from common_cluster import (
    Report,
    agreed,
    breakdown,
    free_port,
    latest_plan,
    launch,
    report,
    row_of,
    run,
    same_parameters,
    take_turns,
)
from common_models import CASES, Batch, Case, made
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import graphsplit as gs
from graphsplit.program.instruction import Opcode

OURS, DDP = "graphsplit", "DistributedDataParallel"
NUM_WORKERS = 2


def _parts(batch: Batch, number: int) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(whole.chunk(number) for whole in batch), strict=True))


class Peer:
    """One process of DistributedDataParallel."""

    def __init__(self, case: Case, rank: int, parts: int) -> None:
        net, self._optimizer = made(case.build)
        self._net, self._parts = DistributedDataParallel(net), parts
        half = parts // NUM_WORKERS
        self._mine = slice(rank * half, (rank + 1) * half)

    def train(self, batches: Sequence[Batch]) -> None:
        """A step for every batch."""
        for batch in batches:
            self._optimizer.zero_grad()
            mine = _parts(batch, self._parts)[self._mine]
            for index, (inputs, target) in enumerate(mine):
                is_last = index == len(mine) - 1
                with nullcontext() if is_last else self._net.no_sync():
                    (F.cross_entropy(self._net(inputs), target) / len(mine)).backward()
            self._optimizer.step()


def _loop(case: Case, batches: Sequence[Batch], parts: int, order: str) -> nn.Module:
    """The plain loop over all parts."""
    net, optimizer = made(case.build)
    for batch in batches:
        found: list[list[torch.Tensor]] = []  # gradients of each part, or sums of them
        for inputs, target in _parts(batch, parts):
            optimizer.zero_grad()
            (F.cross_entropy(net(inputs), target) * (1 / parts)).backward()
            found.append([p.grad for p in net.parameters() if p.grad is not None])
        while len(found) > 1:
            pairs = [found[:2]] if order == "left" else zip(found[::2], found[1::2], strict=True)
            rest = found[2:] if order == "left" else []
            found = [[a + b for a, b in zip(*two, strict=True)] for two in pairs] + rest
        for parameter, gradient in zip(net.parameters(), found[0], strict=True):
            parameter.grad = gradient
        optimizer.step()
    return net


def work(arguments: argparse.Namespace) -> None:
    """One worker's part."""
    rank = gs.get_rank()
    address = f"tcp://{arguments.address}:{arguments.port}"
    if arguments.cable:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=NUM_WORKERS)
    (name,), (parts,), (order,) = arguments.network, arguments.parts, arguments.order
    case = CASES[f"{name}-replicas"]
    batches = case.batches(arguments.steps)
    model = case.model(microbatches=parts, gradient_order=order)
    model.train(1, batches)
    loop = dict(_loop(case, batches, parts, order).named_parameters())
    same = same_parameters(model.network, loop)
    peer = Peer(case, rank, parts)
    sides = {OURS: lambda: model.train(1, batches), DDP: lambda: peer.train(batches)}
    turns = take_turns(sides, rounds=arguments.rounds, steps=arguments.steps)
    dist.destroy_process_group()
    found = {"turns": turns, "bits": agreed([same]), "breakdown": breakdown(model, batches)}
    report(found | {"bytes": _sent_per_step(model, rank)})


def _sent_per_step(model: gs.Model, rank: int) -> int:
    """The bytes that a worker sends in a step, by its program."""
    planned = latest_plan(model)
    edges, program = planned.plan.edges, planned.programs[rank]
    sent = (i.operand for i in program.instructions if i.opcode is Opcode.SEND)
    return sum(edges[number].meta.size_bytes for number in sent)


def _waits(reports: Sequence[Report]) -> float:
    """The milliseconds of a step that the worker which waits most waits, and sends."""
    return max(float(one["breakdown"]["RECEIVE"]) + one["breakdown"]["SEND"] for one in reports)


def _exchange(
    launches: Sequence[Sequence[Report]], free: Sequence[Report], rate: str, parts: int, work: str
) -> Row:
    """How much longer workers wait for each other on a cable, in milliseconds a step.

    Args:
        launches: Of each launch on the cable, the workers' reports.
        free: Those on a cable that is not shaped.
        rate: Of the cable, in Mbit/s.
        parts: The number of parts.
        work: What was done.
    """
    waits = [_waits(reports) - _waits(free) for reports in launches]
    last = min(one["breakdown"]["BACKWARD"] for one in free) * NUM_WORKERS / parts
    sending = max(one["bytes"] for one in free) * 8e3 / (float(rate) * 1e6)
    return Row(
        work=f"{work}: exchange that is not hidden",
        against="bytes / bandwidth - backward of the last part",
        figure="ms of a step that workers wait more than on a cable that is not shaped",
        ratio=statistics.median(waits),
        spread=(min(waits), max(waits)),
        reach=max(0.0, sending - last) + 0.1 * sending,
        at_most=True,
        sides={},
        notes=f"bytes take {sending:.1f} ms, the backward of the last part {last:.1f} ms",
    )


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """One row for each network, number of parts and order of sums."""
    for name, parts, order in product(arguments.network, arguments.parts, arguments.order):
        changed = {"network": [name], "parts": [parts], "order": [order]}
        changed["port"] = free_port()
        launches = [
            on_cable(__file__, arguments.cable, arguments, **changed)
            if arguments.cable
            else launch(__file__, NUM_WORKERS, arguments, **changed)
            for _ in range(arguments.launches)
        ]
        what = f"{CASES[f'{name}-replicas'].title}, on 2 replicas, {parts} parts, {order}"
        what += f", a cable of {arguments.cable} Mbit/s" if arguments.cable else ""
        reach = 1.0 if order == "pairs" else None
        yield row_of(what, launches, OURS, DDP, reach=reach)
        if arguments.cable and order == "pairs":
            free = on_cable(__file__, FAST, arguments, **changed | {"port": free_port()})
            yield _exchange(launches, free, arguments.cable, parts, what)


def main() -> None:
    """Read the command line."""
    options = parser(__doc__, rounds=9, steps=4)
    options.add_argument("--launches", type=int, default=3)
    options.add_argument(
        "--network", nargs="+", choices=("gpt", "resnet"), default=["gpt", "resnet"]
    )
    options.add_argument("--parts", type=int, nargs="+", default=[8, 2])
    options.add_argument("--order", nargs="+", choices=("pairs", "left"), default=["pairs", "left"])
    options.add_argument("--cable", help="Mbit/s between two hosts: see bench_hosts.py")
    options.add_argument("--address", default="127.0.0.1", help=argparse.SUPPRESS)
    options.add_argument("--port", type=int, help=argparse.SUPPRESS)
    run(options, work, rows)


if __name__ == "__main__":
    main()
