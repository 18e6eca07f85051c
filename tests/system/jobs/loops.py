"""The example's loop, or a plain one over epochs, in a worker that ends itself by SIGKILL, once.

    graphsplit run -n 2 loops.py FOLDER rank:what:number,...

``what`` is ``FORWARD``, ``BACKWARD``, ``STEP`` or ``SNAPSHOT`` of that number, ``ITER`` where a
loader begins, ``END`` behind the loop. Prints a digest of all. Without arguments it is the
reference: one process, and the loader itself in the place of ``gs.loop``.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
import loop_that_survives as example
from moments import after_snapshots, before
from training_state import digest, say

import graphsplit as gs
from graphsplit.distribute.calls import NetworkCalls
from graphsplit.optimizers.optimizer import OwnedOptimizer


class Deaths:
    """The moments at which this process is to die; each happens once, whoever comes back."""

    def __init__(self, marks: Path, moments: list[str]) -> None:
        self._marks, self._moments = marks, moments
        self._counts: dict[str, int] = {}
        before(NetworkCalls, "forward", partial(self.come, "FORWARD"))
        before(NetworkCalls, "backward", partial(self.come, "BACKWARD"))
        before(OwnedOptimizer, "stepping", partial(self.come, "STEP"))
        before(DataLoader, "__iter__", partial(self.come, "ITER"))
        after_snapshots(lambda number: self.perhaps("SNAPSHOT", number))

    def come(self, what: str) -> None:
        """It comes to a moment once more."""
        self._counts[what] = self._counts.get(what, 0) + 1
        self.perhaps(what, self._counts[what])

    def perhaps(self, what: str, number: int) -> None:
        """Die, if it is the moment, and was not before."""
        moment = f"{gs.get_rank()}:{what}:{number}"
        mark = self._marks / moment
        if moment in self._moments and not mark.exists():
            mark.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the job."""
    deaths = None
    if len(sys.argv) > 1:
        deaths = Deaths(Path(sys.argv[1]), sys.argv[2].split(","))
    else:
        gs.loop = lambda source, keep=(): iter(source)
    gs.init()
    found: Any = example.train(2)
    if deaths is not None:
        deaths.come("END")
    say("state", digest([*found, torch.get_rng_state()]))


if __name__ == "__main__":
    main()
