"""The values and gradients that one step holds while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Gradient = torch.Tensor | None


@dataclass(frozen=True)
class Microbatches:
    """The differences between microbatches that run together.

    Attributes:
        weights: What the loss of each is multiplied by.
        rng_state: Gives the state in which the generator of each starts.
        start: The number of the first of them in its batch.
        are_last: Whether no others of the batch come behind them, whose plans have been made.
    """

    weights: Sequence[float]
    rng_state: Callable[[int], torch.Tensor]
    start: int = 0
    are_last: bool = True


@dataclass
class StepState:
    """The values and gradients that one step holds while it runs.

    Attributes:
        step: Number of the step in the job.
        inputs: Values of the graph's inputs, by position among the inputs; None where this worker
            does not consume them.
        numbers: Numbers made of the inputs' sizes, by name; of dynamic dimensions only.
        microbatches: Weights and generators of microbatches; None where a step is one whole batch.
        values: For each microbatch, values of nodes made or received here, until their last use;
            in the end, the graph's outputs.
        leaves: For each microbatch, the leaf of each contribution.
        roots: For each microbatch, outputs of segments with their autograd history.
        collected: For each microbatch, the gradient of each contribution.
        received: For each microbatch, gradients that came back, by edge.
        pending: For each microbatch, weight gradients that are still to be computed, by segment.
        generators: For each microbatch, the state of its generator between random segments.
        partials: What each worker tells the others about its gradients, by worker.
        given: Gradients of outputs, and of inputs used later, that came from outside the graph, by
            node.
        totals: Where calls under one backward add up their gradients: by a parameter's id, what the
            later calls have given; None where each adds to ``.grad``.
        is_kept: Whether another backward of the call may come: values and leaves are kept.
        retains: Whether it may go the same way: what autograd has saved is kept.
        folded: Buffers that came from another worker, while microbatches are folded into them; by
            the first one's node.
        of_inputs: Gradients of the graph's inputs that are added up on this worker, by node and
            microbatch.
    """

    step: int
    inputs: Sequence[Sequence[torch.Tensor | None]]
    numbers: Mapping[str, Any]
    microbatches: Microbatches | None
    values: list[dict[int, Any]]
    leaves: list[dict[int, Any]]
    roots: list[dict[int, Any]]
    collected: list[dict[int, Gradient]]
    received: list[dict[int, Gradient]]
    pending: list[dict[int, tuple[Any, ...]]]
    generators: dict[int, torch.Tensor] = field(default_factory=dict)
    partials: dict[int, torch.Tensor] = field(default_factory=dict)
    given: Mapping[int, Gradient] = field(default_factory=dict)
    totals: dict[int, torch.Tensor] | None = None
    is_kept: bool = False
    retains: bool = False
    folded: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    of_inputs: dict[tuple[int, int], Gradient] = field(default_factory=dict)


Action = Callable[[StepState], None]
"""An instruction, bound to what it works on."""
