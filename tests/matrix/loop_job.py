"""What every process of the matrix runs where the script's own loop trains, through ``gs.loop``.

    graphsplit run -n 3 loop_job.py FOLDER

The loop is the one of ``examples/loop_that_survives.py``; worker 2 owns nothing, and goes along.
Prints a digest of the state. Without ``MS_ROLE`` it is the reference: one process, and the loader
itself in the place of ``gs.loop``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "system" / "jobs"))
import loop_that_survives as example
from training_state import digest, say

import graphsplit as gs
from matrix.faults import Injector


def main() -> None:
    """Run the job."""
    if os.environ.get("MS_ROLE"):
        Injector(Path(sys.argv[1]), is_own_loop=True)
    else:
        gs.loop = lambda source, keep=(): iter(source)
    gs.init()
    found: Any = example.train(2)
    say("state", digest([*found, torch.get_rng_state()]))


if __name__ == "__main__":
    main()
