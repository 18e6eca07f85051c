"""Results of a step beside its loss, in the network's own structure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from graphsplit.batches.signature import Arguments
from graphsplit.capture.graph import CapturedGraph, NodeKind
from graphsplit.capture.operations.shared_outputs import MemoryPart
from graphsplit.planning.step_plan import total_loss
from graphsplit.tensor_meta import span_elements


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
    parts = [output.part_with(numbers or {}) for output in graph.outputs]
    return graph.output_spec.rebuild(_in_shared_memory(leaves, parts, inputs))


def _in_shared_memory(
    values: Sequence[Any], parts: Sequence[MemoryPart | None], inputs: Sequence[Any]
) -> list[Any]:
    """Outputs that look at one memory, put together from values that came apart.

    Those with a history stay apart: their gradients take the ways of the step.

    Args:
        values: The outputs.
        parts: Which part of a memory each of them looks at.
        inputs: The step's inputs, those that are not here as None.
    """
    found = list(values)
    memories: dict[int, dict[int, MemoryPart]] = {}
    for index, part in enumerate(parts):
        if part is not None and values[index].numel():
            memories.setdefault(part.memory, {})[index] = part
    for looking in memories.values():
        first = next(iter(looking.values()))
        base = None if first.input is None else inputs[first.input]
        if first.input is None and len(looking) > 1:
            base, looking = _together({i: values[i] for i in looking}, looking)
        if base is not None and not base.requires_grad:
            found = [
                _view(base, looking[index].begin, value) if index in looking else value
                for index, value in enumerate(found)
            ]
    return found


def _together(
    values: dict[int, torch.Tensor], parts: dict[int, MemoryPart]
) -> tuple[torch.Tensor | None, dict[int, MemoryPart]]:
    """A memory that holds some values, and where each of them is in it.

    It is the memory of one that reaches over all others, if there is such a one.
    """
    begins = {index: part.begin for index, part in parts.items()}
    ends = {i: begins[i] + _num_bytes(value) for i, value in values.items()}
    begin, end = min(begins.values()), max(ends.values())
    whole = next((i for i in values if begins[i] == begin and ends[i] == end), None)
    moved = {i: MemoryPart(p.memory, p.begin - begin, None) for i, p in parts.items()}
    some = next(iter(values.values()))
    if any(value.requires_grad for value in values.values()):
        return None, moved
    if whole is not None:
        return values[whole], moved
    memory = some.new_empty((end - begin) // some.element_size())
    for index, value in values.items():
        _view(memory, moved[index].begin, value).copy_(value)
    return memory, moved


def _num_bytes(value: torch.Tensor) -> int:
    return span_elements(value.shape, value.stride()) * value.element_size()


def _view(memory: torch.Tensor, begin: int, value: torch.Tensor) -> torch.Tensor:
    """The part of a tensor so many bytes behind its beginning, in the form of a value."""
    flat = memory.as_strided((span_elements(memory.shape, memory.stride()),), (1,))
    if flat.dtype != value.dtype:
        flat = flat.view(value.dtype)
    first = begin // value.element_size()
    return flat[first : first + 1].as_strided(value.shape, value.stride())
