"""The captured computation as one frozen value.

A ``CapturedGraph`` lists every node in program order. A node is addressed by its position; what a
node reads always stands before it. The ``torch.fx`` graph that the nodes came from is carried
along, unchanged from then on: segments are cut out of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
from torch.fx import GraphModule

from graphsplit.capture.numbers.sizes import DynamicSizes
from graphsplit.capture.operations.effects import alias_roots, written_operands
from graphsplit.capture.operations.regions import ORDINARY, Region
from graphsplit.capture.operations.shared_outputs import MemoryPart
from graphsplit.capture.python.guards import NO_STATE, PythonState
from graphsplit.capture.state.old_values import MODIFIED
from graphsplit.capture.state.owned_tensors import Key
from graphsplit.capture.structure import Structure
from graphsplit.errors import RaisedInEagerError
from graphsplit.guards.changes import Change
from graphsplit.marks.annotations import Annotation
from graphsplit.tensor_meta import TensorMeta, octets_of

# Module path of the loss function: not an identifier, so that no module of a network has it.
LOSS_PATH = "(loss)"


class NodeKind(Enum):
    """The kinds of nodes."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    NUMBER = "number"
    OPERATION = "operation"


@dataclass(frozen=True, slots=True)
class Node:
    """One value of the computation.

    Attributes:
        name: Unique name, as in the printed ``torch.fx`` graph.
        kind: What it stands for.
        target: The operation (``aten.conv2d.default``), the qualified name of the parameter,
            buffer or constant (``conv1.weight``), or the position of the input among the
            flattened inputs, or the expression that gives a number.
        reads: Positions of the nodes it reads, one per operand, in operand order.
        runs_after: Positions of nodes that must have run before, though no value is read:
            operations that change a buffer this one touches too.
        meta: dtype, shape and strides; None for tuples and numbers.
        module_path: The innermost module that it belongs to; ``""`` for the network itself.
        source: ``file:line`` of the user's code.
        annotation: The ``with gs.place(...)`` block around it, if any.
        is_random: Whether it draws from the default generator.
        draws_from_process: Whether it may draw from Python's or NumPy's generator.
        with_producer: Whether it must run where its (single) operand is made: an element taken
            out of a tuple.
        stays: Whether it runs where its (last) operand is, whatever is placed around it: it costs
            nothing, and would only be a detour.
        wire: The dtype that holds all its values without loss, by ``gs.wire``; None: its own.
        changes_inputs: Whether it modifies an operand in place.
        shares_modified: Nodes whose memory it shares after somebody modified it in place, each
            with whether that memory is a parameter or buffer. Values of others must lie in the
            same segment.
        requires_grad: Whether autograd carries a gradient through it.
        repeated: Operands to whose gradient it adds several terms in an order of its own.
        asks_grad: Whether its ``requires_grad`` is set in eager mode, where it may be set though no
            gradient will flow: that of parameters, and of views of them, in eval mode too.
        region: The ``no_grad`` and ``autocast`` blocks around it.
        arguments: The operation's arguments as text, operands by name: part of the plan's hash.
    """

    name: str
    kind: NodeKind
    target: str
    reads: tuple[int, ...] = ()
    runs_after: tuple[int, ...] = ()
    meta: TensorMeta | None = None
    module_path: str = ""
    source: str = ""
    annotation: Annotation | None = None
    is_random: bool = False
    draws_from_process: bool = False
    with_producer: bool = False
    stays: bool = False
    wire: torch.dtype | None = None
    changes_inputs: bool = False
    shares_modified: tuple[tuple[int, bool], ...] = ()
    requires_grad: bool = False
    repeated: tuple[int, ...] = ()
    asks_grad: bool = False
    region: Region = ORDINARY
    arguments: str = ""

    @property
    def is_state(self) -> bool:
        """Whether it is a parameter or a buffer: a value that lives on one worker."""
        return self.kind in (NodeKind.PARAMETER, NodeKind.BUFFER)

    @property
    def is_everywhere(self) -> bool:
        """Whether every worker has it at hand: inputs, constants, numbers made of inputs' sizes."""
        return self.kind in (NodeKind.INPUT, NodeKind.CONSTANT, NodeKind.NUMBER)


