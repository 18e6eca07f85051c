"""What README's picture shows: three workers, two branches and a skip, four microbatches.

Drawn by::

    OMP_NUM_THREADS=1 graphsplit trace -n 3 -o trace docs/picture.py && cp trace/timeline.svg docs/
"""

import torch
from torch import nn

import graphsplit as gs

WIDTH, ROWS = 768, 256


class Net(nn.Module):
    """A stem, two branches of their own length, and a head that adds them and the stem's value."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
        self.head = nn.Linear(WIDTH, 10)
        self.left = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.right = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through both branches."""
        x = self.stem(x).relu()
        result: torch.Tensor = self.head(self.left(x).relu() + self.right(x).sigmoid() + x)
        return result


gs.init()
torch.manual_seed(0)
net = Net()
net.stem.place("MS_WORKER", 0)
net.left.place("MS_WORKER", 1)
net.right.place("MS_WORKER", 2)
net.head.place("MS_WORKER", 0)
model = gs.Model(
    net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.01), microbatches=4
)
batch = (torch.rand(ROWS, WIDTH), torch.randint(0, 10, (ROWS,)))
model.train(1, [batch] * 20)
