"""From an exported program to the frozen nodes of a ``CapturedGraph``."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node as FxNode

from graphsplit.capture.graph import LOSS_PATH, Node, NodeKind, Output
from graphsplit.capture.numbers.recipes import expression_of
from graphsplit.capture.numbers.sizes import check_known, is_number
from graphsplit.capture.operations.branch_calls import EnterBranches, Guarded
from graphsplit.capture.operations.effects import (
    HIDDEN_WRITES,
    alias_roots,
    draws_from_process,
    is_random,
    written_operands,
)
from graphsplit.capture.operations.memory_calls import MemoryCall
from graphsplit.capture.operations.opaque_call import OpaqueCall, opaque_call
from graphsplit.capture.operations.probe import Differentiation, Probe, makes_views
from graphsplit.capture.operations.regions import region_of
from graphsplit.capture.operations.shared_outputs import MemoryPart, parts_of
from graphsplit.errors import CaptureError
from graphsplit.frames import users_line_of_node
from graphsplit.marks.annotations import NODE_KEY, Annotation
from graphsplit.marks.wire import ROUND
from graphsplit.tensor_meta import SPARSE_FIX, TensorMeta, name_of_size
from graphsplit.torch_ext.attributes import schema_of
from graphsplit.torch_ext.private import OperatorBase
from graphsplit.torch_ext.steering import steers

_STATE_KINDS = {InputKind.PARAMETER: NodeKind.PARAMETER, InputKind.BUFFER: NodeKind.BUFFER}


class NodeBuilder:
    """Collects the nodes of an exported program in one pass over its graph.

    Args:
        program: What ``torch.export`` returned, in-place operations already made explicit.
        state: Every parameter and buffer by qualified name, tied ones under each of their names.
        with_gradients: Whether gradients flow at all (train mode).
        inputs_with_grad: The inputs that gradients flow into.

    Attributes:
        nodes: The nodes in program order.
        outputs: The flattened outputs.
        constants: The values of constants, by node name.
        state_names: For each state node, all its qualified names.
    """

    def __init__(
        self,
        program: ExportedProgram,
        state: Mapping[str, torch.Tensor],
        with_gradients: bool,
        inputs_with_grad: Collection[int] = (),
    ) -> None:
        self.nodes: list[Node] = []
        self.outputs: tuple[Output, ...] = ()
        self.sizes: dict[str, Any] = {}  # of outputs, and where these begin: expressions by name
        self.constants: dict[str, torch.Tensor] = {}
        self.state_names: dict[int, tuple[str, ...]] = {}
        self._program = program
        self._state = state
        self._with_gradients = with_gradients
        self._inputs_with_grad = inputs_with_grad
        self._probe = Probe(grad_enabled=with_gradients)
        self._position: dict[FxNode, int] = {}
        self._roots = alias_roots(program.graph)
        self._num_inputs = 0
        self._inputs = {
            spec.arg.name: spec
            for spec in program.graph_signature.input_specs
            if hasattr(spec.arg, "name")
        }
        self._by_tensor: dict[int, int] = {}
        self._names: dict[int, list[str]] = {}
        for name, tensor in state.items():
            self._names.setdefault(id(tensor), []).append(users_name(name))
        # Who last wrote to, and who has since read, each buffer's memory.
        self._writer: dict[FxNode, int] = {}
        self._readers: dict[FxNode, list[int]] = {}
        # Memory into which something with a gradient was written.
        self._written_with_grad: set[FxNode] = set()
        # For operations that return several tensors: which of them carry a gradient.
        self._elements_with_grad: dict[FxNode, tuple[bool, ...]] = {}

    def built(self) -> NodeBuilder:
        """Add all nodes of the graph."""
        for fx_node in self._program.graph.nodes:
            self.add(fx_node)
        return self

    def add(self, fx_node: FxNode) -> None:
        """Add the next node of the graph."""
        check_known(fx_node)
        if fx_node.op == "placeholder":
            self._add_placeholder(fx_node)
        elif is_number(fx_node):
            target = str(fx_node.meta["val"])
            self._append(fx_node, Node(fx_node.name, NodeKind.NUMBER, target))
        elif fx_node.op == "call_function":
            self._add_operation(fx_node)
        elif fx_node.op == "output":
            leaves = fx_node.args[0]
            assert isinstance(leaves, (tuple, list))
            parts = zip(leaves, self._parts(leaves), strict=True)
            self.outputs = tuple(self._output(leaf, part) for leaf, part in parts)

    def _output(self, leaf: Any, part: MemoryPart | None) -> Output:
        if isinstance(leaf, FxNode):
            value = leaf.meta.get("val")
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                sizes = map(expression_of, (*value.shape, *value.stride()))
                self.sizes |= {name_of_size(size): size for size in sizes}
            return Output(self._position[leaf], part=part)
        return Output(None, leaf)

    def _parts(self, leaves: Sequence[Any]) -> Sequence[MemoryPart | None]:
        positions = self._position.items()
        kinds = {fx_node: self.nodes[at] for fx_node, at in positions}
        inputs = {f: int(n.target) for f, n in kinds.items() if n.kind is NodeKind.INPUT}
        return parts_of(leaves, inputs, self.sizes)

    def _append(self, fx_node: FxNode, node: Node) -> None:
        self._position[fx_node] = len(self.nodes)
        self.nodes.append(node)

    def _add_placeholder(self, fx_node: FxNode) -> None:
        spec = self._inputs[fx_node.name]
        meta = _meta(fx_node)
        if spec.kind is InputKind.USER_INPUT:
            target = str(self._num_inputs)
            grad = self._num_inputs in self._inputs_with_grad
            self._num_inputs += 1
            made = Node(
                fx_node.name, NodeKind.INPUT, target, meta=meta, requires_grad=grad, asks_grad=grad
            )
            self._append(fx_node, made)
        elif spec.kind in _STATE_KINDS:
            self._add_state(fx_node, _STATE_KINDS[spec.kind], str(spec.target), meta)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            value = self._program.constants[str(spec.target)]
            check_dense(str(spec.target), value)
            self.constants[fx_node.name] = value
            self._append(
                fx_node, Node(fx_node.name, NodeKind.CONSTANT, str(spec.target), meta=meta)
            )
        else:
            raise CaptureError(
                f"the graph has an input of kind {spec.kind.name} ({fx_node.name}), which cannot "
                f"be sent between workers\n  Fix: pass tensors and plain Python values only."
            )

    def _add_state(
        self, fx_node: FxNode, kind: NodeKind, target: str, meta: TensorMeta | None
    ) -> None:
        tensor = self._state[target]
        if steers(tensor):
            if fx_node.users:
                raise CaptureError(
                    f"code that is kept whole uses buffer {users_name(target)!r}, whose value "
                    f"decides what other code does\n  Fix: keep all that uses it whole."
                )
            return
        known = self._by_tensor.get(id(tensor))
        if known is not None:  # a tied tensor: export makes one placeholder per name
            self._position[fx_node] = known
            return
        names = tuple(self._names[id(tensor)])
        self._by_tensor[id(tensor)] = len(self.nodes)
        self.state_names[len(self.nodes)] = names
        grad = self._with_gradients and tensor.requires_grad
        self._append(
            fx_node,
            Node(
                fx_node.name,
                kind,
                names[0],
                meta=meta,
                requires_grad=grad,
                asks_grad=tensor.requires_grad,
                module_path=names[0].rpartition(".")[0],
            ),
        )

    def _add_operation(self, fx_node: FxNode) -> None:
        operands = [n for n in _operands(fx_node) if n.op != "get_attr"]
        reads = tuple(self._position[n] for n in operands)
        meta = _meta(fx_node)
        written = written_operands(fx_node)
        runs_after, shares_modified = self._memory_order(operands, written)
        calls = (OperatorBase, OpaqueCall, MemoryCall)
        is_element = not isinstance(fx_node.target, calls)
        found = self._differentiation(fx_node, operands)
        requires_grad = self._requires_grad(fx_node, operands, meta, found)
        node = Node(
            name=fx_node.name,
            kind=NodeKind.OPERATION,
            target=str(fx_node.target) if not is_element else fx_node.target.__name__,  # type: ignore[union-attr]
            reads=reads,
            runs_after=runs_after,
            meta=meta,
            module_path=_module_path(fx_node),
            source=users_line_of_node(fx_node),
            annotation=_annotation(fx_node),
            is_random=is_random(fx_node),
            draws_from_process=draws_from_process(fx_node),
            with_producer=is_element and any(self.nodes[r].meta is None for r in reads),
            stays=isinstance(fx_node.target, EnterBranches)
            or self._rounds_a_result(fx_node, reads),
            wire=_wire(fx_node),
            changes_inputs=bool(written),
            shares_modified=shares_modified,
            requires_grad=requires_grad,
            asks_grad=requires_grad or self._asks_grad(fx_node, operands, meta, found),
            repeated=self._repeated(operands, found) if requires_grad else (),
            region=region_of(fx_node),
            arguments=_arguments(fx_node, self._position),
        )
        self._append(fx_node, node)
        if node.requires_grad and _says_what_it_writes(fx_node):
            self._note_written_with_grad(written)

    def _rounds_a_result(self, fx_node: FxNode, reads: tuple[int, ...]) -> bool:
        """Whether it rounds what another operation makes, so that fewer bytes leave that."""
        return _wire(fx_node) is not None and self.nodes[reads[0]].kind is NodeKind.OPERATION

    def _note_written_with_grad(self, written: tuple[FxNode, ...]) -> None:
        """``y[0] = w``: from now on ``y``, made without a gradient, carries that of ``w``."""
        for root in {r for n in written for r in self._roots[n]}:
            position = self._position[root]
            made = self.nodes[position]
            if made.is_state:
                continue
            self._written_with_grad.add(root)
            if made.kind is NodeKind.OPERATION:
                self.nodes[position] = dataclasses.replace(made, requires_grad=True, asks_grad=True)

    def _memory_order(
        self, operands: list[FxNode], written: tuple[FxNode, ...]
    ) -> tuple[tuple[int, ...], tuple[tuple[int, bool], ...]]:
        """Keep reads and writes of one memory in program order; note who shares what changed."""
        position = len(self.nodes)
        after: set[int] = set()
        shares: set[tuple[int, bool]] = set()
        written_roots = {root for n in written for root in self._roots[n]}
        for root in {r for n in operands for r in self._roots[n]}:
            is_state = root.op == "placeholder" and self.nodes[self._position[root]].is_state
            if root in self._writer:
                after.add(self._writer[root])
                shares.add((self._writer[root], is_state))
            if root in written_roots:
                after.update(self._readers.pop(root, ()))
                shares.add((self._position[root], is_state))
                self._writer[root] = position
            else:
                self._readers.setdefault(root, []).append(position)
        after -= {self._position[n] for n in operands}
        return tuple(sorted(after)), tuple(sorted(shares))

    def _differentiation(self, fx_node: FxNode, operands: list[FxNode]) -> Differentiation | None:
        if self._with_gradients:
            asking = {n: self._carries_grad(n) for n in operands}
        else:
            asking = {n: self.nodes[self._position[n]].asks_grad for n in operands}
        if not any(asking.values()) or not (self._with_gradients or makes_views(fx_node)):
            return None
        return self._probe.ask(fx_node, asking)

    def _asks_grad(
        self,
        fx_node: FxNode,
        operands: list[FxNode],
        meta: TensorMeta | None,
        found: Differentiation | None,
    ) -> bool:
        if self._with_gradients or (meta is not None and not meta.is_differentiable):
            return False
        if fx_node.target is operator.getitem:
            return self.nodes[self._position[operands[0]]].asks_grad
        return found is not None and any(found.carries_grad)

    def _carries_grad(self, operand: FxNode) -> bool:
        return self.nodes[self._position[operand]].requires_grad or (
            not self._written_with_grad.isdisjoint(self._roots[operand])
        )

    def _requires_grad(
        self,
        fx_node: FxNode,
        operands: list[FxNode],
        meta: TensorMeta | None,
        found: Differentiation | None,
    ) -> bool:
        if not self._with_gradients or (meta is not None and not meta.is_differentiable):
            return False
        if found is not None:
            if meta is None:
                self._elements_with_grad[fx_node] = found.carries_grad
            return any(found.carries_grad)
        if fx_node.target is operator.getitem and operands[0] in self._elements_with_grad:
            index = fx_node.args[1]
            assert isinstance(index, int)
            return self._elements_with_grad[operands[0]][index]
        target = str(fx_node.target)
        if target == "aten.detach.default":
            return False
        if region_of(fx_node).grad_enabled is False:
            return False
        return any(self._carries_grad(n) for n in operands)

    def _repeated(self, operands: list[FxNode], found: Differentiation | None) -> tuple[int, ...]:
        if found is None:  # elements have one operand; of higher-order operations nothing is known
            return tuple(sorted({self._position[n] for n in operands}))
        return tuple(sorted(self._position[n] for n in found.repeated))


def _says_what_it_writes(fx_node: FxNode) -> bool:
    """False of norms, which write running statistics: those never carry a gradient."""
    schema = schema_of(fx_node.target)
    return schema is None or schema.name not in HIDDEN_WRITES


def users_name(qualified: str) -> str:
    """A name as the user knows it: what is captured holds the network under ``network``."""
    first, _, rest = qualified.partition(".")
    if first == "loss_fn":
        return f"{LOSS_PATH}.{rest}" if rest else LOSS_PATH
    return rest


def _operands(fx_node: FxNode) -> list[FxNode]:
    """All operands, with repetitions: ``x * x`` reads ``x`` twice."""
    found: list[FxNode] = []

    def note(node: FxNode) -> FxNode:
        found.append(node)
        return node

    torch.fx.map_arg((fx_node.args, fx_node.kwargs), note)
    return found


def _meta(fx_node: FxNode) -> TensorMeta | None:
    value = fx_node.meta.get("val")
    return TensorMeta.of(value) if isinstance(value, torch.Tensor) else None


def _wire(fx_node: FxNode) -> torch.dtype | None:
    dtype = fx_node.args[1] if fx_node.target is ROUND else None
    assert dtype is None or isinstance(dtype, torch.dtype)
    return dtype


def _module_path(fx_node: FxNode) -> str:
    stack = fx_node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    if paths[-1:] == [""]:  # outside the network: a loss that is a function
        return LOSS_PATH
    return users_name(paths[-1]) if paths else ""


def _annotation(fx_node: FxNode) -> Annotation | None:
    noted = (fx_node.meta.get("custom") or {}).get(NODE_KEY)
    return Annotation(*noted) if noted is not None else None


def _arguments(fx_node: FxNode, position: dict[FxNode, int]) -> str:
    def name(node: FxNode) -> Any:
        return _Text(f"%{position[node]}" if node in position else str(node.target))

    args, kwargs = torch.fx.map_arg((fx_node.args, fx_node.kwargs), name)
    parts = [repr(a) for a in args] + [f"{k}={v!r}" for k, v in kwargs.items()]
    call = opaque_call(fx_node)
    if call is not None and call.text:
        parts.append(call.text)
    if isinstance(fx_node.target, Guarded):
        parts.append(fx_node.target.text())
    return ", ".join(parts)


class _Text(str):
    """A string whose ``repr`` has no quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def check_dense(name: str, value: torch.Tensor) -> None:
    """Refuse a tensor of a network that is not dense.

    Raises:
        CaptureError: It is sparse; names it.
    """
    if value.layout is not torch.strided:
        raise CaptureError(
            f"a tensor that the network holds ({name}) is of layout {value.layout}\n"
            f"  Fix: {SPARSE_FIX}"
        )
