"""Train LeNet-5, on one process or on a scheduler and five workers: the script is the same.

python train.py                       one process, ordinary PyTorch
bash run.sh [MNIST_DATA_PATH]         a scheduler and five workers on this machine
graphsplit run -n 5 train.py          the same from one command

Only the scheduler and the workers read MS_* variables; the network below knows of neither.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from data import MnistFileError, batches, make_datasets
from lenet import LeNet5

import graphsplit as gs


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("DATA_PATH") or None,
        help="folder with MNIST's four files; default: $DATA_PATH, or scikit-learn's digits",
    )
    parser.add_argument("--download", action="store_true", help="fetch MNIST into --data first")
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    if arguments.download and arguments.data is None:
        parser.error("--download needs --data PATH, the folder to fetch MNIST into")
    return arguments


def place(net: LeNet5) -> None:
    """Say which worker runs which layer; what is not named stays beside its input."""
    net.fc1.place("MS_WORKER", 0)
    net.fc2.place("MS_WORKER", 1)
    net.fc3.place("MS_WORKER", 2)
    net.conv1.place("MS_WORKER", 3)
    net.conv2.place("MS_WORKER", 4)


def main() -> None:
    """Train, then print the accuracy on the test set."""
    arguments = parse_arguments()
    gs.init()  # the scheduler's process stays in here until the job ends
    torch.manual_seed(arguments.seed)

    net = LeNet5()
    place(net)
    train_set, test_set = make_datasets(arguments.data, download=arguments.download)
    train_loader = batches(train_set, batch_size=arguments.batch_size, shuffle=True, drop_last=True)
    test_loader = batches(test_set, batch_size=arguments.batch_size)

    model = gs.Model(
        net,
        loss_fn=torch.nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(net.parameters(), lr=arguments.lr, momentum=arguments.momentum),
        metrics={"Accuracy": gs.metrics.Accuracy()},
    )
    callbacks = [gs.callbacks.LossMonitor(), gs.callbacks.TimeMonitor()]
    if arguments.progress:
        callbacks.append(gs.callbacks.ProgressBar())
    model.train(arguments.epochs, train_loader, callbacks=callbacks)
    print("Accuracy is:", model.eval(test_loader), flush=True)


if __name__ == "__main__":
    try:
        main()
    except MnistFileError as error:
        raise SystemExit(f"train.py: {error}") from None
