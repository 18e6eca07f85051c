"""The job of ``bench_recovery_time.py``: workers that are killed, and write down what they do when.

One line of JSON for each moment, with seconds of the clock that all processes of a machine share.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from common_models import digits, lenet, made
from torch.nn import functional as F

import graphsplit as gs
from graphsplit.failure import AbortSignal
from graphsplit.planning import planner
from graphsplit.recovery.snapshots import Snapshots

LAYERS = ("fc1", "fc2", "fc3", "conv1", "conv2")


def process_began_s() -> float:
    """When this process was started, by the monotonic clock; to a hundredth of a second."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    asleep_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return ticks / os.sysconf("SC_CLK_TCK") - asleep_s


class Marks:
    """A log of what this process does, with its times.

    Args:
        folder: Where all processes write, each to a file of its own.
        rank: This worker's.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        name = f"marks-{rank}-{os.getpid()}.jsonl"
        self._file = (folder / name).open("a", buffering=1)
        self._about = {"rank": rank, "pid": os.getpid()}

    def add(self, what: str, at_s: float | None = None, **more: Any) -> None:
        """Something happens now, or happened then."""
        at_s = time.monotonic() if at_s is None else at_s
        self._file.write(json.dumps({"what": what, "at_s": at_s, **self._about, **more}) + "\n")

    def around(self, owner: Any, name: str, what: str) -> None:
        """Note when a function is called, and how long it takes."""
        function: Callable[..., Any] = getattr(owner, name)

        @wraps(function)
        def noted(*arguments: Any, **options: Any) -> Any:
            began_s = time.monotonic()
            try:
                return function(*arguments, **options)
            finally:
                self.add(what, began_s, took_s=time.monotonic() - began_s)

        setattr(owner, name, noted)


class Deaths(gs.callbacks.Callback):
    """Notes every step, and ends this process after some of them, once."""

    def __init__(self, marks: Marks, folder: Path, kills: str) -> None:
        self._marks, self._folder = marks, folder
        pairs = [pair.split(":") for pair in kills.split(",") if pair]
        self._kills = {(int(step), int(rank)) for step, rank in pairs}

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        """Perhaps the last thing that this process does."""
        self._marks.add("step", number=context.step)
        moment = (context.step, context.rank)
        dead = self._folder / f"dead-{context.step}"
        if moment in self._kills and not dead.exists():
            dead.touch()
            self._marks.add("killed", number=context.step)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """One worker, or the scheduler."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kills", default="", help="step:rank, with commas in between")
    arguments = parser.parse_args()
    # torch.optim imports it when the first optimizer is made, with or without graphsplit.
    import_module("torch._dynamo")
    imported_s = time.monotonic()
    gs.init()
    joined_s = time.monotonic()
    marks = Marks(arguments.folder, gs.get_rank())
    marks.add("started", process_began_s())
    marks.add("imported", imported_s)
    marks.add("joined", joined_s)
    marks.around(AbortSignal, "set", "detected")
    marks.around(planner, "capture_graph", "capture")
    marks.around(planner.Planner, "_make", "plan")
    marks.around(Snapshots, "agree", "agree")
    marks.around(Snapshots, "restore", "restore")
    net, optimizer = made(lenet)
    for index, name in enumerate(LAYERS):
        net.get_submodule(name).place("MS_WORKER", index % gs.get_world_size())
    model = gs.Model(net, F.cross_entropy, optimizer)
    model.train(1, digits(arguments.steps), [Deaths(marks, arguments.folder, arguments.kills)])


if __name__ == "__main__":
    main()
