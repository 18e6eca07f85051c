"""The values and gradients that one step holds while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphsplit.program.liveness import GENERATOR

Gradient = torch.Tensor | None


@dataclass(frozen=True)
class Microbatches:
    """The differences between microbatches that run together.

    Attributes:
        weights: What the loss of each is multiplied by.
        rng_state: Gives the state in which the generator of each starts.
    """

    weights: Sequence[float]
    rng_state: Callable[[int], torch.Tensor]


@dataclass
class StepState:
    """The values and gradients that one step holds while it runs.

    Attributes:
        step: Number of the step in the job.
        inputs: Values of the graph's inputs, by position among the inputs; None where this worker
            does not consume them.
        numbers: Numbers made of the inputs' sizes, by name; of dynamic dimensions only.
        microbatches: Weights and generators of microbatches; None where a step is one whole batch.
        generators: For each microbatch, the state of its generator between random segments.
        values: For each microbatch, values of nodes made or received here, until their last use;
            in the end, the graph's outputs.
        leaves: For each microbatch, the leaf of each contribution.
        roots: For each microbatch, outputs of segments with their autograd history.
        collected: For each microbatch, the gradient of each contribution.
        received: For each microbatch, gradients that came back, by edge.
        pending: For each microbatch, weight gradients that are still to be computed, by segment.
        tallies: What each worker tells the others about its gradients, by worker.
    """

    step: int
    inputs: Sequence[Sequence[torch.Tensor | None]]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    microbatches: Microbatches | None = None
    generators: dict[int, torch.Tensor] = field(default_factory=dict)
    values: list[dict[int, Any]] = field(default_factory=list)
    leaves: list[dict[int, Any]] = field(default_factory=list)
    roots: list[dict[int, Any]] = field(default_factory=list)
    collected: list[dict[int, Gradient]] = field(default_factory=list)
    received: list[dict[int, Gradient]] = field(default_factory=list)
    pending: list[dict[int, tuple[Any, ...]]] = field(default_factory=list)
    tallies: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for _ in self.inputs:
            self.values.append({})
            self.leaves.append({})
            self.roots.append({})
            self.collected.append({})
            self.received.append({})
            self.pending.append({})

    def free(self, microbatch: int, value: int) -> None:
        """Forget what nothing reads any more; see ``program.liveness``."""
        if value == GENERATOR:
            del self.generators[microbatch]
        else:
            del self.values[microbatch][value]
