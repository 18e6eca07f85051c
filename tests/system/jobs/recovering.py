"""A run whose workers end themselves by SIGKILL where they are told to; or one undisturbed.

Prints the losses and metrics that calls return, and at the end a digest of parameters, optimizer
state and generator. Where to die is said by ``rank:what:number``, with commas in between: ``what``
is an instruction (``FORWARD``, ``SEND``, ...) of training step ``number``, ``EVAL`` for the first
forward of evaluation ``number``, or ``SNAPSHOT`` for that snapshot.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from moments import after_snapshots, before_instructions
from nets import Fan
from training_state import digest, parts, place_parts, say, say_state

import graphsplit as gs
from graphsplit.job import joined


def wait_until_all_know() -> None:
    """After SIGTERM: until the scheduler has passed it on."""
    job = joined.current()
    assert job is not None
    deadline = time.monotonic() + 30
    while not job.member.state.stops_soon and time.monotonic() < deadline:
        threading.Event().wait(0.01)


def ancestor(generations: int) -> int:
    """The process that stands so far above this one."""
    pid = os.getpid()
    for _ in range(generations):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


class Deaths:
    """The moments at which this process is to die; each happens once, whoever comes back."""

    def __init__(
        self, moments: str, marks: str, *, by: signal.Signals, generations: int = 0
    ) -> None:
        self._by, self._generations = by, generations
        self._moments = [m for m in moments.split(",") if m]
        self._marks = Path(marks)
        if self._moments:
            before_instructions(self._come_to_instruction)
            after_snapshots(lambda number: self.perhaps("SNAPSHOT", number))

    def _come_to_instruction(self, is_training: bool, opcode: str, step: int) -> None:
        self.perhaps(opcode if is_training else "EVAL", step)

    def perhaps(self, what: str, number: int) -> None:
        moment = f"{gs.get_rank()}:{what}:{number}"
        mark = self._marks / moment
        if moment in self._moments and not mark.exists():
            mark.write_text("")
            os.kill(ancestor(self._generations), self._by)
            wait_until_all_know()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--die", default="")
    parser.add_argument("--marks", default=".")
    parser.add_argument("--by", default="SIGKILL", help="SIGTERM asks for an end in order")
    parser.add_argument("--above", type=int, default=0, help="an ancestor is killed, and all die")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--late", type=float, default=0.0, help="seconds before it comes back")
    parser.add_argument("--replicated", action="store_true", help="all workers run all of it")
    arguments = parser.parse_args()
    if arguments.late and any(Path(arguments.marks).iterdir()):
        time.sleep(arguments.late)  # it was started again
    by = signal.Signals[arguments.by]
    Deaths(arguments.die, arguments.marks, by=by, generations=arguments.above)
    gs.init()
    torch.manual_seed(0)
    make_optimizer, make_scheduler, loader = parts()
    net: nn.Module = Fan()
    if arguments.replicated:
        net = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 10))
        net.place(list(range(gs.get_world_size())))
        loader = DataLoader(loader.dataset, batch_size=10, shuffle=True)
    else:
        place_parts(net)
    optimizer = make_optimizer(net)
    schedule = gs.callbacks.LearningRateScheduler(make_scheduler(optimizer), "step")
    model = gs.Model(
        *(net, nn.CrossEntropyLoss(), optimizer, {"Loss": gs.metrics.Loss()}),
        microbatches=4 if arguments.replicated else 1,
    )
    model.train(arguments.epochs, loader, [schedule])
    say("eval", model.eval(loader))
    for inputs, target in loader:
        say("loss", digest(model.train_step(inputs, target)))
    say_state(model)


if __name__ == "__main__":
    main()
