"""Run under the launcher on five workers: every scenario, against a plain loop on every worker.

Prints ``same bits: NAME`` once a scenario holds on this worker. The plain loop knows nothing of
graphsplit; its losses, parameters, buffers, optimizer state and generator state are compared after
training, then eval and predict, then after further training.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import graphsplit as gs

sys.path.insert(0, str(Path(__file__).parent))
from nets import Fan, LeNet, Wide

DECODED: list[int] = []  # in this process; what a data set itself counts, all workers are told


class Counted(Dataset):
    """Random samples, made anew for each index; notes which were asked for here."""

    def __init__(self, shape: tuple[int, ...], size: int) -> None:
        self.shape, self.size = shape, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        DECODED.append(index)
        generator = torch.Generator().manual_seed(index)
        value = torch.randn(self.shape, generator=generator)
        return value, torch.randint(0, 10, (), generator=generator)


@dataclass
class Scenario:
    """One network, placed one way."""

    name: str
    make: Callable[[], nn.Module]
    placement: dict[str, int | list[int]]
    shape: tuple[int, ...]
    unplaced: str = "affinity"
    size: int = 20
    batch: int = 8
    readers: set[int] | None = None
    deferred: bool = False
    microbatches: int = 1
    gradient_order: str = "left"
    max_norm: float | None = None
    scaled: bool = False
    keeps_readers: bool = False  # processes of the loader that live from epoch to epoch
    optimizer: Callable[[Any], torch.optim.Optimizer] = field(
        default=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    )


@dataclass
class State:
    """What is compared."""

    losses: list[torch.Tensor]
    accuracy: float
    output: torch.Tensor
    network: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    generator: torch.Tensor
    norm: torch.Tensor | None
    scale: float


def scaler_of(scenario: Scenario) -> torch.amp.GradScaler:
    """Scales the loss; if it is switched off it does nothing."""
    return torch.amp.GradScaler(
        "cpu", init_scale=2.0**10, growth_interval=2, enabled=scenario.scaled
    )


def loader(scenario: Scenario) -> tuple[DataLoader, Counted]:
    data = Counted(scenario.shape, scenario.size)
    options: dict[str, Any] = {}
    if scenario.keeps_readers:
        options = {"num_workers": 1, "persistent_workers": True}
    return DataLoader(data, batch_size=scenario.batch, shuffle=True, **options), data


def plain(scenario: Scenario) -> State:
    """The reference: ordinary PyTorch."""
    torch.manual_seed(3)
    net = scenario.make()
    optimizer, loss_fn = scenario.optimizer(net.parameters()), nn.CrossEntropyLoss()
    batches, _ = loader(scenario)
    losses, norms, scaler = [], [], scaler_of(scenario)

    def train() -> None:
        net.train()
        for inputs, target in batches:
            optimizer.zero_grad()
            if scenario.microbatches > 1:
                losses.append(accumulated(scenario, net, inputs, target, len(losses)))
            else:
                loss = loss_fn(net(inputs), target)
                scaler.scale(loss).backward()
                losses.append(loss.detach())
            scaler.unscale_(optimizer)
            if scenario.max_norm is not None:
                norms.append(nn.utils.clip_grad_norm_(net.parameters(), scenario.max_norm))
            scaler.step(optimizer)
            scaler.update()

    train()
    net.eval()
    correct = total = 0
    with torch.no_grad():
        for inputs, target in batches:
            correct += int((net(inputs).argmax(1) == target).sum())
            total += target.numel()
        output = net(torch.ones(3, *scenario.shape))
    train()
    return State(
        losses,
        correct / total,
        output,
        net.state_dict(),
        optimizer.state_dict(),
        torch.get_rng_state(),
        norms[-1] if norms else None,
        scaler.get_scale(),
    )


def accumulated(
    scenario: Scenario, net: nn.Module, inputs: torch.Tensor, target: torch.Tensor, step: int
) -> torch.Tensor:
    """The loop that the documents print for several microbatches."""
    before, losses = torch.get_rng_state(), []
    microbatches = gs.split_microbatches((inputs, target), scenario.microbatches)
    parameters, parts = list(net.parameters()), []
    for m, ((some_inputs, some_target), weight) in enumerate(microbatches):
        torch.set_rng_state(gs.microbatch_rng_state(3, step, m))
        loss = nn.functional.cross_entropy(net(some_inputs), some_target)
        (loss * weight).backward()
        losses.append(loss.detach() * weight)
        if scenario.gradient_order == "pairs":
            parts.append([parameter.grad for parameter in parameters])
            net.zero_grad()
    for parameter, own in zip(parameters, zip(*parts, strict=True), strict=bool(parts)):
        parameter.grad = tree(own, 0, 8)
    torch.set_rng_state(before)
    return sum(losses)


def tree(parts: tuple[torch.Tensor, ...], first: int, size: int) -> torch.Tensor | None:
    """The sum of up to 8 parts in pairs."""
    if size == 1:
        return parts[first] if first < len(parts) else None
    one, other = (tree(parts, start, size // 2) for start in (first, first + size // 2))
    return one if other is None else one + other


class Losses(gs.callbacks.Callback):
    """Keeps every loss."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_step_end(self, context: gs.callbacks.RunContext) -> None:
        self.seen.append(context.loss)


