"""Placements of single operations, drawn at random.

    first, *others = scattered(Captures(), [(seed, 3) for seed in range(10)])
    assert_same_bits(make_network, batches, loss_fn=loss_fn, **first, beside=others)

The network is captured once, and trained once in the plain loop, whatever the number of placements.

Nobody places a model like that; what keeps its bits even so keeps them under any placement.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from typing import Any

from graphsplit.batches.signature import Signature
from graphsplit.capture.graph import CapturedGraph, Mode, NodeKind
from graphsplit.guards.places import Place
from graphsplit.marks.annotations import Annotation
from graphsplit.planning.task import Task
from simulated.simulate import Captures


class Scattered(Captures):
    """Puts every operation on a worker of its own choice, the same in every run.

    The style of a placement depends on its seed too: each operation for itself, runs of
    operations, or round and round.

    Args:
        base: Where the graphs come from.
        seed: The seed of the placement.
        num_workers: Size of the cluster.
    """

    def __init__(self, base: Captures, *, seed: int, num_workers: int) -> None:
        super().__init__()
        self._base = base
        self._seed = seed
        self._num_workers = num_workers

    def graph(
        self, task: Task, mode: Mode, signature: Signature, lift: tuple[Place, ...] = ()
    ) -> CapturedGraph:
        """The graph of a task's step, with a worker written on every operation."""
        captured = self._base.graph(task, mode, signature, lift)
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
        return dataclasses.replace(captured, nodes=tuple(nodes))


def scattered(base: Captures, placements: Iterable[tuple[int, int]]) -> list[dict[str, Any]]:
    """The options of a cluster for each placement.

    Args:
        base: Where the graphs come from.
        placements: The seed of each, and its number of workers.
    """
    return [
        {
            "num_workers": num_workers,
            "captures": Scattered(base, seed=seed, num_workers=num_workers),
            "name": f"placement {seed} over {num_workers} workers",
        }
        for seed, num_workers in placements
    ]
