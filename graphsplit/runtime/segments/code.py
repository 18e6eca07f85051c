"""Turn one segment of a plan into a Python function."""

from __future__ import annotations

import linecache
import operator
import traceback
import weakref
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from graphsplit.capture.graph import Node
from graphsplit.capture.operations.memory_calls import WriteToCopy
from graphsplit.capture.operations.opaque_call import OpaqueCall
from graphsplit.capture.operations.regions import ORDINARY, Region
from graphsplit.capture.reach.holders import Holder
from graphsplit.partition.checks.one_state import shared_elsewhere
from graphsplit.partition.checks.returned import limits_of
from graphsplit.partition.gradient_sums import Use
from graphsplit.partition.plan import PartitionPlan, RecomputedGroup, WeightUse
from graphsplit.runtime.segments.compiled import Compiler
from graphsplit.runtime.segments.recomputed import Recomputed
from graphsplit.runtime.segments.region_modes import keeping_modes, modes_of, switch_modes
from graphsplit.runtime.segments.weights_apart import Pending, WeightsApart
from graphsplit.torch_ext.attributes import forget_source, lines_of


@dataclass(frozen=True)
class SegmentCode:
    """The code of one segment.

    Attributes:
        run: Takes the segment's values and leaves, in the order of ``SegmentIO``; returns the
            tuple of its outputs.
        node_at_line: Which node each line of the source runs, by file and line.
    """

    run: Callable[..., tuple[Any, ...]]
    node_at_line: dict[tuple[str, int], Node]

    def failing_node(self, error: BaseException) -> Node | None:
        """The operation that raised an error, if it was one of this segment."""
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            node = self.node_at_line.get((frame.filename, frame.lineno or 0))
            if node is not None:
                return node
        return None


def build_code(
    plan: PartitionPlan,
    segment: int,
    compiler: Compiler | None = None,
    *,
    pending: list[Pending] | None = None,
) -> SegmentCode:
    """Cut one segment's code out of the captured graph, and compile it if there is a compiler.

    Args:
        plan: The plan.
        segment: The segment.
        compiler: Compiles the code, or None.
        pending: Where backward leaves the weight gradients that the plan allows to compute apart;
            None: they are computed with the others.
    """
    return _Builder(plan, segment, pending).build(compiler)


@dataclass
class _Scope:
    """A function that is being written: a segment's, or that of operations that are run again.

    Attributes:
        graph: Its code.
        whole: What stands for a node's value.
        by_use: What stands for it where an operation reads it through a leaf.
        lines: The operations, by their nodes in the code.
    """

    graph: fx.Graph
    whole: dict[int, fx.Node] = field(default_factory=dict)
    by_use: dict[Use, fx.Node] = field(default_factory=dict)
    lines: dict[fx.Node, Node] = field(default_factory=dict)

    def operand(self, position: int, index: int, value: int) -> fx.Node:
        """The stand-in for an operand of an operation."""
        leaf = self.by_use.get((position, index))
        return leaf if leaf is not None else self.whole[value]


