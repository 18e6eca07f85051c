"""MegEngine's first example, a linear classifier of MNIST: `graphsplit run -n 2 linear.py`.

Its `GradManager`, `backward`, `optimizer.step().clear_grad()` and reductions are all in `train`.
The real MNIST where DATA_PATH names its folder, else the digits that scikit-learn brings.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from data import batches, make_datasets
from torch import nn

import graphsplit as gs


def train(epochs: int = 5) -> tuple[float, dict[str, torch.Tensor]]:
    """The accuracy on the test set, and the parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(32 * 32, 10))
    net[1].place("MS_WORKER", 1)
    folder = os.environ.get("DATA_PATH")
    train_set, test_set = make_datasets(Path(folder) if folder else None)
    model = gs.Model(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(net.parameters(), lr=0.01),
        metrics={"Accuracy": gs.metrics.Accuracy()},
    )
    model.train(epochs, batches(train_set, batch_size=64, shuffle=True))
    return model.eval(batches(test_set, batch_size=64))["Accuracy"], model.state_dict()


if __name__ == "__main__":
    gs.init()
    print("Accuracy is:", train()[0])
