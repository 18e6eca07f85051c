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
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
from nets import Fan
from same_bits import Counted
from training_state import PARTS, digest, say

import graphsplit as gs
from graphsplit.capture.graph import Mode
from graphsplit.runtime import job as jobs
from graphsplit.runtime.runner import ProgramRunner
from graphsplit.train.recovery.replicator import Replicator


def wait_until_all_know() -> None:
    """After SIGTERM: until the scheduler has passed it on."""
    job = jobs.current()
    assert job is not None
    deadline = time.monotonic() + 30
    while not job.asked_to_stop and time.monotonic() < deadline:
        threading.Event().wait(0.01)


class Deaths:
    """The moments at which this process is to die; each happens once, whoever comes back."""

    def __init__(self, moments: str, marks: str, *, by: signal.Signals) -> None:
        self._by = by
        self._moments = [m for m in moments.split(",") if m]
        self._marks = Path(marks)
        if self._moments:
            self._watch_instructions()
            self._watch_snapshots()

    def perhaps(self, what: str, number: int) -> None:
        moment = f"{gs.get_rank()}:{what}:{number}"
        mark = self._marks / moment
        if moment in self._moments and not mark.exists():
            mark.write_text("")
            os.kill(os.getpid(), self._by)
            wait_until_all_know()

    def _watch_instructions(self) -> None:
        bind: Any = ProgramRunner._bind

        def watched(runner: Any, instruction: Any) -> Any:
            action = bind(runner, instruction)
            is_training = runner._plan.placed.graph.mode is Mode.TRAIN
            what = instruction.opcode.name if is_training else "EVAL"

            def run(state: Any) -> None:
                self.perhaps(what, state.step)
                action(state)

            return run

        ProgramRunner._bind = watched  # type: ignore[method-assign]

    def _watch_snapshots(self) -> None:
        offer: Any = Replicator.offer

        def watched(replicator: Any, part: Any, *arguments: Any, **options: Any) -> None:
            offer(replicator, part, *arguments, **options)
            self.perhaps("SNAPSHOT", part.number)

        Replicator.offer = watched  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--die", default="")
    parser.add_argument("--marks", default=".")
    parser.add_argument("--by", default="SIGKILL", help="SIGTERM asks for an end in order")
    arguments = parser.parse_args()
    Deaths(arguments.die, arguments.marks, by=signal.Signals[arguments.by])
    gs.init()
    torch.manual_seed(0)
    net = Fan()
    for index, name in enumerate(PARTS):
        net.get_submodule(name).place("MS_WORKER", index % gs.get_world_size())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    loader = DataLoader(Counted((12,), 20), batch_size=5, shuffle=True)
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer, {"Loss": gs.metrics.Loss()})
    model.train(4, loader, [gs.callbacks.LearningRateScheduler(schedule, "step")])
    say("eval", model.eval(loader))
    for inputs, target in loader:
        say("loss", digest(model.train_step(inputs, target)))
    say("state", digest([model.state_dict(), model.optimizer_state_dict(), torch.get_rng_state()]))


if __name__ == "__main__":
    main()
