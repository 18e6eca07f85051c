"""The job of the soak: many short rounds of training, evaluation and single steps.

    python benchmarks/soak_job.py plain|split --rounds N [--begins T] [--interval S]

``plain`` is an eager loop that knows nothing of graphsplit. Both print a digest of all losses after
every round and, at the end, one of parameters, buffers, optimizer state and generator. ``split``
takes no step before its time, so that a job with a fixed number of steps lasts as long as is wished
however much it had to catch up.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS_PER_EPOCH, EVAL_STEPS, SINGLE_STEPS, BATCH = 1000, 50, 5, 8
FEATURES, WIDTH, CLASSES = 16, 32, 10


class Branches(nn.Module):
    """Four parts for four workers: fan-out, a late input, dropout, BatchNorm, A -> B -> A."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH + FEATURES, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Uses the stem twice, and the input again at the end."""
        h = torch.tanh(self.stem(x))
        h = self.left(h) * self.right(h) + h
        return self.head(torch.cat([torch.tanh(self.stem(x)) + h, x], dim=1))


PARTS = ("stem", "left", "right", "head")


def say(*what: Any) -> None:
    """Print a line now."""
    print(*what, flush=True)


def digest(value: Any) -> str:
    """SHA-256 over all tensors and numbers of a nested value, in order."""
    seen = hashlib.sha256()
    for path, leaf in torch.utils._pytree.tree_flatten_with_path(value)[0]:
        is_tensor = isinstance(leaf, torch.Tensor)
        octets = leaf.detach().contiguous().numpy().tobytes() if is_tensor else repr(leaf).encode()
        seen.update(repr(path).encode() + octets)
    return seen.hexdigest()[:32]


class Chain:
    """A digest of all losses so far, which is small however many there were."""

    def __init__(self) -> None:
        self.text, self.count = "", 0

    def add(self, loss: torch.Tensor) -> None:
        """One more."""
        self.text = hashlib.sha256(self.text.encode() + loss.numpy().tobytes()).hexdigest()[:32]
        self.count += 1


def made() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], DataLoader[Any]]:
    """The network, its optimizer, what to train on and what to evaluate; the same everywhere."""
    torch.manual_seed(0)
    net = Branches()
    data = TensorDataset(
        torch.randn(BATCH * STEPS_PER_EPOCH, FEATURES),
        torch.randint(0, CLASSES, (BATCH * STEPS_PER_EPOCH,)),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    few = TensorDataset(*(tensor[: BATCH * EVAL_STEPS] for tensor in data.tensors))
    return net, optimizer, *(DataLoader(d, batch_size=BATCH, shuffle=True) for d in (data, few))


def single_batches(number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches that a round takes one by one."""
    for index in range(SINGLE_STEPS):
        generator = torch.Generator().manual_seed(number * SINGLE_STEPS + index)
        yield (
            torch.randn(BATCH, FEATURES, generator=generator),
            torch.randint(0, CLASSES, (BATCH,), generator=generator),
        )


def plain(rounds: int) -> None:
    """The reference: ordinary PyTorch."""
    net, optimizer, loader, few = made()
    chain = Chain()

    def step(inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        net.train()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for number in range(rounds):
        for batch in loader:
            chain.add(step(*batch))
        net.eval()
        correct = 0
        with torch.no_grad():
            for inputs, target in few:
                correct += int((net(inputs).argmax(1) == target).sum())
        say("round", number, chain.count, chain.text, correct / (BATCH * EVAL_STEPS))
        say("steps", number, *(digest(step(*batch)) for batch in single_batches(number)))
    say("state", digest([dict(net.state_dict()), optimizer.state_dict(), torch.get_rng_state()]))


def split(arguments: argparse.Namespace) -> None:
    """The same by graphsplit, each step not before its time."""
    import graphsplit as gs

    class Losses(gs.callbacks.Callback):
        """Goes back with the job: its state is that of the last snapshot then."""

        def __init__(self) -> None:
            self.chain = Chain()

        def state_dict(self) -> dict[str, Any]:
            return vars(self.chain)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            vars(self.chain).update(state)

        def on_step_end(self, context: gs.callbacks.RunContext) -> None:
            assert context.loss is not None
            self.chain.add(context.loss)
            if context.rank == 0:  # the others wait for it, inside graphsplit
                due = arguments.begins + self.chain.count * arguments.interval
                time.sleep(min(1.0, max(0.0, due - time.time())))

    gs.init()
    net, optimizer, loader, few = made()
    for index, name in enumerate(PARTS):
        net.get_submodule(name).place("MS_WORKER", index % gs.get_world_size())
    metrics = {"Accuracy": gs.metrics.Accuracy()}
    model = gs.Model(net, nn.CrossEntropyLoss(), optimizer, metrics)
    losses = Losses()
    for number in range(arguments.rounds):
        model.train(1, loader, [losses])
        accuracy = model.eval(few)["Accuracy"]
        say("round", number, losses.chain.count, losses.chain.text, accuracy)
        say("steps", number, *(digest(model.train_step(*b)) for b in single_batches(number)))
    say("state", digest([model.state_dict(), model.optimizer_state_dict(), torch.get_rng_state()]))


def main() -> None:
    """Read the command line."""
    made_parser = argparse.ArgumentParser(description=__doc__)
    made_parser.add_argument("mode", choices=("plain", "split"))
    made_parser.add_argument("--rounds", type=int, required=True)
    made_parser.add_argument("--begins", type=float, default=0.0, help="the time of the first step")
    made_parser.add_argument("--interval", type=float, default=0.0, help="seconds of a step")
    arguments = made_parser.parse_args()
    plain(arguments.rounds) if arguments.mode == "plain" else split(arguments)


if __name__ == "__main__":
    main()
