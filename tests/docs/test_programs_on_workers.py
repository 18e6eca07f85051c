"""Programs of the how-to pages on workers that are threads: the bits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from documents import blocks
from recovery_helpers import ThreadCluster, threads_as_workers
from simulated.compare import difference

import graphsplit as gs

assert threads_as_workers
NAMES = {
    "own_loop.py": ("state",),
    "gan.py": ("loss_d", "loss_g"),
    "wgan_gp.py": ("state",),
    "distil.py": ("state", "accuracy"),
    "sampling.py": ("loss", "scores"),
}


def left_by(text: str, names: tuple[str, ...]) -> list[Any]:
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "program.py", "exec"), found)
    return [found[name] for name in names]


@pytest.mark.usefixtures("threads_as_workers")
@pytest.mark.parametrize("name", NAMES)
def test_a_program_leaves_the_same_on_workers(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gs, "init", lambda: None)  # the threads have joined
    (block,) = (block for block in blocks("snippet") if block.name == name)
    here = left_by(block.text, NAMES[name])
    Path("own_loop.pt").unlink(missing_ok=True)
    cluster = ThreadCluster(lambda _: left_by(block.text, NAMES[name]), 2, is_recoverable=False)
    for found in cluster.run():
        assert difference(here, found) is None
    if name == "own_loop.py":
        assert difference(here[0], torch.load("own_loop.pt")) is None
