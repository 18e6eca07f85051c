"""Results of a step beside its loss, in the network's own structure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from graphsplit.batches.signature import Arguments
from graphsplit.capture.graph import CapturedGraph, NodeKind
from graphsplit.planning.step_plan import total_loss
from graphsplit.train.shared_outputs import in_shared_memory


@dataclass(frozen=True)
class Beside:
    """Results of a training step beside its loss.

    Attributes:
        losses: The scalars that network or loss returned beside it, by name.
        outputs: What the network returned, if that was asked for; for each microbatch, if the batch
            was split.
    """

    losses: dict[str, torch.Tensor] = field(default_factory=dict)
    outputs: Any = None

    @classmethod
    def of(cls, found: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> Beside:
        """From what was found for each microbatch, whose loss counts by a weight.

        Args:
            found: ``losses``, and perhaps ``outputs``, of each; or of the whole batch.
            weights: Of each microbatch; empty where the batch is whole.
        """
        outputs = [one.get("outputs") for one in found]
        if not weights:
            return cls(found[0]["losses"], outputs[0])
        everywhere = [n for n in found[0]["losses"] if all(n in one["losses"] for one in found)]
        losses = {n: total_loss([one["losses"][n] for one in found], weights) for n in everywhere}
        return cls(losses, outputs if "outputs" in found[0] else None)


NOTHING = Beside()


def predicted_loader(arguments: Arguments) -> Any:
    """The loader that ``predict`` was given; None where it was given an input."""
    args, kwargs = arguments
    is_loader = len(args) == 1 and not kwargs and isinstance(args[0], (DataLoader, Iterator))
    return args[0] if is_loader else None


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
    parts = [output.part for output in graph.outputs]
    return graph.output_spec.rebuild(in_shared_memory(leaves, parts, inputs))
