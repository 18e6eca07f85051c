"""Batches, and placements of single operations, for comparing with the plain eager loop."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import networkx as nx
import torch
import torch.nn.functional as F
from torch import nn

from graphsplit.capture.graph import CapturedGraph, Mode, Node, NodeKind
from graphsplit.errors import PlacementError
from graphsplit.placement.annotations import Annotation
from graphsplit.testing.equivalence import assert_same_bits
from graphsplit.testing.simulate import Captures
from graphsplit.train.batch import Signature
from graphsplit.train.planner import Task

PLACEMENTS = range(6)


def batches_of(*shape: int, num: int = 2) -> list[Any]:
    """Random inputs, each with one random number per sample as its target."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(*shape, generator=generator), torch.randn(shape[0], generator=generator))
        for _ in range(num)
    ]


def rows_against_target(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss for outputs of any shape."""
    return F.mse_loss(outputs.flatten(1).sum(1), target)


class Scattered(Captures):
    """Puts every operation on a worker of its own choice, the same in every run.

    The style of a placement depends on its seed too: each operation for itself, runs of
    operations, or round and round. Operations that share memory which one of them modifies stay
    together, as graphsplit asks for.
    """

    def __init__(self, base: Captures, *, seed: int, num_workers: int) -> None:
        super().__init__()
        self._base = base
        self._seed = seed
        self._num_workers = num_workers

    def graph(self, task: Task, mode: Mode, signature: Signature) -> CapturedGraph:
        captured = self._base.graph(task, mode, signature)
        choices = random.Random(self._seed)
        style = choices.choice(["each", "runs", "round"])
        worker, nodes = 0, []
        for node in captured.nodes:
            if node.kind is NodeKind.OPERATION:
                if style == "round":
                    worker = (worker + 1) % self._num_workers
                elif style == "each" or choices.random() < 0.3:
                    worker = choices.randrange(self._num_workers)
                node = dataclasses.replace(node, annotation=Annotation(worker, "scattered"))
            nodes.append(node)
        _keep_shared_memory_together(nodes)
        return dataclasses.replace(captured, nodes=tuple(nodes))


def _keep_shared_memory_together(nodes: list[Node]) -> None:
    together: nx.Graph = nx.Graph()
    for position, node in enumerate(nodes):
        together.add_edges_from((position, shared) for shared, _ in node.shares_modified)
    for group in nx.connected_components(together):
        operations = sorted(p for p in group if nodes[p].kind is NodeKind.OPERATION)
        for position in operations[1:]:
            nodes[position] = dataclasses.replace(
                nodes[position], annotation=nodes[operations[0]].annotation
            )


def num_workers_of(seed: int) -> int:
    """How many workers a scattered placement uses."""
    return 1 if seed == 0 else random.Random(seed * 7 + 1).choice([2, 2, 3, 5])


def assert_same_wherever_placed(
    make_network: Callable[[], nn.Module],
    batches: Sequence[Any],
    *,
    placements: Iterable[int] = PLACEMENTS,
    loss_fn: Callable[..., Any] | None = rows_against_target,
    may_be_refused: bool = False,
    **options: Any,
) -> None:
    """Compare a network with the eager loop under several scattered placements.

    Args:
        make_network: Makes the network.
        batches: Its batches.
        placements: Seeds of the placements.
        loss_fn: Its loss.
        may_be_refused: Whether a placement may be refused because operations that share modified
            memory have others between them.
        options: Of ``assert_same_bits``.
    """
    base, num_refused = Captures(), 0
    seeds = list(placements)
    for seed in seeds:
        workers = num_workers_of(seed)
        try:
            assert_same_bits(
                make_network,
                batches,
                num_workers=workers,
                loss_fn=loss_fn,
                captures=Scattered(base, seed=seed, num_workers=workers),
                **options,
            )
        except AssertionError as error:
            raise AssertionError(f"placement {seed} over {workers} workers: {error}") from error
        except PlacementError:
            num_refused += 1
            if not may_be_refused:
                raise
    assert num_refused < len(seeds), "every placement was refused"
