"""What every process of the matrix runs where a job goes on without the workers that were lost.

    graphsplit run -n 3 replica_job.py FOLDER

Replicas, whose gradients are added from left to right, and two processes that read for each loader.
While one worker of 0 and 1 is there the job has all that it needs. Prints what ``job.py`` prints.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "system" / "jobs"))
from same_bits import Counted
from training_state import digest, say, say_state

import graphsplit as gs
from matrix.faults import Injector
from matrix.job import Net

NUM_PARTS = 4


def main() -> None:
    """Run the job."""
    folder = Path(sys.argv[1])
    if os.environ.get("MS_ROLE"):
        Injector(folder)
    gs.init()
    torch.manual_seed(0)
    net = Net()
    net.place([rank for rank in range(3) if rank < gs.get_world_size()])
    net.head.place([rank for rank in range(2) if rank < gs.get_world_size()])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    # The last batch of an epoch has parts of 3 and of 2 rows, which run in two turns.
    loader = DataLoader(Counted((6,), 46), batch_size=12, shuffle=True, num_workers=2)
    model = gs.Model(
        *(net, nn.CrossEntropyLoss(), optimizer, {"Loss": gs.metrics.Loss()}),
        microbatches=NUM_PARTS,
        gradient_order="left",
        clip=gs.clip.GlobalNorm(1.0),
    )
    model.train(3, loader)
    say("eval", model.eval(loader))
    model.save(folder / "saved")
    for inputs, target in loader:
        say("loss", digest(model.train_step(inputs, target)))
    say_state(model)


if __name__ == "__main__":
    main()
