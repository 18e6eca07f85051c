"""Effects of an operation besides its value: randomness, mutation, aliasing.

All questions are answered from the operator's own schema and tags; higher-order operations are
answered by their subgraphs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from graphsplit.capture.operations.memory_calls import KeepVersion, MemoryCall
from graphsplit.capture.operations.opaque_call import OpaqueCall, opaque_call, operands_at
from graphsplit.torch_ext.attributes import by_name, schema_of, storage_of
from graphsplit.torch_ext.private import FakeTensor, OpOverload, has_kernel, pytree

# Operators whose schema does not say that they write to their running statistics:
# name -> (position of the flag that turns it on, positions of what is written).
HIDDEN_WRITES: dict[str, tuple[int, tuple[int, ...]]] = {
    "aten::batch_norm": (5, (3, 4)),
    "aten::native_batch_norm": (5, (3, 4)),
    "aten::cudnn_batch_norm": (5, (3, 4)),
    "aten::miopen_batch_norm": (5, (3, 4)),
    "aten::instance_norm": (5, (3, 4)),
}
# Operators that stand for others, all of which make new memory.
_MAKE_MEMORY = {
    *("aten::linear", "aten::matmul", "aten::conv1d", "aten::conv2d", "aten::conv3d"),
    *("aten::max_pool1d", "aten::max_pool2d", "aten::max_pool3d", "aten::avg_pool1d"),
    *(f"aten::adaptive_avg_pool{dims}d" for dims in (1, 2, 3)),
    *("aten::softmax.int", "aten::log_softmax.int", "aten::cross_entropy_loss"),
    *("aten::batch_norm", "aten::layer_norm", "aten::group_norm", "aten::rms_norm"),
    *("aten::scaled_dot_product_attention", "aten::nll_loss", "aten::embedding_bag"),
}
# In ``Node.meta``: set where an in-place operation has become one that makes memory of its own. Its
# fake tensor, and those of views of it, still lie where the operand lies.
OWN_MEMORY = "graphsplit_own_memory"
# Operators that draw only if an argument says so: name -> test of (arguments by name).
_DROPOUTS = (
    "aten::dropout",
    "aten::feature_dropout",
    "aten::alpha_dropout",
    "aten::feature_alpha_dropout",
    "aten::native_dropout",
)


def _argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def _nodes_in(value: Any) -> list[Node]:
    several = value if isinstance(value, (list, tuple)) else [value]
    return [one for one in several if isinstance(one, Node)]


def subgraphs(node: Node) -> Iterator[tuple[torch.fx.GraphModule, tuple[Node, ...]]]:
    """Subgraphs of a higher-order operation, each with the operands that feed its inputs."""
    operands = tuple(n for n in node.all_input_nodes if n.op != "get_attr")
    owner = node.graph.owning_module
    for found in node.all_input_nodes:
        if found.op == "get_attr" and isinstance(owner, nn.Module):
            module = getattr(owner, str(found.target), None)
            if isinstance(module, torch.fx.GraphModule):
                yield module, operands


def is_random(node: Node) -> bool:
    """Whether an operation draws from the default generator."""
    if node.op != "call_function":
        return False
    call = opaque_call(node)
    if call is not None:
        return call.traits.is_random
    if isinstance(node.target, MemoryCall):
        return node.target.is_random
    for module, _ in subgraphs(node):
        if any(is_random(inner) for inner in module.graph.nodes):
            return True
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    if node.kwargs.get("generator") is not None:
        return False
    schema = schema_of(node.target)
    name = schema.name if schema is not None else ""
    if name in _DROPOUTS:
        probability, train = _argument(node, 1, "p"), _argument(node, 2, "train")
        return bool(train) and probability != 0
    if name == "aten::scaled_dot_product_attention":
        return bool(_argument(node, 4, "dropout_p", 0.0) != 0)
    return True


def draws_from_process(node: Node) -> bool:
    """Whether an operation may draw from Python's or NumPy's generator of the process."""
    made_of = node.target.target if hasattr(node.target, "target") else node.target
    return isinstance(made_of, OpaqueCall) and made_of.traits.draws_from_process


def written_operands(node: Node) -> tuple[Node, ...]:
    """The operands that an operation modifies in place."""
    if node.op != "call_function":
        return ()
    call = opaque_call(node)
    if call is not None:
        return tuple(dict.fromkeys(operands_at(node, call.traits.written)))
    if isinstance(node.target, MemoryCall):
        return tuple(node.all_input_nodes[:1]) if isinstance(node.target, KeepVersion) else ()
    written: list[Node] = []
    for module, operands in subgraphs(node):
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        feeds = dict(zip(placeholders, operands[-len(placeholders) :], strict=False))
        inner_roots = alias_roots(module.graph)
        for inner in module.graph.nodes:
            for operand in written_operands(inner):
                written += [feeds[root] for root in inner_roots[operand] if root in feeds]
    schema = schema_of(node.target)
    if schema is None:
        return tuple(dict.fromkeys(written))
    given = by_name(schema, node.args, node.kwargs)
    for name in written_arguments(schema, given):
        written += _nodes_in(given.get(name))
    return tuple(dict.fromkeys(written))


def written_arguments(schema: torch.FunctionSchema, given: Mapping[str, Any]) -> list[str]:
    """The arguments that an operator modifies, by name, of those that it is given."""
    names = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    if schema.name in HIDDEN_WRITES:
        flag, positions = HIDDEN_WRITES[schema.name]
        if given.get(schema.arguments[flag].name):
            names += [schema.arguments[position].name for position in positions]
    return names


def aliased_operands(node: Node) -> tuple[Node, ...]:
    """Operands whose memory the result may share."""
    if node.op != "call_function" or node.meta.get(OWN_MEMORY):
        return ()
    call = opaque_call(node)
    if call is not None:
        return operands_at(node, call.traits.aliased)
    if isinstance(node.target, MemoryCall):
        return tuple(node.target.aliased(node.args))
    schema = schema_of(node.target)
    if schema is None:  # getitem and other Python functions; higher-order operations
        return tuple(n for n in node.all_input_nodes if n.op != "get_attr")
    may_alias = torch.Tag.maybe_aliasing_or_mutating in getattr(node.target, "tags", ())
    may_alias = may_alias and schema.name not in HIDDEN_WRITES  # these have the tag for mutating
    found, given = list[Node](), by_name(schema, node.args, node.kwargs)
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None or (may_alias and position == 0):
            found += _nodes_in(given.get(argument.name))
    return tuple(found)


def alias_roots(graph: torch.fx.Graph) -> dict[Node, frozenset[Node]]:
    """For every node, the nodes whose memory it may share: itself where it made its own."""
    roots: dict[Node, frozenset[Node]] = {}
    for node in graph.nodes:
        roots[node] = roots_of(node, roots)
    return roots


def roots_of(node: Node, roots: Mapping[Node, frozenset[Node]]) -> frozenset[Node]:
    """The nodes whose memory a node may share, from those of the nodes before it.

    What the schema leaves open (``reshape`` may copy) is known from the fake tensors of capture.
    """
    found: set[Node] = set()
    for operand in aliased_operands(node):
        found |= roots[operand]
    found = {root for root in found if _may_share(node, root)}
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return frozenset(found or {node})
    # What an operation makes several of has memory of its own for each.
    producer = node.args[0]
    if found - {producer}:
        return frozenset(found - {producer})
    first = next(u for u in producer.users if u is node or _is_element_like(u, node))
    return roots[first] if first in roots else frozenset({node})


def never_written(graph: torch.fx.Graph) -> frozenset[str]:
    """Operations whose results nobody writes to, in the step or after it.

    ATen has made their memory, and neither parameters, inputs and outputs of the graph may lie in
    it, nor what an operation modifies. None where some operation does not say what it shares, or
    runs code that the graph does not show: that may keep what it sees, as an array of numpy.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if not all(map(_says_what_it_shares, calls)):
        return frozenset()
    roots: dict[Node, frozenset[Node]] = {}
    for node in graph.nodes:  # by the schemas alone: fake tensors are not asked what may be shared
        shared = frozenset[Node]().union(*(roots[operand] for operand in aliased_operands(node)))
        roots[node] = shared or frozenset({node})
    seen = {node for node in graph.nodes if node.op != "call_function"}
    seen.update(*(roots[node] for node in graph.output_node().all_input_nodes))
    seen.update(*(roots[written] for node in calls for written in written_operands(node)))
    return frozenset(node.name for node in calls if seen.isdisjoint(roots[node]))


