"""Run under the launcher: goes wrong as its argument says, on worker 1 of three."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import graphsplit as gs

sys.path.insert(0, str(Path(__file__).parents[2]))
from quiet_time import quiet_time

WHAT = sys.argv[1]
GUILTY = 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden = nn.Embedding(10, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if WHAT == "mask":
            found = self.table(x)
            return self.head(found + found[found.sum(1) > 0].sum(0))
        return self.head(self.hidden(self.table(x)))


class Trouble(gs.callbacks.Callback):
    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        if context.step != 20:
            return
        if gs.get_rank() == GUILTY:
            print(f"trouble at {quiet_time()}", flush=True)
            if WHAT == "killed":
                command, folder = sys.argv[2:]
                subprocess.run(["bash", "-c", command], cwd=folder, check=True)
            if WHAT == "raises":
                raise RuntimeError("a user's bug")
            if WHAT == "cut off":
                cut_off()
            if WHAT == "forks" and os.fork() == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            if WHAT == "forks":
                print(f"child: {os.waitstatus_to_exitcode(os.wait()[1])}", flush=True)
                with multiprocessing.get_context("fork").Pool(2) as pool:
                    print(f"pool: {pool.map(abs, [-1, -2])}", flush=True)
        elif WHAT == "killed" and gs.get_rank() == 2:
            time.sleep(60)  # busy with something else when the others fail


def cut_off() -> None:
    """Break the connection to the scheduler, as a network or a fault of its library may."""
    port = int(os.environ["MS_SCHED_PORT"])
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as link:
            if link.family in (socket.AF_INET, socket.AF_INET6) and link.getpeername()[1] == port:
                link.shutdown(socket.SHUT_RDWR)


def main() -> None:
    gs.init()
    torch.manual_seed(0)
    net = Net()
    net.table.place("MS_WORKER", 0)
    net.hidden.place("MS_WORKER", 1)
    net.head.place("MS_WORKER", 7 if WHAT == "out of range" else 2)
    if WHAT == "forks":
        nn.Linear(1, 1).place("MS_WORKER", 0)  # which nobody is given
    inputs = [torch.randint(0, 10, (8,)) for _ in range(40)]
    if WHAT == "bad index":
        inputs[20][3] = 99
    if WHAT == "loaders" and gs.get_rank() == 2:
        inputs[20] = inputs[20] + 0
    batches = [(x, torch.zeros(8, dtype=torch.int64)) for x in inputs]
    if WHAT == "loaders" and gs.get_rank() == 2:
        batches[20][1][0] = 1
    rate = 0.1 * (1 + gs.get_rank()) if WHAT == "settings" else 0.1
    model = gs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=rate))
    model.train(1, batches, [Trouble()])
    if WHAT == "reads, then places late":
        try:
            print(net.hidden.weight.sum())
        except RuntimeError as error:
            print(f"reading: {error}", flush=True)
        net.hidden.place("MS_WORKER", 0)


if __name__ == "__main__":
    try:
        main()
    finally:
        print(f"ends at {quiet_time()}", flush=True)
