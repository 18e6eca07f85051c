"""A step's outputs, in the network's own structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from graphsplit.batches.batch import Arguments, split_batch
from graphsplit.capture.graph import CapturedGraph, NodeKind
from graphsplit.checkpoint.other_loaders import OtherLoaders


@dataclass(frozen=True)
class Predicting:
    """What ``Model.predict`` gives, for one input or for a whole loader.

    Attributes:
        predict: Runs the network once.
        others: Remembers what loaders remember.
        has_loss_fn: Whether batches end in a target.
    """

    predict: Callable[[Arguments], Any]
    others: OtherLoaders
    has_loss_fn: bool

    def outputs(self, arguments: Arguments) -> Any:
        """The outputs; a list of each batch's where the arguments are a loader."""
        args, kwargs = arguments
        if len(args) != 1 or kwargs or not isinstance(args[0], (DataLoader, Iterator)):
            return self.predict(arguments)
        self.others.begin(args[0])
        outputs = [self.predict(self._inputs(batch)) for batch in args[0]]
        self.others.end(args[0])
        return outputs

    def _inputs(self, batch: Any) -> Arguments:
        args, kwargs = split_batch(batch, has_loss_fn=self.has_loss_fn)
        return (args[:-1] if self.has_loss_fn else args), kwargs


def unflatten_outputs(
    graph: CapturedGraph,
    values: dict[int, torch.Tensor],
    inputs: list[Any],
    numbers: Mapping[str, Any] | None = None,
) -> Any:
    """The outputs of a step in the network's own structure."""
    leaves: list[Any] = []
    for output in graph.outputs:
        if output.node is None:
            leaves.append(output.constant)
            continue
        node = graph.nodes[output.node]
        if node.kind is NodeKind.INPUT:
            leaves.append(inputs[int(node.target)])
        elif node.kind is NodeKind.CONSTANT:
            leaves.append(graph.constants[node.name])
        elif node.kind is NodeKind.NUMBER:
            leaves.append((numbers or {})[node.name])
        else:
            leaves.append(values[output.node])
    return graph.output_spec.rebuild(leaves)
