"""Turn in-place operations into ordinary ones where that changes no bit.

``y = relu_(x)`` becomes ``y = relu(x)`` and every later use of ``x`` becomes a use of ``y``, so
that a cut may fall between them. Left as they are: operations on parameters, buffers and inputs
(their change must last), on memory that other values still share, on views (autograd then goes
through the memory as a whole), and those whose ordinary form would give another dtype, other
strides, or a gradient by another formula (as for ``elu_``) or by none (as for ``copy_``). Where a
placement tears apart what is left, see `graphsplit.rewrite.functional`.

Operations like ``t_`` and ``squeeze_`` change no memory, but how a tensor looks at it. They always
become ordinary ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.fx import Graph, Node

from graphsplit.capture.opaque.handed_out import possible_memories
from graphsplit.capture.operations.effects import OWN_MEMORY, roots_of, written_operands
from graphsplit.capture.operations.opaque_call import opaque_call
from graphsplit.capture.operations.regions import region_of
from graphsplit.errors import CaptureError
from graphsplit.frames import users_line_of_node
from graphsplit.tensor_meta import is_dense
from graphsplit.torch_ext.attributes import operator_schema, overload_name
from graphsplit.torch_ext.fakes import on_fakes, value_of
from graphsplit.torch_ext.private import FakeTensor, OpOverload, has_kernel

# Their gradients have a formula of their own, by the result or the same, which gives the same bits.
_SAME_BITS = ("aten::leaky_relu_", "aten::hardtanh_", "aten::fill_")
_NEW_MEMORY = ("aten::resize_", "aten::resize_as_", "aten::set_")


def make_in_place_explicit(graph: Graph, *, state: AbstractSet[str] = frozenset()) -> None:
    """Rewrite a freshly exported graph, in one pass.

    Args:
        graph: The graph.
        state: Names of the placeholders that stand for parameters and buffers.

    Raises:
        CaptureError: An operation changes the size of memory, or the shape of a parameter or
            buffer.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    handed_out = _HandedOut(graph, position)
    roots: dict[Node, frozenset[Node]] = {}
    sharing: dict[Node, list[Node]] = {}  # for each root, the values so far that share its memory
    for node in graph.nodes:
        roots[node] = roots_of(node, roots)
        _refuse_new_memory(node, state)
        ordinary = _ordinary_form(node)
        if ordinary is not None and (
            _changes_shape_only(node)
            or (_may_change(node, roots, sharing, position) and not handed_out.is_seen_after(node))
        ):
            base = node.args[0]
            assert isinstance(base, Node)
            later = [user for user in base.users if position[user] > position[node]]
            for user in later:
                user.replace_input_with(base, node)
            if not _changes_shape_only(node):
                roots[node] = frozenset({node})
                node.meta[OWN_MEMORY] = True
            node.target = ordinary
        for root in roots[node]:
            sharing.setdefault(root, []).append(node)


class _HandedOut:
    """Memory that calls kept whole may have handed out; which they did is known when they run."""

    def __init__(self, graph: Graph, position: dict[Node, int]) -> None:
        self._position = position
        calls = any(opaque_call(node) is not None for node in graph.nodes)
        self._memories = possible_memories(graph) if calls else {}
        self._last_use = {
            node: max((position[user] for user in node.users), default=-1)
            for node in self._memories
        }

    def is_seen_after(self, write: Node) -> bool:
        """Whether others than the written value may see what an operation writes to it."""
        base = write.args[0]
        assert isinstance(base, Node)
        memories = self._memories.get(base, frozenset())
        return any(
            node is not base
            and node is not write
            and not memories.isdisjoint(others)
            and (node.op == "placeholder" or self._last_use[node] > self._position[write])
            and self._position[node] < self._position[write]
            for node, others in self._memories.items()
        )


def _may_change(
    node: Node,
    roots: dict[Node, frozenset[Node]],
    sharing: dict[Node, list[Node]],
    position: dict[Node, int],
) -> bool:
    base = node.args[0]
    assert isinstance(base, Node)
    if roots[base] != {base} or base.op == "placeholder":
        return False
    if not _same_in_region(node, roots[base]) or _is_summed_as_a_view(node, base, position):
        return False
    if any(_shared_later(node, base, sharing[root], position) for root in roots[base]):
        return False
    return _same_layout(node, base) and _ordinary_form_is_alike(node, base)


def _is_summed_as_a_view(node: Node, base: Node, position: dict[Node, int]) -> bool:
    """Whether the gradients of an operand's other uses may be summed in another order.

    What an operation composed of others gives may be a view inside, as of ``linear`` on three
    dimensions. Written to, its function is made anew, and the uses before keep the old one.
    """
    target = base.target
    is_composed = isinstance(target, OpOverload) and has_kernel(
        target.name(), "CompositeImplicitAutograd"
    )
    return is_composed and sum(position[user] < position[node] for user in base.users) > 1


def _changes_shape_only(node: Node) -> bool:
    return torch.Tag.inplace_view in getattr(node.target, "tags", ())


