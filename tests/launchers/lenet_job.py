"""Trains LeNet for STEPS steps; says the digest of what it has learned. The same by itself.

With STEPS=endless the workers add up numbers over the data plane until they are ended, for tests of
what is left behind then: half of what a process takes to start is what it imports to capture.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
from pathlib import Path

import torch

import graphsplit as gs

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "lenet_mnist"))
from lenet import LeNet5


def say(line: str) -> None:
    """In one write: print writes the end of a line by itself, and others write there too."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


gs.init()
torch.manual_seed(0)
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
    assert name not in os.environ
assert gs.get_world_size() == 1 or os.environ["GRPC_VERBOSITY"] == "ERROR"
trains = f"worker {gs.get_rank()} has pid {os.getpid()} and trains"
if os.environ["STEPS"] == "endless":
    for number in itertools.count():
        gs.all_reduce(torch.ones(8))
        if number == 2:
            say(trains)
network = LeNet5()
last = gs.get_world_size() - 1
for module, rank in (
    (network.conv1, 0),
    (network.conv2, last),
    (network.fc1, 0),
    (network.fc3, last),
):
    module.place("MS_WORKER", rank)
optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
model = gs.Model(network, torch.nn.CrossEntropyLoss(), optimizer)
for step in range(int(os.environ["STEPS"])):
    loss = model.train_step(torch.randn(8, 1, 32, 32), torch.randint(0, 10, (8,)))
    if step == 2:
        say(trains)
learned = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
say(f"learned {float(loss).hex()} {hashlib.sha256(learned).hexdigest()}")
