"""Run under the launcher: worker 1 does not do what the others do, as its argument says."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import nn

import graphsplit as gs

sys.path.insert(0, str(Path(__file__).parents[2]))
from quiet_time import quiet_time

WHAT = sys.argv[1]
BATCH = (torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
MORE_THAN_A_QUEUE = 1 << 22


def is_due(what: str) -> bool:
    """Whether this is the worker, and the case, that goes another way; says when it does."""
    found = what == WHAT and gs.get_rank() == 1
    if found and what != "a loss":  # a clock is not captured
        print(f"trouble at {quiet_time()}", flush=True)
    return found


class Callback(gs.callbacks.Callback):
    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        if context.step != 3:
            return
        if is_due("a callback") or is_due("a full queue"):
            context.model.state_dict()
        if is_due("batches that look other"):
            context.model.predict(BATCH[0])
        if is_due("a thread"):
            thread = threading.Thread(target=context.model.state_dict)
            thread.start()
            thread.join()
        if is_due("sys.exit"):
            sys.exit(0)
        if is_due("os._exit"):
            os._exit(0)
        if is_due("an exception"):
            raise RuntimeError("a user's bug")
        if is_due("Ctrl-C"):
            os.kill(os.getpid(), signal.SIGINT)
        if is_due("a fork") and os.fork() == 0:
            sys.exit(0)
        if is_due("a call in a fork"):
            if os.fork() == 0:
                context.model.state_dict()
            os.wait()


def metric(outputs: torch.Tensor, target: torch.Tensor) -> float:
    if is_due("a metric"):
        gs.barrier()
    return 0.0


def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if is_due("a loss"):
        gs.barrier()
    return nn.functional.cross_entropy(outputs, target)


def own_loop(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    twin = copy.deepcopy(net)
    net = gs.distribute(net)
    for step in range(60):
        outputs = net(BATCH[0])
        loss = loss_fn(outputs, BATCH[1])
        accuracy = (outputs.argmax(1) == BATCH[1]).float().mean()
        loss.backward()
        optimizer.step()
        if gs.get_rank() == 0:
            print(loss.item())  # which all have been told
        if step == 40 and is_due("an own loop that asks"):
            print(accuracy.item())
        if step == 40 and WHAT == "an own loop of two":
            both = net, gs.distribute(twin)
            for one in both[::-1] if is_due(WHAT) else both:
                print(one(BATCH[0]).sum().item())
        if step == 40 and is_due("an own loop"):  # later than calls are remembered
            net.state_dict()


def main() -> None:
    gs.init()
    torch.manual_seed(0)
    middle = [nn.Linear(4, 4) for _ in range(gs.get_world_size() - 2)]
    net = nn.Sequential(nn.Linear(4, 4), *middle, nn.Linear(4, 3))
    for rank, layer in zip((0, 2, 1) if middle else (0, 1), net, strict=True):
        layer.place(rank)  # worker 1 has the outputs
    if WHAT == "a full queue":
        net[-1].table = nn.Parameter(torch.zeros(MORE_THAN_A_QUEUE, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if WHAT.startswith("an own loop"):
        own_loop(net, optimizer)
        return
    model = gs.Model(net, loss_fn, optimizer, metrics={"zero": metric})
    if is_due("before the first step"):
        os._exit(0)
    if WHAT == "a loss":
        print(f"trouble at {quiet_time()}", flush=True)
    model.train(1, [BATCH] * 40, [Callback()])
    model.eval([BATCH] * 40)
    model.state_dict()
    if is_due("after training"):
        model.predict(BATCH[0])
    if is_due("one state_dict more"):
        model.state_dict()
    model.train(1, [BATCH] * 40)
    if is_due("before the end"):
        model.save("never")


if __name__ == "__main__":
    main()
