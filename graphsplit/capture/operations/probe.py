"""Ask an operation what autograd makes of it, by running it once on fake tensors.

Two things that no schema tells decide over bits:

* Whether a result carries a gradient: ``zeros_like(x)`` and ``y.view_as(x)`` do not carry that of
  ``x``. Some operations choose their kernel by it (attention by its mask, ``matmul`` by its second
  operand).
* Whether an operation made of several others uses an operand more than once. Each use adds a term
  to the gradient, and ``(total + second) + first`` is not ``total + (second + first)``::

      cosine_similarity(x, y)     x is multiplied by y, and x is multiplied by itself
      matmul(x, x)                one operation, but its operands are reshaped one by one
      gru(x, h, weights)          every weight once per time step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from graphsplit.capture.operations.known_answers import KnownAnswers
from graphsplit.capture.operations.memory_calls import MemoryCall
from graphsplit.capture.operations.opaque_call import opaque_call, operands_at
from graphsplit.capture.operations.regions import in_region, region_of
from graphsplit.torch_ext.attributes import operator_schema, schema_of, steps_behind
from graphsplit.torch_ext.fakes import formed_like, on_fakes
from graphsplit.torch_ext.private import OpOverload, has_kernel, pytree

_IN_PARTS = "CompositeImplicitAutograd"
_Answer = tuple[tuple[bool, ...], frozenset[int]] | None


@dataclass(frozen=True)
class Differentiation:
    """Autograd's view of an operation.

    Attributes:
        carries_grad: For each result, whether its ``requires_grad`` is set.
        repeated: Operands whose gradient is a sum of terms made inside the operation, in an order
            of its own.
    """

    carries_grad: tuple[bool, ...]
    repeated: frozenset[Node]


def makes_views(node: Node) -> bool:
    """Whether the results may share memory with an operand without having modified it."""
    if isinstance(node.target, MemoryCall):
        return True
    schema = schema_of(node.target)
    returns = schema.returns if schema is not None else ()
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


class Probe:
    """Asks operations; asks those that look alike once.

    Args:
        grad_enabled: Whether autograd is on where the operations will run.
    """

    def __init__(self, *, grad_enabled: bool) -> None:
        self._grad_enabled = grad_enabled
        self._known = KnownAnswers[_Answer]("gradients", grad_enabled)

    def ask(self, node: Node, carries_grad: Mapping[Node, bool]) -> Differentiation | None:
        """Run an operation on fake tensors.

        Args:
            node: An operation of a freshly exported graph.
            carries_grad: For each operand, whether its ``requires_grad`` is set.

        Returns:
            What was found; None if the operation cannot be asked (higher-order operations).
        """
        call = opaque_call(node)
        if call is not None:
            repeated = operands_at(node, call.traits.repeated)
            return Differentiation(call.traits.carries_grad, frozenset(repeated))
        operands = node.all_input_nodes
        run = partial(_run, carries_grad=carries_grad, grad_enabled=self._grad_enabled)
        carries = (carries_grad.get(operand, False) for operand in operands)
        found = self._known.of(node, run, region_of(node), *carries)
        if found is None:
            return None
        return Differentiation(found[0], frozenset(operands[index] for index in found[1]))


def _run(node: Node, carries_grad: Mapping[Node, bool], *, grad_enabled: bool) -> _Answer:
    target = node.target
    if not isinstance(target, (OpOverload, MemoryCall)):
        return None
    operands, region = node.all_input_nodes, region_of(node)
    shadows: dict[Node, Any] = {}

    def run() -> list[Any]:
        with torch.enable_grad():
            for operand in operands:
                shadows[operand] = _shadow(operand, carries_grad.get(operand, False), target)
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), shadows.__getitem__)
            with in_region(region, grad_enabled=grad_enabled):
                taken = target.as_taken if isinstance(target, MemoryCall) else target
                return pytree.tree_leaves(taken(*args, **kwargs))

    leaves = on_fakes(node, run)
    if leaves is None:  # what needs values is judged by its operands
        return None
    carries = tuple(isinstance(r, torch.Tensor) and r.requires_grad for r in leaves)
    casts = bool(region.autocasts)  # each cast is an operation of its own
    repeated = _repeated(leaves, shadows) if casts or _is_in_parts(target) else frozenset()
    return carries, frozenset(i for i, operand in enumerate(operands) if operand in repeated)


def _is_in_parts(target: OpOverload | MemoryCall) -> bool:
    """Whether autograd sees an operation as the several others that it is made of."""
    if isinstance(target, MemoryCall):
        return True
    return has_kernel(target.name(), _IN_PARTS)


def _shadow(operand: Node, carries_grad: bool, target: OpOverload | MemoryCall) -> Any:
    """A fake tensor like the operand's value, with no history but the wish for a gradient."""
    if operand.op == "get_attr":
        return getattr(operand.graph.owning_module, str(operand.target))
    value = operand.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value
    shadow = formed_like(value)
    if carries_grad:
        shadow.requires_grad_(True)
        # A leaf must not be modified in place.
        if isinstance(target, OpOverload) and operator_schema(target).is_mutable:
            shadow = shadow.clone()
    return shadow


def _repeated(results: list[Any], shadows: Mapping[Node, Any]) -> frozenset[Node]:
    """Operands at which more than one edge of the operation's own backward graph arrives."""
    ends: dict[Any, Node] = {}
    for operand, shadow in shadows.items():
        if isinstance(shadow, torch.Tensor) and shadow.requires_grad:
            ends[torch.autograd.graph.get_gradient_edge(shadow).node] = operand
    arrivals: Counter[Node] = Counter()
    for step in steps_behind(results, ends):
        arrivals.update(
            ends[following] for following, _ in step.next_functions if following in ends
        )
    return frozenset(operand for operand, count in arrivals.items() if count > 1)