def _refuse_new_memory(node: Node, state: AbstractSet[str]) -> None:
    """Refuse operations that change what memory a tensor has, or how a parameter looks for good."""
    if not _changes_shape_only(node):
        return
    base, target = node.args[0], node.target
    assert isinstance(base, Node) and isinstance(target, OpOverload)
    line = users_line_of_node(node)
    if operator_schema(target).name in _NEW_MEMORY:
        raise CaptureError(
            f"{base.name} is given other memory in place ({target})\n  {line}\n"
            f"  Fix: make a new tensor of the size you need."
        )
    if base.name in state and _look(node) != _look(base):
        raise CaptureError(
            f"the parameter or buffer {base.name} is given another shape in place ({target}): from "
            f"{_look(base)} to {_look(node)}\n  {line}\n"
            f"  Fix: use the operation that returns a view, without the underscore."
        )


def _look(node: Node) -> tuple[str, str]:
    value = node.meta["val"]
    return str(list(value.shape)), str(list(value.stride()))


def _ordinary_form_is_alike(node: Node, base: Node) -> bool:
    """Whether the ordinary form gives its operand's look, and the same gradients.

    Both are run on fake tensors to see. Element-wise operations are run once for operands of the
    same kinds: their strides follow from those of the operands.
    """
    value = base.meta.get("val")
    if not isinstance(value, FakeTensor):
        return True
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value_of)
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return _is_alike(node, args, kwargs)
    kinds = (node.target, *map(_kind, args), *((name, _kind(kwargs[name])) for name in kwargs))
    if kinds not in _KNOWN:
        _KNOWN[kinds] = _is_alike(node, args, kwargs)
    return _KNOWN[kinds]


_KNOWN: dict[tuple[object, ...], bool] = {}


def _kind(operand: object) -> object:
    """The facts that an element-wise operation's dtype and gradient depend on."""
    if isinstance(operand, torch.Tensor):
        return operand.dtype, operand.dim() == 0
    return type(operand)


def _is_alike(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    value, ordinary, target = args[0], _ordinary_form(node), node.target
    assert ordinary is not None and isinstance(target, OpOverload)

    def run() -> tuple[Any, Any]:
        with torch.enable_grad():
            operands = [_with_gradient(arg) for arg in args]
            found = ordinary(*operands, **kwargs)
            return found, target(operands[0].clone(), *operands[1:], **kwargs)

    results = on_fakes(node, run)
    if results is None:  # what needs values stays as it is
        return False
    found, written = results
    if found.dtype != value.dtype or found.stride() != value.stride():
        return False
    same_bits = target.name().partition(".")[0] in _SAME_BITS
    return same_bits or _formula(found) == _formula(written)


def _with_gradient(operand: Any) -> Any:
    """An operand as it is where everything is trained."""
    if not isinstance(operand, torch.Tensor):
        return operand
    operand = operand.detach()
    return operand.requires_grad_() if operand.is_floating_point() else operand


def _formula(result: torch.Tensor) -> str:
    """The name of the gradient's function; operations with two formulas have two of them."""
    return result.grad_fn.name() if result.grad_fn is not None else ""


def _same_in_region(node: Node, bases: frozenset[Node]) -> bool:
    """Whether the blocks around an operation treat its ordinary form alike.

    Without autograd a value modified in place keeps its gradient, while a new one has none; and
    autocast knows some operations in their ordinary form only.
    """
    region, ordinary = region_of(node), _ordinary_form(node)
    assert ordinary is not None
    if region.grad_enabled is not None and any(
        region_of(base).grad_enabled != region.grad_enabled for base in bases
    ):
        return False
    return not any(
        has_kernel(ordinary.name(), f"Autocast{device.upper()}") for device, _ in region.autocasts
    )


def _ordinary_form(node: Node) -> OpOverload | None:
    """The out-of-place overload of an in-place operation that writes to its first operand only."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return None
    packet_name = operator_schema(target).name.split("::")[1]
    if not packet_name.endswith("_") or written_operands(node) != (node.args[0],):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), packet_name[:-1], None)
    overload = getattr(packet, overload_name(target), None) if packet is not None else None
    if not isinstance(overload, OpOverload) or operator_schema(overload).is_mutable:
        return None
    # The first operand may be `self` in one overload and `input` in the other; in `pow.Scalar` it
    # is a number.
    first, *others = operator_schema(target).arguments
    ordinary_first, *ordinary_others = operator_schema(overload).arguments
    names = [argument.name for argument in others]
    same = names == [argument.name for argument in ordinary_others]
    return overload if same and str(first.type) == str(ordinary_first.type) else None


def _shared_later(node: Node, base: Node, sharing: list[Node], position: dict[Node, int]) -> bool:
    """Whether memory of ``base`` is read later through another value than ``base`` itself.

    Values that nothing reads from here on are dropped from ``sharing``: no later question is about
    them, and a tall network has many.
    """
    here = position[node]
    while sharing:
        other = next((other for other in sharing if other is not base), None)
        if other is None:
            return False
        if any(position[user] > here for user in reversed(other.users)):
            return True
        sharing.remove(other)
    return False


def _same_layout(node: Node, base: Node) -> bool:
    meta = base.meta.get("val")
    if not isinstance(meta, torch.Tensor) or not is_dense(meta.shape, meta.stride()):
        return False
    for operand in node.all_input_nodes:
        value = operand.meta.get("val")
        if not isinstance(value, torch.Tensor) or operand is base:
            continue
        if value.dtype != meta.dtype and value.dtype != torch.bool:
            return False
        if value.shape == meta.shape and value.stride() != meta.stride():
            return False
    return True