class _Builder:
    """Writes one segment's code."""

    def __init__(self, plan: PartitionPlan, segment: int, pending: list[Pending] | None) -> None:
        self.plan = plan
        self.segment = segment
        self.captured = plan.placed.graph
        self.nodes = self.captured.nodes
        self.pending = pending
        self.positions = plan.segments[segment].nodes
        uses = plan.splits[segment].uses if pending is not None else ()
        self.apart = {use.position: use for use in uses}
        self.regions = {self.nodes[position].region for position in self.positions}
        casts = {device for region in self.regions for device, _ in region.autocasts}
        self.devices = tuple(sorted(casts))
        self.node_at_line: dict[tuple[str, int], Node] = {}

    def build(self, compiler: Compiler | None) -> SegmentCode:
        io = self.plan.io[self.segment]
        scope = _Scope(fx.Graph())
        for value in io.values:
            scope.whole[value] = scope.graph.placeholder(f"value_{self.nodes[value].name}")
        for leaf in io.leaves:
            contribution = self.plan.contributions[leaf]
            name = self.nodes[contribution.value].name
            placeholder = scope.graph.placeholder(f"leaf{leaf}_{name}")
            scope.by_use.update(dict.fromkeys(contribution.uses, placeholder))
        groups = {} if compiler is not None else self._groups()
        region = ORDINARY
        for position in self.positions:
            if position not in groups:
                region = self._enter(scope, region, position)
                self._add(scope, position)
                if position in self.plan.run_twice:
                    self._add(scope, position)
            elif position == groups[position].positions[0]:
                region = self._enter(scope, region, position)
                region = self._add_group(scope, groups[position])
        scope.graph.output(tuple(scope.whole[p] for p in io.outputs))
        module = self._module(scope, f"Segment{self.segment}")
        run = module.forward
        if compiler is not None and scope.lines:
            run = compiler(run, dynamic=self.captured.sizes is not None)
        is_ordinary = self.regions <= {ORDINARY}
        kept = run if is_ordinary else keeping_modes(run, self.devices)
        return SegmentCode(kept, self.node_at_line)

    def _groups(self) -> dict[int, RecomputedGroup]:
        groups = self.plan.recomputed.get(self.segment, ())
        return {position: group for group in groups for position in group.positions}

    def _module(self, scope: _Scope, name: str) -> fx.GraphModule:
        module = fx.GraphModule(self.captured.fx_owner, scope.graph, class_name=name)
        forget_with(module)
        filename = module.forward.__code__.co_filename
        for line, node in _line_map(module, scope.graph, scope.lines).items():
            self.node_at_line[filename, line] = node
        return module

    def _enter(self, scope: _Scope, before: Region, position: int) -> Region:
        """Switch modes where an operation's region is not that of the one before."""
        region, grad_enabled = self.nodes[position].region, self.captured.mode.records_gradients
        modes = modes_of(region, self.devices, grad_enabled=grad_enabled)
        if modes != modes_of(before, self.devices, grad_enabled=grad_enabled):
            scope.graph.call_function(switch_modes, modes)
        return region

    def _add(self, scope: _Scope, position: int) -> None:
        """Copy one operation, each operand replaced by the value or leaf that stands for it."""
        old = self.captured.fx_nodes[self.nodes[position].name]
        count = -1
        reads = self.nodes[position].reads

        def operand(node: fx.Node) -> fx.Node:
            nonlocal count
            if node.op == "get_attr":
                return scope.graph.get_attr(str(node.target))
            count += 1
            return scope.operand(position, count, reads[count])

        args, kwargs = fx.map_arg((old.args, old.kwargs), operand)
        target = old.target
        if isinstance(target, OpaqueCall):
            watched = shared_elsewhere(self.plan, position)
            target = target.within(limits_of(self.plan, position), watched)
        elif isinstance(target, WriteToCopy) and isinstance(target.target, OpaqueCall):
            watched = shared_elsewhere(self.plan, position)
            target = target.running(target.target.within(None, watched))
        new = scope.graph.create_node(old.op, target, args, kwargs, name=old.name)
        if position in self.apart and self.pending is not None:
            _take_apart(new, self.apart[position], self.pending)
        scope.whole[position] = new
        scope.lines[new] = self.nodes[position]

    def _add_group(self, scope: _Scope, group: RecomputedGroup) -> Region:
        """Add operations that backward runs again, as one call; returns the last one's region."""
        inner, members = _Scope(fx.Graph()), frozenset(group.positions)
        first = group.positions[0]
        given: dict[fx.Node, fx.Node] = {}
        changing: dict[fx.Node, None] = {}
        for position in group.positions:
            for index, value in enumerate(self.nodes[position].reads):
                if value in members:
                    continue
                outer = scope.operand(position, index, value)
                if outer not in given:
                    given[outer] = inner.graph.placeholder(outer.name)
                inner.by_use[position, index] = given[outer]
                if value in self.captured.modified:
                    changing[outer] = None
        region = self.nodes[first].region
        for position in group.positions:
            region = self._enter(inner, region, position)
            self._add(inner, position)
            if position in self.plan.run_twice:
                self._add(inner, position)
        made = self._read_outside(members)
        inner.graph.output(tuple(inner.whole[p] for p in made))
        arguments = tuple(given)
        run = Recomputed(
            self._module(inner, f"Segment{self.segment}Again{first}").forward,
            f"run_again_in_backward_{first}",
            changing=[arguments.index(argument) for argument in changing],
            is_random=any(self.nodes[p].is_random for p in members),
            repeats_writes=group.repeats_writes,
            state=() if group.repeats_writes else self._python_state(members),
        )
        results = scope.graph.call_function(run, arguments)
        for index, position in enumerate(made):
            scope.whole[position] = scope.graph.call_function(operator.getitem, (results, index))
        return region

    def _python_state(self, members: AbstractSet[int]) -> tuple[Holder, ...]:
        """The Python state that the calls kept whole in a group can reach."""
        targets = (self.captured.fx_nodes[self.nodes[p].name].target for p in members)
        calls = [target for target in targets if isinstance(target, OpaqueCall)]
        found = {key: held for call in calls for key, held in call.reached.holders.items()}
        return tuple(holder for holder in found.values() if holder.decides)

    def _read_outside(self, members: AbstractSet[int]) -> tuple[int, ...]:
        """The values of a group that its segment needs elsewhere."""
        read = set(self.plan.io[self.segment].outputs)
        for position in self.positions:
            if position not in members:
                read.update(self.nodes[position].reads)
        return tuple(sorted(read & members))


def _take_apart(new: fx.Node, use: WeightUse, pending: list[Pending]) -> None:
    """Let an operation's backward leave the gradients of its weights for later."""
    tensors = [
        index
        for index, argument in enumerate(new.args)
        if isinstance(argument, fx.Node) and argument.op != "get_attr"
    ]
    weights = [tensors[operand] for operand in use.operands]
    assert callable(new.target)
    new.target = WeightsApart(
        new.target,
        use,
        weights=weights,
        activations=[index for index in tensors if index not in weights],
        keywords=new.kwargs,
        pending=pending,
    )
    new.kwargs = {}


def _line_map(
    module: fx.GraphModule, graph: fx.Graph, lines: dict[fx.Node, Node]
) -> dict[int, Node]:
    ordered = list(graph.nodes)
    first = module.forward.__code__.co_firstlineno
    return {
        first + line: lines[ordered[index]]
        for line, index in lines_of(module).items()
        if index is not None and index < len(ordered) and ordered[index] in lines
    }


def forget_with(module: fx.GraphModule) -> None:
    """Forget the source of a module's code once the module is gone.

    torch.fx keeps the text of every function that it generates as long as the process lives, so
    that tracebacks can show it. A job makes code again for every plan that replaces another one,
    and after every recovery.
    """
    filename = module.forward.__code__.co_filename
    weakref.finalize(module, _forget, filename).atexit = False


def _forget(filename: str) -> None:
    forget_source(filename)
    linecache.cache.pop(filename, None)
