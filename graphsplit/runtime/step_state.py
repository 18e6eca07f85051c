"""What one step holds while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

Gradient = torch.Tensor | None


@dataclass
class StepState:
    """What one step holds while it runs.

    Attributes:
        step: Number of the step in the job.
        inputs: Values of the graph's inputs, by position among the inputs; None where this worker
            does not consume them.
        values: For each microbatch, values of nodes made or received here.
        leaves: For each microbatch, the leaf of each contribution.
        roots: For each microbatch, outputs of segments with their autograd history.
        collected: For each microbatch, the gradient of each contribution.
        received: For each microbatch, gradients that came back, by edge.
    """

    step: int
    inputs: Sequence[Sequence[torch.Tensor | None]]
    values: list[dict[int, torch.Tensor]] = field(default_factory=list)
    leaves: list[dict[int, torch.Tensor]] = field(default_factory=list)
    roots: list[dict[int, torch.Tensor]] = field(default_factory=list)
    collected: list[dict[int, Gradient]] = field(default_factory=list)
    received: list[dict[int, Gradient]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for _ in self.inputs:
            self.values.append({})
            self.leaves.append({})
            self.roots.append({})
            self.collected.append({})
            self.received.append({})
