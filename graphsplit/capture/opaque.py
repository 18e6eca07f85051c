"""Calls that are kept whole: one node of the graph, run as ordinary eager code.

While a network is captured, a call that must not be taken apart (a custom autograd function, a
module marked by ``gs.opaque``) is recorded as one node. ``torch.export`` allows operators only, so
the node names an operator of ours and the call's number; afterwards ``put_in_place`` lets it call
the recorded ``OpaqueCall`` itself::

    during export     graphsplit_opaque(0, x, weight)
    afterwards        GeLUFunction.apply(x, weight)         an OpaqueCall; operands are tensors
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node


class _Placeholder(HigherOrderOperator):
    """Stands for a call kept whole while ``torch.export`` works; never runs."""

    def __init__(self) -> None:
        super().__init__("graphsplit_opaque", cacheable=False)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("graphsplit_opaque is a placeholder")


PLACEHOLDER = _Placeholder()


@dataclass(frozen=True)
class Traits:
    """What is known of a call. Operands and outputs are given by position.

    Attributes:
        is_random: Whether it draws from the default generator.
        written: Operands that it modifies in place.
        aliased: Operands whose memory an output shares.
        carries_grad: For each output, whether its ``requires_grad`` is set.
        repeated: Operands to whose gradient it adds several terms in an order of its own.
        outputs: For each output, its dtype and shape; None as a size that may change.
    """

    is_random: bool = False
    written: tuple[int, ...] = ()
    aliased: tuple[int, ...] = ()
    carries_grad: tuple[bool, ...] = ()
    repeated: tuple[int, ...] = ()
    outputs: tuple[tuple[torch.dtype, tuple[int | None, ...]], ...] = ()


class OpaqueCall:
    """What a node calls that stands for code kept whole.

    Called with its operands, it returns the one tensor it makes, or the tuple of several.

    Args:
        label: What it runs, for people: ``STE.apply``.
        text: Its arguments that are no tensors; part of the plan on which workers must agree.
        run: Takes the operands, and returns the list of its outputs.
        traits: What is known of it.
        source: The user's line.
    """

    def __init__(
        self,
        label: str,
        text: str,
        run: Callable[..., Sequence[torch.Tensor]],
        traits: Traits,
        source: str,
    ) -> None:
        self.label = label
        self.text = text
        self.traits = traits
        self._run = run
        self._source = source
        # The generated code of a graph names what it calls.
        self.__name__ = self.__qualname__ = "".join(c if c.isalnum() else "_" for c in label)
        self.__module__ = "graphsplit_opaque"

    def __str__(self) -> str:
        return self.label

    def __call__(self, *operands: Any) -> Any:
        """Run the call."""
        outputs = self._run(*operands)
        for index, (output, expected) in enumerate(zip(outputs, self.traits.outputs, strict=True)):
            dtype, shape = expected
            if output.dtype != dtype or not _fits(output.shape, shape):
                raise OpaqueCallError(
                    f"output {index} of {self.label} is {output.dtype} {list(output.shape)}, but "
                    f"was {dtype} {list(shape)} when the network was captured\n  {self._source}\n"
                    f"  Fix: let what is kept whole return the same shapes for every batch of one "
                    f"shape."
                )
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


class OpaqueCallError(RuntimeError):
    """What a call kept whole returns is not what it was when the network was captured."""


def _fits(shape: Sequence[int], expected: Sequence[int | None]) -> bool:
    return len(shape) == len(expected) and all(
        want is None or size == want for size, want in zip(shape, expected, strict=True)
    )


def opaque_call(node: Node) -> OpaqueCall | None:
    """The call that a node stands for, if it is one kept whole."""
    return node.target if isinstance(node.target, OpaqueCall) else None


def operands_at(node: Node, positions: Sequence[int]) -> tuple[Node, ...]:
    """Some operands of a call kept whole."""
    found = (node.args[position] for position in positions)
    return tuple(operand for operand in found if isinstance(operand, Node))


def put_in_place(graph_module: GraphModule, calls: Sequence[OpaqueCall]) -> None:
    """Let the nodes of a freshly exported graph, and of its subgraphs, call what they stand for."""
    for module in graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        changed = False
        for node in module.graph.nodes:
            if node.op == "call_function" and node.target is PLACEHOLDER:
                number, *operands = node.args
                node.target, node.args = calls[number], tuple(operands)
                changed = True
        if changed:
            module.recompile()
