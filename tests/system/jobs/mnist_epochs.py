"""LeNet on the real MNIST: after every epoch, print accuracy and a digest of the whole state.

Without MS_ROLE, and without graphsplit's Model, it is a plain loop (``--plain``).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "lenet_mnist"))
from data import batches, make_datasets
from lenet import LeNet5

PLACEMENT = {"fc1": 0, "fc2": 1, "fc3": 2, "conv1": 3, "conv2": 4}


def digest(network: dict[str, torch.Tensor], optimizer: dict[str, Any]) -> str:
    """SHA-256 over the bytes of every parameter and momentum buffer, and their names."""
    seen = hashlib.sha256()
    for name, value in network.items():
        seen.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    for index, entry in sorted(optimizer["state"].items()):
        for name, value in sorted(entry.items()):
            seen.update(f"{index}{name}".encode() + value.contiguous().numpy().tobytes())
    return seen.hexdigest()[:32]


def loaders(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Batches to train on, of the first images, and all to test on."""
    train_set, test_set = make_datasets(arguments.data)
    some: Any = Subset(train_set, range(min(arguments.images, len(train_set))))
    train_loader = batches(some, batch_size=32, shuffle=True, drop_last=True)
    return train_loader, batches(test_set, batch_size=32)


def plain(arguments: argparse.Namespace) -> None:
    """The reference: ordinary PyTorch."""
    torch.manual_seed(arguments.seed)
    net = LeNet5()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    train_loader, test_loader = loaders(arguments)
    for epoch in range(1, arguments.epochs + 1):
        net.train()
        for inputs, target in train_loader:
            optimizer.zero_grad()
            loss = loss_fn(net(inputs), target)
            loss.backward()
            optimizer.step()
        net.eval()
        correct = total = 0
        with torch.no_grad():
            for inputs, target in test_loader:
                correct += int((net(inputs).argmax(1) == target).sum())
                total += target.numel()
        state = digest(net.state_dict(), optimizer.state_dict())
        print(f"epoch {epoch} accuracy {correct / total!r} state {state}", flush=True)


def split(arguments: argparse.Namespace) -> None:
    """The same through a Model, on five workers."""
    import graphsplit as gs

    gs.init()
    torch.manual_seed(arguments.seed)
    net = LeNet5()
    for name, rank in PLACEMENT.items():
        getattr(net, name).place("MS_WORKER", rank)
    model = gs.Model(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
        {"Accuracy": gs.metrics.Accuracy()},
    )
    train_loader, test_loader = loaders(arguments)
    for epoch in range(1, arguments.epochs + 1):
        model.train(1, train_loader)
        accuracy = model.eval(test_loader)["Accuracy"]
        state = digest(model.state_dict(), model.optimizer_state_dict())
        print(f"epoch {epoch} accuracy {accuracy!r} state {state}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true")
    found = parser.parse_args()
    (plain if found.plain else split)(found)
