"""What every process of the matrix runs: it trains, evaluates, saves, and is hit where it is told.

    graphsplit run -n 3 job.py FOLDER

``FOLDER/fault.json`` says what goes wrong. Prints what calls return, and a digest of the state.
Without ``MS_ROLE`` it is the reference: one process, in which nothing happens.
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


class Net(nn.Module):
    """There and back: worker 0, 1, 2, and 0 again, with dropout and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8 + 6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = hidden + nn.functional.dropout(self.middle(hidden), 0.2, self.training)
        return self.head(torch.cat([self.norm(hidden), x], dim=1))


def main() -> None:
    """Run the job."""
    folder = Path(sys.argv[1])
    if os.environ.get("MS_ROLE"):
        Injector(folder)
    gs.init()
    torch.manual_seed(0)
    net = Net()
    for rank, module in enumerate((net.first, net.middle, net.norm)):
        module.place("MS_WORKER", rank % gs.get_world_size())
    net.head.place("MS_WORKER", 0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    loader = DataLoader(Counted((6,), 20), batch_size=5, shuffle=True)
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer, {"Loss": gs.metrics.Loss()})
    model.train(3, loader)
    say("eval", model.eval(loader))
    model.save(folder / "saved")
    for inputs, target in loader:
        say("loss", digest(model.train_step(inputs, target)))
    say_state(model)


if __name__ == "__main__":
    main()