def _says_what_it_shares(node: Node) -> bool:
    """Whether a result shares memory with operands only if the schema or a tag says so."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return target is operator.getitem
    if "unsafe" in target.name() or "lift" in target.name():
        return False
    is_taken_apart = has_kernel(target.name(), "CompositeImplicitAutograd")
    return not is_taken_apart or target.name() in _MAKE_MEMORY or bool(aliased_operands(node))


def _is_element_like(other: Node, node: Node) -> bool:
    """Whether two elements of one tuple share memory."""
    if other.target is not operator.getitem:
        return False
    if other.args[1] == node.args[1]:
        return True
    ours = _storages(node)
    return bool(ours) and not _storages(other).isdisjoint(ours)


def _may_share(node: Node, root: Node) -> bool:
    ours, its = _storages(node), _storages(root)
    return not ours or not its or not ours.isdisjoint(its)


def shares_memory(node: Node, other: Node) -> bool:
    """Whether two values of a captured graph are known to lie in the same memory."""
    return not _storages(node).isdisjoint(_storages(other))


def _storages(node: Node) -> frozenset[int]:
    """The memories of a node's fake tensors; none where that is not known of all of them."""
    found: set[int] = set()
    for leaf in pytree.tree_leaves(node.meta.get("val")):
        if not isinstance(leaf, FakeTensor) or leaf.layout is not torch.strided:
            return frozenset()
        found.add(storage_of(leaf))
    return frozenset(found)
