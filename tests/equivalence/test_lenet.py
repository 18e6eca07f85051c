"""LeNet, cut in every way that its five layers allow."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures
from torch import nn

from graphsplit.placement.resolve import UnplacedRule

LAYERS = ("conv1", "conv2", "fc1", "fc2", "fc3")
_captures = Captures()


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.pool(self.relu(self.conv1(x)))
        x = self.pool(self.relu(self.conv2(x))).flatten(1)
        return self.fc3(self.relu(self.fc2(self.relu(self.fc1(x)))))


def images(*sizes: int) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(size, 1, 32, 32, generator=generator),
            torch.randint(0, 10, (size,), generator=generator),
        )
        for size in sizes
    ]


def some_placements() -> list[tuple[int, ...]]:
    """Over one to five workers: all permutations if asked for, else some of each size."""
    found: list[tuple[int, ...]] = []
    for num_workers in range(1, 6):
        every = [
            ranks
            for ranks in itertools.product(range(num_workers), repeat=5)
            if len(set(ranks)) == num_workers
        ]
        if num_workers == 5 and os.environ.get("GS_TEST_LONG"):
            found += every
        else:
            found += random.Random(num_workers).sample(every, min(3, len(every)))
    return found


def assert_lenet(
    ranks: Sequence[int], batches: list[Any], unplaced: UnplacedRule, **options: Any
) -> None:
    def place(network: nn.Module) -> None:
        for name, rank in zip(LAYERS, ranks, strict=True):
            network.get_submodule(name).place("MS_WORKER", rank)

    assert_same_bits(
        LeNet,
        batches,
        num_workers=max(ranks) + 1,
        place=place,
        loss_fn=nn.CrossEntropyLoss(),
        unplaced=unplaced,
        captures=_captures,
        **options,
    )


@pytest.mark.parametrize("unplaced", ["affinity", "worker0"])
@pytest.mark.parametrize("ranks", some_placements(), ids=str)
def test_any_permutation_of_layers_trains_like_one_process(
    ranks: tuple[int, ...], unplaced: UnplacedRule
) -> None:
    assert_lenet(ranks, images(4, 4), unplaced)


def test_a_short_last_batch_trains_like_one_process() -> None:
    assert_lenet((3, 4, 0, 1, 2), images(4, 4, 3, 4, 4, 3), "affinity")


def test_eval_between_steps_of_training_changes_nothing() -> None:
    assert_lenet((3, 4, 0, 1, 2), images(4, 4, 4), "affinity", evaluate_after=(0, 2))


def test_workers_that_plan_by_themselves_make_equal_plans() -> None:
    def place(network: nn.Module) -> None:
        network.get_submodule("fc1").place("MS_WORKER", 1)

    assert_same_bits(
        LeNet,
        images(4),
        num_workers=2,
        place=place,
        loss_fn=nn.CrossEntropyLoss(),
        plan_everywhere=True,
    )


def test_a_worker_without_any_operation_stays_in_step() -> None:
    def place(network: nn.Module) -> None:
        network.place("MS_WORKER", 1)

    assert_same_bits(LeNet, images(4), num_workers=4, place=place, loss_fn=nn.CrossEntropyLoss())
