"""A module that forward imports first, and that the step then asks for values."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from recovery_helpers import ThreadCluster, threads_as_workers
from torch import nn

import graphsplit as gs

assert threads_as_workers
SOURCE = """
SCALE = 2.0


class Box:
    def __call__(self, h):
        return scaled(h)


def scaled(h):
    return h * SCALE
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        import fresh_in_forward  # type: ignore[import-not-found]

        h = self.a(x)
        if h.sum() < 1e9:
            h = fresh_in_forward.Box()(h)
        return self.b(h)


@pytest.mark.usefixtures("threads_as_workers")
def test_a_first_import_outlives_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fresh_in_forward.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    net, x = Net(), torch.ones(2, 4)

    def script(_: int) -> list[torch.Tensor]:
        mine = copy.deepcopy(net)
        mine.a.place("MS_WORKER", 0)
        mine.b.place("MS_WORKER", 1)
        model = gs.Model(mine)
        found = [model.predict(x)]
        gs.barrier()
        sys.modules["fresh_in_forward"].SCALE = 3.0
        found.append(model.predict(x))
        return found

    (ours, _) = ThreadCluster(script, 2).run()
    for scale, one in zip((2.0, 3.0), ours, strict=True):
        sys.modules["fresh_in_forward"].SCALE = scale
        with torch.no_grad():
            assert torch.equal(net(x), one)
    del sys.modules["fresh_in_forward"]
