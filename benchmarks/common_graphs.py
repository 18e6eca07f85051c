"""Captured graphs of any size, made without a network: for tests and benchmarks of planning.

    graph = layered_graph(20_000)
    placed = by_layer(graph, num_workers=64, num_cuts=200)
    plan = partition(placed)

They hold what real networks hold: two towers that meet again, skips over one layer and over many,
parameters that every thirtieth layer shares, dropout, operations that return a tuple, masks made of
inputs alone, attention to one value that every layer of a tower reads, and elementwise uses.
"""

from __future__ import annotations

import random

import torch
from torch import nn

from graphsplit.capture.graph import CapturedGraph, Mode, Node, NodeKind, Output
from graphsplit.capture.structure import take_apart
from graphsplit.marks.annotations import Annotation
from graphsplit.placement.resolve import EVERYWHERE, PlacedGraph, PlacementRules, resolve
from graphsplit.tensor_meta import TensorMeta

OPERATIONS_PER_LAYER = 10
_ACTIVATION = TensorMeta(torch.float32, (32, 128, 256), (32768, 256, 1))
_WEIGHT = TensorMeta(torch.float32, (256, 256), (256, 1))
_MASK = TensorMeta(torch.bool, (128, 128), (128, 1))
_SCALAR = TensorMeta(torch.float32, (), ())


def layered_graph(num_operations: int) -> CapturedGraph:
    """The train graph of a network with about so many operations, ten to a layer."""
    layers = max(1, num_operations // OPERATIONS_PER_LAYER)
    builder = _Builder()
    for index in range(layers):
        builder.add_layer(index)
    return builder.finish()


def by_layer(graph: CapturedGraph, *, num_workers: int, num_cuts: int) -> PlacedGraph:
    """Consecutive layers on one worker, then on the next, round and round: ``num_cuts`` changes."""
    paths = [node.module_path.split(".")[:2] for node in graph.nodes]
    layers = list(dict.fromkeys(".".join(path) for path in paths if path[0] == "layers"))
    modules = {"": Annotation(0, "the rest")}
    for index, path in enumerate(layers):
        run = index * (num_cuts + 1) // len(layers)
        modules[path] = Annotation(run % num_workers, "by layer")
    return resolve(graph, PlacementRules(num_workers, modules))


def at_random(graph: CapturedGraph, *, num_workers: int, seed: int = 0) -> PlacedGraph:
    """Every operation, parameter and buffer on a worker of its own choice."""
    choices = random.Random(seed)
    workers: list[int] = []
    for node in graph.nodes:
        if node.is_everywhere:
            workers.append(EVERYWHERE)
        elif node.with_producer:
            workers.append(workers[node.reads[0]])
        else:
            workers.append(choices.randrange(num_workers))
    return PlacedGraph(graph, tuple(workers), ("at random",) * len(workers), num_workers)


class _Builder:
    """Collects the nodes of a network, layer by layer."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.inputs = [self._input(0, _ACTIVATION), self._input(1, _MASK)]
        self.shared = [self._parameter(f"shared.{i}") for i in range(3)]
        self.towers = list(self.inputs[:1] * 2)  # where each tower stands
        self.made: list[int] = []  # the results of all layers
        self.memory = self._operation("embed", (self.inputs[0], self.shared[0]), "embed")

    def finish(self) -> CapturedGraph:
        loss = self._operation("loss", tuple(self.towers), "", meta=_SCALAR)
        return CapturedGraph(
            mode=Mode.TRAIN,
            nodes=tuple(self.nodes),
            fx_graph=torch.fx.Graph(),
            fx_owner=nn.Module(),
            constants={},
            outputs=(Output(loss),),
            output_spec=take_apart(0)[1],
            loss=0,
            state_names={p: (n.target,) for p, n in enumerate(self.nodes) if n.is_state},
        )

    def add_layer(self, index: int) -> None:
        """Ten operations, in one of the two towers or, every twentieth time, in both."""
        path = f"layers.{index}"
        tower = index % 2
        start = self.towers[tower]
        weight = self.shared[index // 30 % 3] if index % 30 == 0 else self._parameter(f"{path}.w")
        normed = self._operation("norm", (start, self._parameter(f"{path}.norm.g")), f"{path}.norm")
        pair = self._operation("split", (normed,), path, meta=None)
        left, right = (self._element(pair, k, path) for k in range(2))
        mask = self._operation("logical_not", (self.inputs[1],), path, meta=_MASK)
        reads = (left, self.memory, mask) if index % 3 == 0 else (left, right, mask)
        mixed = self._operation("attention", reads, path, repeated=reads[:1])
        turned = self._operation("transpose", (weight,), path, meta=_WEIGHT)
        linear = self._operation("mm", (mixed, turned), f"{path}.fc", is_random=False)
        dropped = self._operation("dropout", (linear,), path, is_random=index % 5 == 0)
        skipped = self.made[-16] if len(self.made) >= 16 and index % 8 == 0 else right
        both = (self.towers[0], self.towers[1]) if index % 20 == 19 else (start, skipped)
        result = self._operation("add", (dropped, *both), path)
        self.made.append(result)
        self.towers[tower] = result

    def _input(self, index: int, meta: TensorMeta) -> int:
        self.nodes.append(Node(f"input_{index}", NodeKind.INPUT, str(index), meta=meta))
        return len(self.nodes) - 1

    def _parameter(self, name: str) -> int:
        self.nodes.append(
            Node(
                f"p_{name.replace('.', '_')}",
                NodeKind.PARAMETER,
                name,
                meta=_WEIGHT,
                module_path=name.rpartition(".")[0],
                requires_grad=True,
                asks_grad=True,
            )
        )
        return len(self.nodes) - 1

    def _element(self, pair: int, index: int, path: str) -> int:
        return self._operation("getitem", (pair,), path, with_producer=True, index=index)

    def _operation(
        self,
        name: str,
        reads: tuple[int, ...],
        path: str,
        *,
        meta: TensorMeta | None = _ACTIVATION,
        is_random: bool = False,
        with_producer: bool = False,
        repeated: tuple[int, ...] = (),
        index: int | None = None,
    ) -> int:
        position = len(self.nodes)
        has_grad = any(self.nodes[r].requires_grad for r in reads)
        operands = ", ".join(f"%{r}" for r in reads)
        self.nodes.append(
            Node(
                f"{name}_{position}",
                NodeKind.OPERATION,
                name if with_producer else f"aten.{name}.default",
                reads=reads,
                meta=meta,
                module_path=path,
                source=f"network.py:{len(name)}",
                is_random=is_random,
                with_producer=with_producer,
                requires_grad=has_grad,
                asks_grad=has_grad,
                repeated=tuple(r for r in repeated if has_grad and self.nodes[r].requires_grad),
                arguments=operands if index is None else f"{operands}, {index}",
            )
        )
        return position
