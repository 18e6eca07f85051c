"""Which branches of a ``torch.cond`` can be taken apart, and what they are made of."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from graphsplit.capture.graph import CapturedGraph
from graphsplit.capture.normalize.inplace import make_in_place_explicit
from graphsplit.capture.operations.effects import is_random, written_operands
from graphsplit.capture.operations.regions import region_of
from graphsplit.frames import users_line_of_node
from graphsplit.torch_ext.private import OpOverload, pytree

NO_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled


def is_branching(node: FxNode) -> bool:
    """Whether a node is a ``torch.cond``."""
    return node.target is torch.ops.higher_order.cond


def why_together(graph: CapturedGraph, node: FxNode) -> str:
    """Why a ``torch.cond`` cannot be taken apart; empty where it can be."""
    redraws = graph.has_gradients and any(
        n.name == node.name and n.requires_grad for n in graph.nodes
    )
    if region_of(node).autocasts:
        return "it stands in a torch.autocast block"
    if isinstance(predicate_of(node).meta.get("val"), torch.SymBool):
        return "its condition is made of sizes, not a tensor"
    return next(_obstacles(node, redraws=redraws), "")


def _obstacles(node: FxNode, *, redraws: bool) -> Iterator[str]:
    for branch in branches_of(node):
        for inner in made_explicit(branch).graph.nodes:
            yield from _obstacle(inner, redraws=redraws)
        leaves = pytree.tree_leaves([n.args for n in branch.graph.nodes if n.op == "output"])
        if not all(isinstance(leaf, FxNode) for leaf in leaves):
            yield "a branch returns something else than tensors"


def _obstacle(node: FxNode, *, redraws: bool) -> Iterator[str]:
    line = users_line_of_node(node)
    where = f" ({line})" if line else ""
    if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
        if node.op != "placeholder":
            yield f"it computes with sizes that may change inside{where}"
    elif node.op != "call_function" or node.target is operator.getitem:
        return
    elif is_branching(node):
        yield from _obstacles(node, redraws=redraws)
    elif node.target is NO_GRAD:
        for inner in made_explicit(submodule_of(node, 1)).graph.nodes:
            yield from _obstacle(inner, redraws=redraws)
    elif not isinstance(node.target, OpOverload):
        yield f"{node.target} stands inside{where}"
    elif written_operands(node):
        yield f"{node.target} modifies memory in place inside{where}"
    elif redraws and is_random(node):
        yield (
            f"{node.target} draws random numbers inside{where}, and PyTorch draws others when it "
            f"runs the branch again in backward"
        )


def predicate_of(node: FxNode) -> FxNode:
    """The condition of a ``torch.cond``."""
    found = node.args[0]
    assert isinstance(found, FxNode)
    return found


def submodule_of(node: FxNode, position: int) -> GraphModule:
    """The graph that an operand of a higher-order operation names."""
    attribute: Any = node.args[position]
    found = getattr(node.graph.owning_module, str(attribute.target))
    assert isinstance(found, GraphModule)
    return found


def branches_of(node: FxNode) -> tuple[GraphModule, GraphModule]:
    """The two graphs of a ``torch.cond``: where its condition holds, and where it does not."""
    return submodule_of(node, 1), submodule_of(node, 2)


def made_explicit(branch: GraphModule) -> GraphModule:
    """A branch of which in-place operations on its own values have become ordinary ones."""
    explicit = copy.copy(branch)
    make_in_place_explicit(explicit.graph, state=frozenset())
    return explicit