class Mode(Enum):
    """Which of a model's graphs this is; ``CALL`` and ``LOOK`` are a network's forward alone."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "predict"
    CALL = "call"
    LOOK = "call without gradients"

    @property
    def step(self) -> str:
        """One run of it, in words: ``train step``, ``call without gradients``."""
        return self.value if self.keeps_outputs_home else f"{self.value} step"

    @property
    def records_gradients(self) -> bool:
        """Whether autograd records what runs."""
        return self in (Mode.TRAIN, Mode.CALL)

    @property
    def keeps_outputs_home(self) -> bool:
        """Whether each output stays on the worker that makes it: the script's own loop asks."""
        return self in (Mode.CALL, Mode.LOOK)


@dataclass(frozen=True)
class Output:
    """One leaf of the graph's output: a node's value, or a plain Python value.

    Attributes:
        node: The node.
        constant: The plain value, where there is no node.
        part: Which part of memory it looks at, where that is not its own alone.
    """

    node: int | None
    constant: Any = None
    part: MemoryPart | None = None

    def part_with(self, numbers: Mapping[str, Any]) -> MemoryPart | None:
        """The part for a batch; None where its beginning follows from values that nobody knows."""
        if self.part is None or not self.part.number:
            return self.part
        begin = numbers.get(self.part.number)
        return None if begin is None else replace(self.part, begin=begin)


@dataclass(frozen=True)
class BufferUpdate:
    """An update of buffers that nothing else in a step looks at: made once forward has run.

    Attributes:
        buffers: Names of the buffers' nodes.
        reads: Names of the nodes whose values it reads, which are kept for it.
        beside: The operation on whose worker it runs; None where its module's placement decides.
        module_path: The module that it belongs to.
        source: ``file:line`` of the user's code.
        update: Takes the buffers, then what it reads, and modifies the buffers.
    """

    buffers: tuple[str, ...]
    reads: tuple[str, ...]
    beside: str | None
    module_path: str
    source: str
    update: torch.fx.Graph


@dataclass(frozen=True)
class ErrorAtEnd:
    """The error that code of the user's ends in.

    Attributes:
        error: The error.
        changes: What the code leaves in the Python values around it, before it raises that.
        trace: Where it was raised.
    """

    error: RaisedInEagerError
    changes: tuple[Change, ...]
    trace: TracebackType | None


