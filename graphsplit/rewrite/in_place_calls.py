"""The writes and results of an in-place operation, read off its schema."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from graphsplit.capture.operations.effects import HIDDEN_WRITES, written_operands
from graphsplit.capture.operations.memory_calls import filled
from graphsplit.tensor_meta import share_elements, spans_meet
from graphsplit.torch_ext.attributes import operator_schema, storage_of
from graphsplit.torch_ext.private import OpOverload, pytree

# Above so many elements, views are taken to overlap unless their ranges are apart.
_MAX_COMPARED = 1 << 20

# (operand, whether it is written to there) -> what stands for it
Marker = Callable[[Node, bool], Any]


@dataclass(frozen=True)
class WrittenCall:
    """An in-place operation taken apart.

    Attributes:
        args: Its arguments, each with whether it is written to.
        kwargs: Its keyword arguments, each with whether it is written to.
        same: Which of its results are operands themselves: by position, 0 for a single result.
        kept: Positions of the results that have memory of their own.
        kept_values: Fake tensors of these results.
        is_tuple: Whether it returns several.
    """

    args: tuple[tuple[Any, bool], ...]
    kwargs: dict[str, tuple[Any, bool]]
    same: dict[Any, Node]
    kept: tuple[int, ...]
    kept_values: tuple[Any, ...]
    is_tuple: bool

    def fill(self, marker: Marker) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with every operand replaced by what stands for it."""

        def of(value: Any, is_written: bool) -> Any:
            return filled(value, lambda operand: marker(operand, is_written), Node)

        args = tuple(of(value, is_written) for value, is_written in self.args)
        return args, {key: of(*argument) for key, argument in self.kwargs.items()}


def describe_write(node: Node, *, shares_written: Callable[[Node], bool]) -> WrittenCall:
    """Take an in-place operation apart.

    Args:
        node: The operation.
        shares_written: Whether a node shares the memory that is written to.
    """
    value = node.meta.get("val")
    is_tuple = isinstance(value, (tuple, list))
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    written = written_operands(node)
    if isinstance(node.target, OpOverload):
        flags = _flags(operator_schema(node.target))
        same = _same(node, operator_schema(node.target))
        shared = set(same)
    else:
        flags, same = {}, _same_by_layout(values, written)
        shared = {u.args[1] for u in node.users if shares_written(u)} if is_tuple else set()
        shared |= {0} if not is_tuple and shares_written(node) else set()
    names = list(flags)
    kept = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and i not in shared]

    def argument(value: Any, name: str | None) -> tuple[Any, bool]:
        return value, flags[name] if name in flags else _holds(value, written)

    return WrittenCall(
        tuple(argument(v, names[i] if names else None) for i, v in enumerate(node.args)),
        {key: argument(v, key) for key, v in node.kwargs.items()},
        same,
        tuple(kept),
        tuple(values[i] for i in kept),
        is_tuple,
    )


def _same_by_layout(values: Sequence[Any], written: Collection[Node]) -> dict[Any, Node]:
    """The results of a call without schema that look at the memory just as an operand does."""
    found: dict[Any, Node] = {}
    for position, value in enumerate(values):
        for operand in written:
            other = operand.meta.get("val")
            if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
                storages = {storage_of(v) for v in (value, other)}
                layout = _layout(value)
                is_alike = layout is not None and layout == _layout(other)
                if len(storages) == 1 and is_alike and value.dtype == other.dtype:
                    found[position] = operand
    return found


def _flags(schema: torch.FunctionSchema) -> dict[str, bool]:
    """For each argument, by name: whether it is written to."""
    hidden = HIDDEN_WRITES[schema.name][1] if schema.name in HIDDEN_WRITES else ()
    return {
        argument.name: position in hidden
        or (argument.alias_info is not None and argument.alias_info.is_write)
        for position, argument in enumerate(schema.arguments)
    }


def _same(node: Node, schema: torch.FunctionSchema) -> dict[Any, Node]:
    """The results that are operands which were written to, by position."""
    by_alias: dict[str, Node] = {}
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if info is not None and info.is_write and isinstance(value, Node):
            by_alias.update(dict.fromkeys(info.before_set, value))
    found: dict[Any, Node] = {}
    for position, returned in enumerate(schema.returns):
        aliases = returned.alias_info.before_set if returned.alias_info is not None else ()
        operands = [by_alias[name] for name in aliases if name in by_alias]
        if operands:
            found[position] = operands[0]
    return found


def reads_its_own_write(node: Node, operand: Node, written: Collection[Node]) -> bool:
    """Whether an operand overlaps with what the operation writes, so that it sees the write.

    An element-wise operation reads every element before it writes it, so there an operand that is
    the same view of the same memory does not.
    """
    tags = getattr(node.target, "tags", ())
    by_element = torch.Tag.pointwise in tags or node.target is torch.ops.aten.copy_.default
    return any(_overlap(operand, other, by_element) for other in written)


def _overlap(operand: Node, other: Node, by_element: bool) -> bool:
    one, two = operand.meta.get("val"), other.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return True
    if storage_of(one) != storage_of(two):
        return False
    layouts = [_layout(one), _layout(two)]
    if None in layouts or one.dtype != two.dtype:
        return True
    if layouts[0] == layouts[1]:
        return not by_element
    is_long = max(one.numel(), two.numel()) > _MAX_COMPARED
    return spans_meet(one, two) and (is_long or share_elements(one, two))


def _layout(value: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    numbers = [*value.shape, *value.stride(), value.storage_offset()]
    if not all(isinstance(number, int) for number in numbers):
        return None
    return tuple(value.shape), value.stride(), int(value.storage_offset())


def _holds(value: Any, nodes: Collection[Node]) -> bool:
    return any(leaf in nodes for leaf in pytree.tree_leaves(value) if isinstance(leaf, Node))
