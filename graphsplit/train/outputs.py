"""A step's outputs, in the network's own structure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphsplit.capture.graph import CapturedGraph, NodeKind


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
