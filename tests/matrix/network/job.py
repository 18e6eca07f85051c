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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "system" / "jobs"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from moments import after_snapshots, before, before_instructions
from nets import Fan
from training_state import digest, parts, place_parts, say, say_state

import graphsplit as gs
from graphsplit.cluster.member.member import Member
from graphsplit.cluster.member.state_machine import MemberState
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
            before_instructions(self._come_to_instruction)
            after_snapshots(lambda number: self.perhaps("SNAPSHOT", number))

    def perhaps(self, what: str, number: int) -> None:
        """Break the network if this is the moment."""
        if f"{what}:{number}" != self._moment:
            return
        answer = ask(self._switch, {**self._request, "once": self._moment})
        if answer["done"] and self._request.get("vanish"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _next(self, what: str) -> None:
        """The moment has come once more; these are counted."""
        number = self._counts.get(what, 0)
        self._counts[what] = number + 1
        self.perhaps(what, number)

    def _watch_membership(self) -> None:
        for owner, name, what in (
            (Member, "join", "JOIN"),
            (MemberState, "_accept", "REGISTERED"),
            (Member, "agree", "AGREE"),
            (Member, "finish", "FINISH"),
        ):
            before(owner, name, partial(self._next, what))

    def _come_to_instruction(self, is_training: bool, opcode: str, step: int) -> None:
        if is_training:
            self.perhaps(opcode, step)
        elif opcode == "FORWARD":
            self._next("EVAL")


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
    place_parts(net)
    make_optimizer, _, loader = parts()
    optimizer = make_optimizer(net)
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer, {"Loss": gs.metrics.Loss()})
    model.train(2, loader, [])
    say("eval", model.eval(loader))
    inputs, target = next(iter(loader))
    say("loss", digest(model.train_step(inputs, target)))
    say_state(model)


if __name__ == "__main__":
    main()
