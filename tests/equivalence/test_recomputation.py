"""What backward runs again has the bits of the first time, and is not kept in between."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence_helpers import (
    assert_same_wherever_placed,
    batches_of,
    rows_against_target,
    splitting_all,
)
from simulated.equivalence import assert_same_bits
from simulated.simulate import Captures, SimulatedCluster
from test_microbatches import Changing, Counting, Everything, placed
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphsplit as gs
from graphsplit.capture.graph import Mode
from graphsplit.errors import CaptureError, PlacementError, StepFailedError
from graphsplit.planning.task import Task


@pytest.fixture(autouse=True)
def _split_all() -> Iterator[None]:
    with splitting_all():
        yield


@pytest.mark.parametrize(
    ("microbatches", "schedule"), [(1, "1f1b"), (4, "1f1b"), (4, "zero_bubble")]
)
def test_everything_wherever_placed(microbatches: int, schedule: str) -> None:
    """Branches, skips, shared weights, dropout on several workers, batch normalisation."""
    assert_same_wherever_placed(
        Everything,
        batches_of(8, 6, 6),
        microbatches=microbatches,
        placements=range(4),
        schedule=schedule,
        recompute=True,
    )


class Block(nn.Module):
    """A residual layer with dropout and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.BatchNorm1d(6), nn.Linear(6, 12), nn.Linear(12, 6)
        self.drop, self.relu = nn.Dropout(0.2), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.second(self.relu(self.first(self.norm(x)))))


class Blocks(nn.Module):
    """A chain of layers; which of them are checkpoints of its own can be chosen."""

    def __init__(self, checkpoints: str = "") -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if str(index) in self.checkpoints:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x.tanh()


def blocks(network: Any, **options: Any) -> SimulatedCluster:
    ranks = {"blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1}
    return assert_same_bits(
        network,
        batches_of(8, 6),
        num_workers=2,
        loss_fn=rows_against_target,
        place=placed(**ranks),
        **options,
    )


def num_groups(cluster: SimulatedCluster) -> int:
    planned = cluster.latest(Mode.TRAIN)
    assert planned is not None
    return sum(len(groups) for groups in planned.plan.recomputed.values())


@pytest.mark.parametrize("microbatches", [1, 4])
def test_modules_are_run_again_one_by_one(microbatches: int) -> None:
    paths = ("blocks.0", "blocks.1", "blocks.3")
    cluster = blocks(
        Blocks, microbatches=microbatches, recompute=paths, schedule="zero_bubble", accumulate=2
    )
    assert num_groups(cluster) == 3


def test_checkpoints_of_the_network_itself_modify_buffers_twice_as_in_eager_mode() -> None:
    assert num_groups(blocks(lambda: Blocks("013"))) == 3
    assert num_groups(blocks(lambda: Blocks("03"), recompute=True)) == 5


def test_with_microbatches_a_checkpoint_that_modifies_a_buffer_is_refused() -> None:
    message = (
        r"batch_norm \(aten.batch_norm.default\) modifies 'blocks.0.norm.running_mean' inside "
        r"torch.utils.checkpoint.*\n.*\n  Fix: leave torch.utils.checkpoint out, and ask"
    )
    with pytest.raises(PlacementError, match=message):
        blocks(lambda: Blocks("0"), microbatches=4)


def test_checkpoints_of_the_network_itself_are_run_again() -> None:
    def make() -> nn.Module:
        network = Blocks("013")
        for block in network.blocks:
            block.norm = nn.LayerNorm(6)
        return network

    assert num_groups(blocks(make, microbatches=4, schedule="zero_bubble")) == 3


def test_nothing_is_run_again_without_being_asked_for() -> None:
    assert num_groups(blocks(Blocks)) == 0


def test_mixed_precision() -> None:
    cluster = blocks(Blocks, recompute=("blocks.0", "blocks.2"), autocast=torch.bfloat16)
    assert num_groups(cluster) == 2
    blocks(Blocks, recompute=True, autocast=torch.bfloat16, microbatches=2)


class Words(nn.Module):
    """A parameter that forward scales down, without autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(6, 8, max_norm=1.0), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x[:, 0].abs() * 2).long() % 6
        return self.second(torch.tanh(self.first(words))) + x


class Noisy(nn.Module):
    """The last operation of a part saves memory first, and fills it later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(6, 6), nn.RReLU()), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize(
    ("network", "microbatches"),
    [(Counting, 4), (Changing, 4), (Words, 1), (Words, 2), (Noisy, 1), (Noisy, 2)],
)
def test_what_changes_is_as_it_was_when_it_is_run_again(network: Any, microbatches: int) -> None:
    for ranks in ((0, 1), (0, 0)):
        assert_same_bits(
            network,
            batches_of(8, 6),
            num_workers=2,
            loss_fn=rows_against_target,
            place=placed(first=ranks[0], second=ranks[1]),
            microbatches=microbatches,
            recompute=True,
        )


