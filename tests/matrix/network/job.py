"""A short training whose network breaks at one moment of one worker; or one left alone.

Prints what ``recovering.py`` prints: losses and metrics as calls return them, and at the end a
digest of parameters, optimizer state and generator. The moment is ``what:number``; the request is
what the switch is asked for then, once, whoever comes back.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "system" / "jobs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nets import Fan
from same_bits import Counted
from training_state import PARTS, digest, say

import graphsplit as gs
from graphsplit.capture.graph import Mode
from graphsplit.cluster.member import Member
from graphsplit.cluster.member_state import MemberState
from graphsplit.runtime.runner import ProgramRunner
from graphsplit.train.recovery.replicator import Replicator
from matrix.network.switch import ask


class Moment:
    """The moment at which the network is to break. ``VANISH`` ends this process, too."""

    def __init__(self, moment: str, request: str, switch: str) -> None:
        self._moment = moment
        self._request: dict[str, Any] = json.loads(request)
        self._switch = switch
        self._counts: dict[str, int] = {}
        if moment:
            self._watch_membership()
            self._watch_instructions()
            self._watch_snapshots()

    def perhaps(self, what: str, number: int) -> None:
        """Break the network if this is the moment."""
        if f"{what}:{number}" != self._moment:
            return
        answer = ask(self._switch, {**self._request, "once": self._moment})
        if answer["done"] and self._request.get("vanish"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _next(self, what: str) -> None:
        number = self._counts.get(what, 0)
        self._counts[what] = number + 1
        self.perhaps(what, number)

    def _before(self, owner: Any, name: str, what: str) -> None:
        """The moment is just before a method runs; they are counted."""
        method = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            self._next(what)
            return method(*arguments, **options)

        setattr(owner, name, watched)

    def _watch_membership(self) -> None:
        self._before(Member, "join", "JOIN")
        self._before(MemberState, "_accept", "REGISTERED")
        self._before(Member, "agree", "AGREE")
        self._before(Member, "finish", "FINISH")

    def _watch_instructions(self) -> None:
        bind: Any = ProgramRunner._bind

        def watched(runner: Any, instruction: Any) -> Any:
            action = bind(runner, instruction)
            is_training = runner._plan.placed.graph.mode is Mode.TRAIN
            what = instruction.opcode.name

            def run(state: Any) -> None:
                if is_training:
                    self.perhaps(what, state.step)
                elif what == "FORWARD":
                    self._next("EVAL")
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
    """Train, evaluate, train a little more."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moment", default="")
    parser.add_argument("--request", default="{}")
    parser.add_argument("--switch", default="")
    arguments = parser.parse_args()
    Moment(arguments.moment, arguments.request, arguments.switch)
    gs.init()
    torch.manual_seed(0)
    net = Fan()
    for index, name in enumerate(PARTS):
        net.get_submodule(name).place("MS_WORKER", index % gs.get_world_size())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    loader = DataLoader(Counted((12,), 20), batch_size=5, shuffle=True)
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer, {"Loss": gs.metrics.Loss()})
    model.train(2, loader, [])
    say("eval", model.eval(loader))
    inputs, target = next(iter(loader))
    say("loss", digest(model.train_step(inputs, target)))
    say("state", digest([model.state_dict(), model.optimizer_state_dict(), torch.get_rng_state()]))


if __name__ == "__main__":
    main()
