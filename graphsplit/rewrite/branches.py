"""Take the branches of a ``torch.cond`` apart, so that their operations can be placed one by one.

`graphsplit.capture.operations.branch_calls` shows what becomes of them. A pure pass over a captured
graph, for branches of which parts are placed on several workers; all others stay one operation.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode

from graphsplit.capture.branching import (
    NO_GRAD,
    branches_of,
    is_branching,
    made_explicit,
    predicate_of,
    submodule_of,
)
from graphsplit.capture.graph import CapturedGraph
from graphsplit.capture.operations.branch_calls import EnterBranches, Guarded, JoinBranches
from graphsplit.capture.operations.effects import alias_roots, is_random, written_operands
from graphsplit.capture.operations.memory_calls import MemoryCall, Outside, filled
from graphsplit.capture.operations.regions import Region, region_of, set_region
from graphsplit.rewrite.rebuild import rebuilt
from graphsplit.torch_ext.fakes import copy_notes, on_fakes, value_of
from graphsplit.torch_ext.private import pytree


def take_branches_apart(graph: CapturedGraph, names: AbstractSet[str]) -> CapturedGraph:
    """Make every operation in some branches a node of the graph.

    Args:
        graph: The graph.
        names: Names of the ``torch.cond`` nodes.

    Returns:
        A graph without these nodes.
    """
    return _Opener(graph, names).run() if names else graph


@dataclass(frozen=True)
class _Around:
    """The blocks and branches around an operation.

    Attributes:
        predicates: The predicates of all branches around it, the outermost first.
        when: What they must be.
        region: The blocks around it.
        prefix: What its name begins with.
        stack: The module that it belongs to where it says none.
    """

    predicates: tuple[FxNode, ...]
    when: tuple[bool, ...]
    region: Region
    prefix: str
    stack: Any

    def inside(self, predicate: FxNode, taken: bool, name: str) -> _Around:
        """The blocks and branches around the operations of one branch."""
        return dataclasses.replace(
            self,
            predicates=(*self.predicates, predicate),
            when=(*self.when, taken),
            prefix=f"{self.prefix}{name}_{'true' if taken else 'false'}_",
        )


class _Opener:
    """Copies a graph, and opens branches on the way."""

    def __init__(self, graph: CapturedGraph, names: AbstractSet[str]) -> None:
        self._graph = graph
        self._names = names
        self._notes = {node.name: node for node in graph.nodes}
        self._new = Graph()
        self._new.owning_module = graph.fx_owner  # type: ignore[assignment]
        self._env: dict[FxNode, FxNode] = {}
        self._taken_names = {node.name for node in graph.fx_graph.nodes}
        self._modified = self._modified_results()

    def _modified_results(self) -> set[FxNode]:
        roots = alias_roots(self._graph.fx_graph)
        written = (n for node in self._graph.fx_graph.nodes for n in written_operands(node))
        found = {root for n in written for root in roots[n]}
        return {node for node in self._graph.fx_graph.nodes if roots[node] & found}

    def run(self) -> CapturedGraph:
        for node in self._graph.fx_graph.nodes:
            if node.name in self._names:
                around = _Around((), (), region_of(node), "", node.meta.get("nn_module_stack"))
                copies = any(user in self._modified for user in node.users)
                operands = [self._env[n] for n in _operands(node)]
                carries = [self._carries(n) for n in _operands(node)]
                predicate = self._env[predicate_of(node)]
                self._env[node] = self._open(
                    node, predicate, operands, carries, around, copies=copies
                )
            elif node.op == "get_attr" and set(node.users) and _all_opened(node, self._names):
                continue
            else:
                self._env[node] = self._new.node_copy(node, self._env.__getitem__)
        return rebuilt(self._graph, self._new)

    def _carries(self, operand: FxNode) -> bool:
        return self._graph.mode.records_gradients and self._notes[operand.name].requires_grad

    def _open(
        self,
        node: FxNode,
        predicate: FxNode,
        operands: Sequence[FxNode],
        carries: Sequence[bool],
        around: _Around,
        *,
        copies: bool,
    ) -> FxNode:
        """Add both branches and what joins them; returns the latter."""
        entered, tokens = list(operands), []
        asks = around.region.grad_enabled is not False and any(carries)
        for index in reversed(range(len(operands))):  # autograd adds the first one's gradient first
            if asks and carries[index]:
                entered[index], token = self._enter(node, operands[index], around)
                tokens.append(token)
        results = []
        for taken, branch in zip((True, False), branches_of(node), strict=True):
            inside = around.inside(predicate, taken, node.name)
            results.append(self._add_branch(made_explicit(branch), entered, carries, inside))
        call = JoinBranches(around.when, copies=copies)
        args = ([*around.predicates, predicate], *results, tokens)
        made = self._add(call, args, node, around)
        made.meta["val"] = node.meta.get("val")
        return made

    def _enter(self, node: FxNode, operand: FxNode, around: _Around) -> tuple[FxNode, FxNode]:
        name = f"{around.prefix}{node.name}_{operand.name}"
        call = EnterBranches(around.when)
        made = self._add(call, (list(around.predicates), operand), node, around, name=name)
        elements = [
            self._add(operator.getitem, (made, index), node, around, name=f"{name}_{what}")
            for index, what in enumerate(("inside", "token"))
        ]
        return elements[0], elements[1]

    def _add_branch(
        self,
        branch: GraphModule,
        operands: Sequence[FxNode],
        carries: Sequence[bool],
        around: _Around,
    ) -> list[FxNode]:
        """Add the operations of a branch; returns its results."""
        env: dict[FxNode, Any] = {}
        given = iter(zip(operands, carries, strict=True))
        asks: dict[FxNode, bool] = {}
        for node in branch.graph.nodes:
            if node.op == "placeholder":
                env[node], asks[node] = next(given)
            elif node.op == "get_attr":
                env[node] = getattr(branch, str(node.target))
            elif node.op == "output":
                leaves = pytree.tree_leaves(node.args)
                return [env[leaf] for leaf in leaves]
            elif is_branching(node):
                inner = [env[n] for n in _operands(node)]
                asking = [self._may_carry(n, asks) for n in _operands(node)]
                env[node] = self._open(
                    node, env[predicate_of(node)], inner, asking, around, copies=False
                )
            elif node.target is NO_GRAD:
                env[node] = self._add_block(node, env, around)
            else:
                env[node] = self._add_operation(node, env, around)
        raise AssertionError("a branch without output")

    def _may_carry(self, node: FxNode, asks: Mapping[FxNode, bool]) -> bool:
        """Whether a value inside a branch may bring a gradient along; no harm if it does not."""
        value = node.meta.get("val")
        differentiable = isinstance(value, torch.Tensor) and (
            value.is_floating_point() or value.is_complex()
        )
        return differentiable and asks.get(node, any(asks.values()))

    def _add_block(self, node: FxNode, env: Mapping[FxNode, Any], around: _Around) -> Any:
        """Add the operations of a block with or without gradients; returns its results."""
        grad_enabled = bool(node.args[0])
        region = dataclasses.replace(around.region, grad_enabled=grad_enabled)
        operands = [env[n] for n in node.args[2:] if isinstance(n, FxNode)]
        inside = dataclasses.replace(around, region=region, prefix=f"{around.prefix}{node.name}_")
        block = made_explicit(submodule_of(node, 1))
        return self._add_branch(block, operands, [grad_enabled] * len(operands), inside)

    def _add_operation(self, node: FxNode, env: Mapping[FxNode, Any], around: _Around) -> Any:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, FxNode)
            if isinstance(env[source], list):  # the results of a block
                return env[source][index]
            return self._add(operator.getitem, (env[source], index), node, around)
        operands: list[FxNode] = []

        def outside(value: FxNode) -> Any:
            if not isinstance(env[value], FxNode):
                return env[value]
            operands.append(env[value])
            return Outside(len(operands) - 1)

        assert callable(node.target)
        args, kwargs = filled((node.args, node.kwargs), outside, torch.fx.Node)
        value = node.meta.get("val")
        call = Guarded(
            node.target,
            args,
            kwargs,
            when=around.when,
            num_results=len(value) if isinstance(value, (tuple, list)) else None,
            is_random=is_random(node),
        )
        return self._add(call, (list(around.predicates), operands), node, around)

    def _add(
        self, target: Any, args: tuple[Any, ...], like: FxNode, around: _Around, *, name: str = ""
    ) -> FxNode:
        name = name or f"{around.prefix}{like.name}"
        while name in self._taken_names and name not in self._names:
            name += "_"
        made = self._new.create_node("call_function", target, args, {}, name=name)
        self._taken_names.add(made.name)
        copy_notes(made, like)
        made.meta["nn_module_stack"] = like.meta.get("nn_module_stack") or around.stack
        set_region(made, around.region)
        made.meta["val"] = _fake_result(made, like)
        return made


def _operands(node: FxNode) -> list[FxNode]:
    operands: Any = node.args[3]
    return list(operands)


def _all_opened(attribute: FxNode, names: AbstractSet[str]) -> bool:
    return all(user.name in names for user in attribute.users)


def _fake_result(made: FxNode, like: FxNode) -> Any:
    """A new node's look: it shares memory with what its operands stand for."""
    target: Any = made.target
    run = target.as_taken if isinstance(target, MemoryCall) else target

    def run_it() -> Any:
        with torch.no_grad():
            return run(*torch.fx.map_arg(made.args, value_of))

    found = on_fakes(made, run_it)
    return value_of(like) if found is None else found  # what needs values looks as recorded
