"""The files of graphsplit that one warm training step goes through, on worker 0's training thread.

    python benchmarks/walk.py [--names]

Two workers train a small network. In each of ten steps worker 0 notes every call of a function of
graphsplit's (``sys.setprofile``): how many files it enters, and how often a call is one of another
file than the call before. What a wait calls while it lasts, and waking a worker that sleeps, is
left out: whether a value is there already, and how often is looked for it, differs from step to
step. The step that changed file least is shown.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from common_cluster import Report, is_worker, launch, report
from torch import nn

import graphsplit as gs
from graphsplit.transport.shm.links import Link
from graphsplit.transport.shm.transport import _End

WARM_STEPS, NUM_STEPS = 4, 10
ROOT = str(Path(gs.__file__).parent)
# How long the other worker takes decides what these call, and whether they are called at all.
WAITING = (_End._wait.__code__, Link.ring.__code__)


class Walk:
    """Notes which files' functions are called, in order."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function."""
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT) and not _is_waiting(frame):
            self.files.append(str(Path(name).relative_to(ROOT)))

    def of(self, step: Callable[[], object]) -> None:
        """Note one step."""
        sys.setprofile(self)
        try:
            step()
        finally:
            sys.setprofile(None)

    @property
    def num_changes(self) -> int:
        """How often the next call is one of another file's."""
        return sum(a != b for a, b in zip(self.files, self.files[1:], strict=False))


def _is_waiting(frame: FrameType | None) -> bool:
    """Whether a call belongs to a wait."""
    while frame is not None:
        if frame.f_code in WAITING:
            return True
        frame = frame.f_back
    return False


def work() -> None:
    """One worker's part."""
    gs.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    net[0].place("MS_WORKER", 0)
    net[2].place("MS_WORKER", 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = gs.Model(net, nn.functional.cross_entropy, optimizer)
    batch = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)
    for _ in range(WARM_STEPS):
        model.train_step(batch)
    walks = [Walk() for _ in range(NUM_STEPS)]
    for walk in walks:
        walk.of(lambda: model.train_step(batch))
    shortest = min(walks, key=lambda walk: walk.num_changes)
    found: Report = {"files": shortest.files, "changes": shortest.num_changes}
    report(found)


def walked() -> tuple[list[str], int]:
    """The files of worker 0's step, each once, as it first enters them; how often it changes."""
    found = launch(__file__, 2, argparse.Namespace())[0]
    return list(dict.fromkeys(found["files"])), found["changes"]


def main() -> None:
    """Count, and print."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--names", action="store_true", help="print the files as well")
    options.add_argument("--most-files", type=int, help="fail where it enters more files")
    options.add_argument("--most-changes", type=int, help="fail where it changes file more often")
    arguments = options.parse_args()
    if is_worker():
        work()
        return
    files, changes = walked()
    if arguments.names:
        print("\n".join(files))
    print(f"a warm step enters {len(files)} files, and changes file {changes} times")
    bounds = (len(files), arguments.most_files), (changes, arguments.most_changes)
    if any(most is not None and found > most for found, most in bounds):
        raise SystemExit(
            f"more than {arguments.most_files} files, or {arguments.most_changes} changes: a step "
            f"has become harder to follow"
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