class Overwriting(nn.Module):
    """What goes into the second module is modified once that has run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.third = nn.Sequential(nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x)
        half = made * 0.5
        result = self.third(half.detach() + made) + F.relu(half + 1)
        half.mul_(3)
        return result * self.second(made)


def test_a_module_whose_input_is_modified_later_is_not_run_again() -> None:
    cluster = assert_same_bits(
        Overwriting,
        batches_of(8, 6),
        num_workers=2,
        loss_fn=rows_against_target,
        place=placed(first=0, second=0, third=0),
        recompute=True,
    )
    assert num_groups(cluster) == 1
    assert_same_wherever_placed(
        Overwriting, batches_of(8, 6), recompute=("second", "third"), microbatches=2
    )


class Watch(torch.autograd.Function):
    """Notes what it saves for backward."""

    kept: list[weakref.ref[torch.Tensor]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        saved = x * 2
        ctx.save_for_backward(saved)
        Watch.kept.append(weakref.ref(saved))
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (saved,) = ctx.saved_tensors
        return gradients[0] * torch.ones_like(saved)


class Watching(nn.Module):
    """Three layers, each with something that is saved."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:

            def run(x: torch.Tensor, layer: nn.Module = layer) -> torch.Tensor:
                return Watch.apply(torch.tanh(layer(x)))

            x = checkpoint(run, x, use_reentrant=False) if self.checkpoints else run(x)
        return x


@pytest.mark.parametrize("how", ["kept", "everything", "checkpoints"])
def test_what_is_run_again_is_not_kept(how: str) -> None:
    def make_task() -> Task:
        torch.manual_seed(0)
        net = Watching(checkpoints=how == "checkpoints")
        return Task(
            net,
            rows_against_target,
            torch.optim.SGD(net.parameters(), lr=0.1),
            "affinity",
            with_loss=False,
            recompute=how == "everything",
        )

    gs.ignore(Watch, "kept")
    cluster = SimulatedCluster(make_task, 1, captures=Captures())
    cluster.train_step((batches_of(4, 6)[0], {}))
    planned = cluster.workers[0].planner.latest(Mode.TRAIN)
    assert planned is not None
    alive: list[int] = []

    def looking(position: int, action: Any) -> Any:
        def run(state: Any) -> None:
            action(state)
            alive.append(sum(ref() is not None for ref in Watch.kept))

        return run

    planned.runner.watch(looking)
    Watch.kept.clear()
    cluster.train_step((batches_of(4, 6)[0], {}))
    assert max(alive) == (3 if how == "kept" else 0)
    assert alive[-1] == 0
    # A checkpoint of the network's own runs its code once more, in eager mode too.
    assert len(Watch.kept) == (6 if how == "checkpoints" else 3)


def test_an_operation_that_fails_inside_is_named() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.last = nn.Embedding(4, 6), nn.Linear(6, 6)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.last(self.embedding(ids)))

    def make_task() -> Task:
        net = Failing()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return Task(net, rows_against_target, optimizer, "affinity", False, recompute=True)

    cluster = SimulatedCluster(make_task, 1, captures=Captures())
    batch = (torch.full((3, 2), 9), torch.zeros(3))
    with pytest.raises(StepFailedError, match=r"operation embedding = aten.embedding"):
        cluster.train_step((batch, {}))


FACTOR = 1.0


def factored(h: torch.Tensor) -> torch.Tensor:
    return h * FACTOR


class FactorChangedAfterCheckpoint(nn.Module):
    """One function reads a global before the checkpoint, and inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global FACTOR
        made: torch.Tensor = checkpoint(factored, factored(self.layer(x)), use_reentrant=False)
        FACTOR += 1.0
        return made


def test_a_global_that_was_read_before_a_checkpoint_is_read_in_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    with pytest.raises(CaptureError, match=r"FACTOR is read inside, and changed after"):
        assert_same_bits(
            FactorChangedAfterCheckpoint,
            batches_of(4, 3),
            num_workers=1,
            loss_fn=rows_against_target,
        )


def asked_by_name(h: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    return h * getattr(layer, "factor") if hasattr(layer, "factor") else h  # noqa: B009


def test_code_in_a_checkpoint_may_be_the_first_that_asks_by_names() -> None:
    """As attention in transformers, under gradient_checkpointing=True."""

    class AsksInCheckpoint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)
            self.layer.factor = 2.0  # type: ignore[assignment]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = checkpoint(
                asked_by_name, self.layer(x), self.layer, use_reentrant=False
            )
            return made

    assert_same_bits(AsksInCheckpoint, batches_of(4, 3), num_workers=1, loss_fn=rows_against_target)


class CountingInCheckpoint(nn.Module):
    """A counter that a checkpoint's code changes, or reads before forward changes it."""

    def __init__(self, changes: str, use_reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.changes, self.use_reentrant = changes, use_reentrant
        self.count = 0

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        self.count += self.changes == "inside"
        return torch.tanh(h * (1 + 0.1 * self.count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += self.changes == "before"
        h = self.layer(x)
        made: torch.Tensor = checkpoint(self.scaled, h, use_reentrant=self.use_reentrant)
        self.count += self.changes == "after"
        return made


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("changes", ["before", "inside", "after"])
def test_a_counter_counts_in_checkpoints_as_in_eager_mode_or_is_refused(
    changes: str, use_reentrant: bool
) -> None:
    def run() -> None:
        assert_same_bits(
            lambda: CountingInCheckpoint(changes, use_reentrant),
            batches_of(4, 3),
            num_workers=1,
            loss_fn=rows_against_target,
        )

    if changes == "before":
        run()
        return
    with pytest.raises(CaptureError, match=r"count is .* torch\.utils\.checkpoint[\s\S]*\.py:\d+"):
        run()