@dataclass(frozen=True)
class CapturedGraph:
    """A whole computation: forward and, in train mode, the loss.

    Attributes:
        mode: Train, eval or predict.
        nodes: All nodes in program order.
        fx_graph: The graph they came from; nodes are matched by name.
        fx_owner: The module that holds submodules of higher-order operations.
        constants: Values of the ``CONSTANT`` nodes, by name.
        outputs: Flattened outputs.
        output_spec: How to put the outputs back into the network's own structure.
        loss: Position in ``outputs`` of the loss, or None.
        state_names: For every state node (by position), all qualified names of that tensor:
            tied parameters have several.
        sizes: For which sizes of its inputs it holds, where it holds for several.
        state: The Python values that it depends on, and what it leaves of them.
        buffers: Attributes whose tensors forward changes, and that are buffers since the capture.
        buffer_updates: Updates of buffers that were taken out of it, where there are replicas.
        num_answered: Where it ends in a question, how many were answered before; else None.
        ending: Where it ends in an error, which stands in for a question; else None.
    """

    mode: Mode
    nodes: tuple[Node, ...]
    fx_graph: torch.fx.Graph
    fx_owner: torch.nn.Module
    constants: dict[str, torch.Tensor]
    outputs: tuple[Output, ...]
    output_spec: Structure
    loss: int | None
    state_names: dict[int, tuple[str, ...]]
    sizes: DynamicSizes | None = None
    state: PythonState = NO_STATE
    buffers: tuple[Key, ...] = ()
    buffer_updates: tuple[BufferUpdate, ...] = ()
    num_answered: int | None = None
    ending: ErrorAtEnd | None = None

    @property
    def asks(self) -> bool:
        """Whether it gives values that the code asks for, without which it cannot go on."""
        return self.num_answered is not None

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes that forward and loss leave in the Python values around them."""
        return self.state.changes

    @property
    def is_other_after(self) -> bool:
        """Whether the next call may find another state than this one did."""
        is_read = any(change.is_read for change in self.state.changes)
        return is_read or self.state.calls.are_other_after

    @cached_property
    def loss_node(self) -> int | None:
        """The node that computes the loss."""
        return None if self.loss is None else self.outputs[self.loss].node

    @cached_property
    def fx_nodes(self) -> dict[str, torch.fx.Node]:
        """The nodes of ``fx_graph`` by name; looked up once for all segments."""
        return {node.name: node for node in self.fx_graph.nodes}

    @cached_property
    def written_buffers(self) -> frozenset[str]:
        """Names of the buffers that it modifies in place."""
        roots = alias_roots(self.fx_graph)
        operands = {o for node in self.fx_graph.nodes for o in written_operands(node)}
        written = {root.name for operand in operands for root in roots[operand]}
        return frozenset(node.target for node in self._buffers if node.name in written)

    @cached_property
    def left_buffers(self) -> frozenset[str]:
        """Names of the buffers that it modifies in place, and then assigns another tensor to."""
        left = {name for name, node in self.fx_nodes.items() if node.meta.get(MODIFIED)}
        return frozenset(node.target for node in self._buffers if node.name in left)

    @property
    def _buffers(self) -> Iterator[Node]:
        return (node for node in self.nodes if node.kind is NodeKind.BUFFER)

    @cached_property
    def draws_from_process(self) -> bool:
        """Whether an operation may draw from Python's or NumPy's generator."""
        return any(node.draws_from_process for node in self.nodes)

    @cached_property
    def has_replicas(self) -> bool:
        """Whether ``gs.place`` and ``gs.op`` have placed operations on several workers."""
        return any(n.annotation is not None and n.annotation.replicas for n in self.nodes)

    @cached_property
    def entered(self) -> dict[int, int]:
        """Inputs that gradients flow into: their places among the arguments, by node."""
        found = {p: n for p, n in enumerate(self.nodes) if n.kind is NodeKind.INPUT}
        return {p: int(node.target) for p, node in found.items() if node.requires_grad}

    @cached_property
    def positions(self) -> dict[str, int]:
        """The positions of the nodes, by name."""
        return {node.name: position for position, node in enumerate(self.nodes)}

    @cached_property
    def modified(self) -> frozenset[int]:
        """State and inputs whose memory an operation modifies."""
        shared = {p for node in self.nodes for p, _ in node.shares_modified}
        kept = (NodeKind.PARAMETER, NodeKind.BUFFER, NodeKind.INPUT)
        return frozenset(p for p in shared if self.nodes[p].kind in kept)

    @cached_property
    def touching(self) -> dict[int, frozenset[int]]:
        """For each of ``modified``, the operations that read or write its memory or views of it."""
        memories: dict[int, set[int]] = {}  # of each operation, which of the modified ones
        touching: dict[int, set[int]] = {value: set() for value in sorted(self.modified)}
        for position, node in enumerate(self.nodes):
            shared = {p for p, _ in node.shares_modified}
            written = shared & self.modified
            found = written.union(*(memories.get(p, ()) for p in shared))
            found.update(self.modified.intersection(node.reads))
            if found:
                memories[position] = found
            for value in found:
                touching[value].add(position)
            if node.changes_inputs:  # runs after all that have read the memory, if through views
                for value in written:
                    touching[value].update(node.runs_after)
        return {value: frozenset(positions) for value, positions in touching.items()}

    @cached_property
    def given_roots(self) -> frozenset[int]:
        """Outputs whose gradients come from outside: of a network that the script calls."""
        if self.mode is not Mode.CALL:
            return frozenset()
        found = {output.node for output in self.outputs if output.node is not None}
        return frozenset(
            p
            for p in found
            if self.nodes[p].requires_grad and self.nodes[p].kind is not NodeKind.INPUT
        )

    @property
    def has_gradients(self) -> bool:
        """Whether running it backward makes any gradient."""
        loss = self.loss_node
        is_trained = loss is not None and self.nodes[loss].requires_grad
        return (self.mode is Mode.TRAIN and is_trained) or bool(self.given_roots)

    def has_terms_before(self, value: int) -> bool:
        """Whether a sum of a value's gradients begins with what comes from outside the graph.

        The script uses an output, and may use an input, after the network; and of several calls
        under one backward, the gradients of the later ones come before those of the earlier ones.
        """
        is_shared = self.nodes[value].kind in (NodeKind.PARAMETER, NodeKind.INPUT)
        return self.mode is Mode.CALL and (is_shared or value in self.given_roots)

    def code_of_branches(self) -> list[str]:
        """The code of graphs inside this one: numbers stand in it that are no operand of it."""
        modules = self.fx_owner.named_modules() if self.fx_owner is not None else ()
        return [f"  {n}: {m.code}" for n, m in modules if n and isinstance(m, GraphModule)]

    def describe(self) -> str:
        """The graph as text, one line per node; part of the plan on which workers must agree."""
        lines = [f"graph {self.mode.value}"]
        for position, node in enumerate(self.nodes):
            flags = "".join(
                f" {name}"
                for name, on in (
                    ("random", node.is_random),
                    ("process-random", node.draws_from_process),
                    ("changes", node.changes_inputs),
                    ("grad", node.requires_grad),
                )
                if on
            )
            flags += f" [{node.region}]" if node.region != ORDINARY else ""
            after = f" after {list(node.runs_after)}" if node.runs_after else ""
            lines.append(
                f"  %{position} {node.name} = {node.kind.value} {node.target}({node.arguments}) "
                f": {node.meta}{flags}{after}  # {node.module_path}"
            )
        for name in sorted(self.constants):
            lines.append(f"  constant {name}: {_digest(self.constants[name])}")
        lines += self.code_of_branches()
        lines += [f"  leaves {change.told()}" for change in self.changes]
        lines += [
            f"  updates {' '.join(f.buffers)} beside {f.beside}: {f.update}"
            for f in self.buffer_updates
        ]
        outputs = ", ".join(
            repr(out.constant) if out.node is None else f"%{out.node}" for out in self.outputs
        )
        lines.append(f"  return {outputs}  # loss: {self.loss}")
        return "\n".join(lines)

    def runs_as(self, other: CapturedGraph) -> bool:
        """Whether plans of another graph, whose constants they hold, compute this one for ever.

        Constants that code makes are copied first, and stay as they are. A tensor of the user's may
        be written to later: it must be the same memory.
        """
        left, others_left = self.state.handed, other.state.handed
        if [one.where for one in left] != [one.where for one in others_left]:
            return False
        return self.describe() == other.describe() and all(
            _is_same_memory(constant, other.constants[name]) or self._is_made_by_code(name)
            for name, constant in self.constants.items()
        )

    def _is_made_by_code(self, constant: str) -> bool:
        position = self.positions[constant]
        readers = [node.target for node in self.nodes if position in node.reads]
        return all(target == "aten.lift_fresh_copy.default" for target in readers)


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (
        one.layout is other.layout is torch.strided
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0
        and one.storage_offset() == other.storage_offset()
        and one.stride() == other.stride()
    )


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(octets_of(tensor).numpy().tobytes()).hexdigest()[:16]
