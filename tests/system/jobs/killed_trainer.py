"""An example with a trainer, in which one worker ends itself by SIGKILL in the middle of a run.

graphsplit run -n 2 killed_trainer.py EXAMPLE FOLDER RANK CALL

``CALL`` is the number of the network's call, counted from 1, before which the worker dies.
"""

from __future__ import annotations

import itertools
import os
import runpy
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from moments import before

from graphsplit.distribute.calls import NetworkCalls


def main() -> None:
    """Run the example as its user would."""
    example, folder, rank, call = sys.argv[1:]
    numbers = itertools.count(1)

    def perhaps_die() -> None:
        if next(numbers) == int(call) and os.environ["MS_NODE_ID"] == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    before(NetworkCalls, "forward", perhaps_die)
    sys.argv[:] = [example, folder]
    runpy.run_path(example, run_name="__main__")


if __name__ == "__main__":
    main()
