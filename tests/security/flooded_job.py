"""A job of two workers that trains until it is ended, and says what each epoch took.

``epoch SECONDS WAITED``: its time, and for how much of it this worker's main thread was ready to
run and had no core.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import graphsplit as gs

STEPS = 40


def waited_s() -> float:
    """The seconds in which the main thread has waited for a core so far."""
    pid = os.getpid()
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9


gs.init()
torch.manual_seed(0)
net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
for number, module in enumerate(net):
    module.place("MS_WORKER", number % 2)
model = gs.Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=1e-3))
x, y = torch.randn(64, 256), torch.randn(64, 256)
sys.stdout.write(f"pid {os.getpid()}\n")
while True:
    began, waited = time.monotonic(), waited_s()
    for _ in range(STEPS):
        model.train_step(x, y)
    sys.stdout.write(f"epoch {time.monotonic() - began:.4f} {waited_s() - waited:.4f}\n")
    sys.stdout.flush()