def split(scenario: Scenario) -> tuple[State, int]:
    """The same through a Model; and how many samples this worker decoded."""
    torch.manual_seed(3)
    if scenario.deferred:
        with gs.deferred_init():
            net = scenario.make()
    else:
        net = scenario.make()
    for name, rank in scenario.placement.items():
        net.get_submodule(name).place("MS_WORKER", rank)
    scaler = scaler_of(scenario)
    clip = None if scenario.max_norm is None else gs.clip.GlobalNorm(scenario.max_norm)
    model = gs.Model(net, nn.CrossEntropyLoss(), scenario.optimizer(net.parameters()),
                     {"Accuracy": gs.metrics.Accuracy()}, unplaced=scenario.unplaced,
                     microbatches=scenario.microbatches, scaler=scaler,
                     gradient_order=scenario.gradient_order,
                     clip=clip)  # fmt: skip
    batches, _ = loader(scenario)
    keep = Losses()
    DECODED.clear()
    model.train(1, batches, [keep])
    decoded = len(DECODED)
    accuracy = model.eval(batches)["Accuracy"]
    output = model.predict(torch.ones(3, *scenario.shape))
    model.train(1, batches, [keep])
    network = model.state_dict()
    optimizer = model.optimizer_state_dict()
    return State(keep.seen, accuracy, output, network, optimizer, torch.get_rng_state(),
                 model.last_gradient_norm, scaler.get_scale()), decoded  # fmt: skip


def equal(name: str, mine: Any, reference: Any) -> None:
    """Compare anything, tensors by ``torch.equal``."""
    if isinstance(reference, torch.Tensor):
        assert mine.dtype == reference.dtype and torch.equal(mine, reference), name
    elif isinstance(reference, dict):
        assert list(mine) == list(reference), (name, list(mine), list(reference))
        for key in reference:
            equal(f"{name}.{key}", mine[key], reference[key])
    elif isinstance(reference, (list, tuple)):
        assert len(mine) == len(reference), name
        for index, (one, other) in enumerate(zip(mine, reference, strict=True)):
            equal(f"{name}[{index}]", one, other)
    else:
        assert mine == reference, (name, mine, reference)


def check(scenario: Scenario) -> None:
    """Run one scenario both ways."""
    reference = plain(scenario)
    mine, decoded = split(scenario)
    for attribute in State.__dataclass_fields__:
        equal(f"{scenario.name}: {attribute}", getattr(mine, attribute),
              getattr(reference, attribute))  # fmt: skip
    if scenario.readers is not None:
        expected = scenario.size if gs.get_rank() in scenario.readers else 0
        assert decoded == expected, (scenario.name, decoded, expected)
    print("same bits:", scenario.name, flush=True)


LAYERS = ("conv1", "conv2", "fc1", "fc2", "fc3")
MAIN = {"fc1": 0, "fc2": 1, "fc3": 2, "conv1": 3, "conv2": 4}


def scenarios() -> list[Scenario]:
    """Everything that is tried."""
    image = (1, 32, 32)
    found = [
        Scenario("LeNet as in the example", LeNet, MAIN, image, readers={2, 3}),
        Scenario("LeNet, unplaced to worker 0", LeNet, MAIN, image, unplaced="worker0"),
        Scenario("LeNet, built deferred", LeNet, MAIN, image, deferred=True, size=16),
        Scenario("LeNet by Adam", LeNet, MAIN, image, size=16, keeps_readers=True,
                 optimizer=lambda p: torch.optim.AdamW(p, lr=0.01)),
        Scenario("LeNet on one worker of five", LeNet, {"": 2}, image, size=16, readers={2}),
        Scenario("nothing placed", LeNet, {}, image, size=16),
        Scenario("residual, fan-out, back and forth, late input, dropout", Fan,
                 {"stem": 0, "left": 1, "middle": 2, "right": 3, "back": 0, "head": 4}, (12,)),
        Scenario("the same, unplaced to worker 0", Fan,
                 {"stem": 4, "left": 1, "middle": 2, "right": 3, "back": 0, "head": 4}, (12,),
                 unplaced="worker0"),
        Scenario("LeNet in 4 microbatches", LeNet, MAIN, image, readers={2, 3}, microbatches=4),
        Scenario("dropout and the rest in 4 microbatches, the last batch ragged", Fan,
                 {"stem": 0, "left": 1, "middle": 2, "right": 3, "back": 0, "head": 4}, (12,),
                 size=34, batch=12, microbatches=4),
        Scenario("LeNet shared by 2 and by 3 replicas", LeNet,
                 {"": [0, 1], "fc1": [2, 3, 4]}, image, microbatches=4, readers={0, 1},
                 optimizer=lambda p: torch.optim.Adam(p, lr=0.01)),
        Scenario("LeNet in replicas, added in pairs", LeNet, {"": [0, 1, 2, 3, 4], "fc3": 1}, image,
                 microbatches=7, gradient_order="pairs"),
        Scenario("LeNet, clipped and scaled", LeNet, MAIN, image, max_norm=0.5, scaled=True),
        Scenario("a value of 64 MiB", Wide, {"spread": 1, "gather": 3}, (16,), size=8, batch=8),
    ]  # fmt: skip
    permutations = list(itertools.permutations(range(5)))
    for number, ranks in enumerate(permutations[7::60]):
        unplaced = ("affinity", "worker0")[number % 2]
        placement = dict(zip(LAYERS, ranks, strict=True))
        found.append(
            Scenario(f"LeNet {ranks} {unplaced}", LeNet, placement, image, unplaced, size=16)
        )
    for ranks in ((0, 1, 0, 1, 0), (4, 0, 4, 0, 4)):
        placement = dict(zip(LAYERS, ranks, strict=True))
        found.append(Scenario(f"LeNet back and forth {ranks}", LeNet, placement, image, size=16))
    return found


if __name__ == "__main__":
    gs.init()
    for one in scenarios():
        if any(part in one.name for part in sys.argv[1:] or [""]):
            check(one)
