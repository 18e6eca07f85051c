"""One of two workers on a cable: how long a value takes one way, and both ways at once.

python cable_end.py RANK SIZE, in a namespace of ``Hosts``; worker 0 prints JSON.
python cable_end.py RANK SIZE KIND has worker 0 send one value, by that kind of transport, and end
its script at once.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from typing import Any

import torch
from matrix.network.namespaces import Hosts

from graphsplit.security.protection import Protection
from graphsplit.transport import wait
from graphsplit.transport.base import ChannelSpec
from graphsplit.transport.hub import Hub
from graphsplit.transport.wait import WaitPolicy

PORT, ROUNDS, TRIED_S = 9999, 5, 30.0


def meet(rank: int, said: dict[str, str]) -> dict[str, str]:
    """What the other one says."""
    if rank == 0:
        with socket.create_server((Hosts.address(0), PORT)) as server:
            link = server.accept()[0]
    else:
        until_s = time.monotonic() + TRIED_S
        while True:
            try:
                link = socket.create_connection((Hosts.address(0), PORT))
                break
            except ConnectionRefusedError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.05)  # a process that is not there yet tells nobody when it is
    with link, link.makefile("rw") as file:
        file.write(json.dumps(said) + "\n")
        file.flush()
        heard: dict[str, str] = json.loads(file.readline())
    return heard


def main(rank: int, size: int, kind: str = "") -> None:
    """Exchange values, and say how long they took."""
    hub = Hub(
        bind_host=Hosts.address(rank),
        mode=kind or "gloo",
        num_workers=2,
        protection=Protection(trusts_network=True),
    )
    mine = hub.endpoints
    other = meet(rank, mine)
    peers = [mine, other] if rank == 0 else [other, mine]
    progress = wait.FINISHED if kind else 0
    wait._LAST_MESSAGES_S = 1.5  # the value takes longer
    policy = WaitPolicy(deadline_s=TRIED_S, progress=lambda rank: progress)
    transport = hub.connect(rank=rank, job="cable", generation=1, peers=peers, policy=policy)
    specs = [
        ChannelSpec(0, source, source, 1 - source, torch.float32, (size // 4,), size)
        for source in range(2)
    ]
    sender, receiver = transport.open_sender(specs[rank]), transport.open_receiver(specs[1 - rank])
    value, steps = torch.ones(size // 4), iter(range(1000))

    if kind:
        if rank == 0:
            sender.send(value, step=0, microbatch=0)
            meet(rank, {})
        else:
            received = receiver.receive(step=0, microbatch=0)
            meet(rank, {})
            assert torch.equal(received, value)
        transport.close()
        return

    def exchange(*, in_turn: bool) -> float:
        step, began = next(steps), time.perf_counter()
        calls: list[Any] = [
            lambda: sender.send(value, step=step, microbatch=0),
            lambda: receiver.receive(step=step, microbatch=0),
        ]
        for call in reversed(calls) if in_turn and rank else calls:
            call()
        return (time.perf_counter() - began) / (2 if in_turn else 1)

    exchange(in_turn=True)
    found = {
        name: statistics.median(exchange(in_turn=in_turn) for _ in range(ROUNDS))
        for name, in_turn in (("one way", True), ("both ways", False))
    }
    transport.close()
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
