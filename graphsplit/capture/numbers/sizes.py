"""Graphs for batches of many sizes: which sizes one holds for, and the numbers it computes of them.

With dynamic dimensions ``torch.export`` gives every size that may change a symbol, and notes every
condition on them that the code it ran depends on: ``if x.shape[1] > 10`` leaves ``s0 > 10``. A
graph holds for a batch if the conditions do. Numbers made of sizes (``x.shape[0] * 2``, ``1 / t``)
are computed by every worker for itself: all of them know the shapes of each batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.fx import Node as FxNode

from graphsplit.capture.numbers.lifted import NUMBER, Lifted, QuestionOfNumbers
from graphsplit.capture.numbers.recipes import Question, Recipe, Symbols, evaluate, expression_of
from graphsplit.errors import CaptureError, ConfigurationError
from graphsplit.frames import users_line_of_node
from graphsplit.guards.values import SYMBOLIC
from graphsplit.tensor_meta import bound_of
from graphsplit.torch_ext.private import pytree

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def is_number(node: FxNode) -> bool:
    """Whether a node of an exported graph is a number made of sizes."""
    return isinstance(node.meta.get("val"), SYMBOLIC)


def check_known(node: FxNode) -> None:
    """Refuse what only the values of a tensor decide: ``x.item()``, the size of ``x.nonzero()``.

    Raises:
        CaptureError: Names the user's line.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    from graphsplit.torch_ext.exporting import may_have_symbols

    value = node.meta.get("val")
    if not may_have_symbols(value):
        return
    if isinstance(value, (*SYMBOLIC, torch.Tensor)) and free_unbacked_symbols(value):
        what = "has a shape that depends" if isinstance(value, torch.Tensor) else "depends"
        raise CaptureError(
            f"the result of {node.target} {what} on the values of a tensor, not only on shapes\n"
            f"  {users_line_of_node(node)}\n"
            f"  Fix: keep the number in a tensor of no dimensions, use torch.where instead of "
            f"indexing by a mask, or keep this part whole with gs.opaque."
        )


def dynamic_shapes(arguments: Any, largest: Mapping[int, int]) -> Any:
    """The shapes that ``torch.export`` is told: which dimensions of each argument may change.

    Args:
        arguments: Example arguments.
        largest: By dimension, the largest size that it may have in any tensor.

    Raises:
        ConfigurationError: The example is larger than that.
    """
    from torch.export import Dim

    def of(leaf: Any) -> dict[int, Any] | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        # Sizes of 0 and 1 are planned for apart: PyTorch treats them in other ways.
        dynamic = (d for d in largest if d < leaf.dim() and leaf.shape[d] > 1)
        return {d: Dim.AUTO(max=largest[d]) for d in dynamic}

    check_sizes(pytree.tree_leaves(arguments), largest)
    return pytree.tree_map(of, arguments)


def check_sizes(leaves: Sequence[Any], largest: Mapping[int, int]) -> None:
    """Raise ``ConfigurationError`` if a tensor is larger than a dynamic dimension may be."""
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        for dimension, bound in largest.items():
            if dimension < leaf.dim() and leaf.shape[dimension] > bound:
                raise ConfigurationError(
                    f"tensor {position} of the batch has shape {list(leaf.shape)}, but "
                    f"dynamic_dims says that dimension {dimension} is at most {bound}\n"
                    f"  Fix: raise that number, or shorten the batch."
                )


@dataclass(frozen=True)
class DynamicSizes:
    """For which batches a graph holds, and how to compute its numbers.

    Attributes:
        inputs: For each flattened input, its sizes and strides as numbers or expressions; None for
            what is no tensor.
        ranges: The smallest and the largest value of every symbol.
        replaced: Symbols that a condition has made equal to an expression of those, with it: what
            was noted before names them still.
        conditions: Expressions that must be true.
        questions: What was asked of known values; the answers must be the same.
        lifted: The symbols of the numbers that Python holds, in their order.
        asked: What was asked of these; likewise.
        numbers: Names of the number nodes in program order, each with its expression, or with the
            function and the arguments that give it.
    """

    inputs: tuple[tuple[Any, ...] | None, ...]
    ranges: Mapping[Any, tuple[int, int]]
    replaced: tuple[tuple[Any, Any], ...]
    conditions: tuple[Any, ...]
    questions: tuple[Question, ...]
    lifted: tuple[Any, ...]
    asked: tuple[QuestionOfNumbers, ...]
    numbers: tuple[tuple[str, Any, tuple[Any, ...], dict[str, Any]], ...]

    @classmethod
    def of(
        cls, program: ExportedProgram, questions: Sequence[Question], lifted: Lifted
    ) -> DynamicSizes | None:
        """The numbers of a freshly exported program; None if it has none that may change."""
        nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
        user_inputs = set(program.graph_signature.user_inputs)
        values = [n.meta.get("val") for n in nodes if n.name in user_inputs or _is_plain(n)]
        sizes: list[Any] = [s for v in values if isinstance(v, torch.Tensor) for s in v.shape]
        symbolic = [size for size in sizes if isinstance(size, torch.SymInt)]
        if not symbolic and not lifted.symbols:
            return None
        inputs = tuple(
            (*map(expression_of, value.shape), *map(expression_of, value.stride()))
            if isinstance(value, torch.Tensor)
            else None
            for value in values
        )
        conditions, ranges = dict.fromkeys(lifted.conditions), {}
        replaced: tuple[tuple[Any, Any], ...] = ()
        if symbolic:
            environment: Any = symbolic[0].node.shape_env
            conditions.update(
                dict.fromkeys(environment.replace(g.expr) for g in environment.guards)
            )
            known = {symbol for leaf in inputs for size in leaf or () for symbol in _symbols(size)}
            _bound_strides(environment, values)
            bounds = ((symbol, environment.var_to_range[symbol]) for symbol in known)
            ranges = {symbol: (int(found.lower), int(found.upper)) for symbol, found in bounds}
            others = [one for one in environment.replacements if one not in known]
            pairs = ((one, environment.replace(one)) for one in others)
            replaced = tuple(pair for pair in pairs if known.issuperset(_symbols(pair[1])))
        numbers = tuple(_number(n) for n in program.graph.nodes if is_number(n))
        made_of, asked = tuple(lifted.symbols), tuple(lifted.questions)
        holds_if = tuple(conditions), tuple(questions)
        return cls(inputs, ranges, replaced, *holds_if, made_of, asked, numbers)

    def and_numbers(self, expressions: Mapping[str, Any]) -> DynamicSizes:
        """With further numbers, by name: those that follow from what a batch binds."""
        known = {*self.ranges, *self.lifted, *(one for one, _ in self.replaced)}
        found = ((name, one) for name, one in expressions.items() if _symbols(one))
        more: list[Any] = [(name, one, (), {}) for name, one in found if known >= _symbols(one)]
        return replace(self, numbers=(*self.numbers, *more))

    def bind(self, leaves: Sequence[Any], lifted: Sequence[Any] = ()) -> Symbols | None:
        """The symbols' values for a batch; None if the graph does not hold for it.

        Args:
            leaves: The flattened arguments; only shapes and strides of tensors are looked at.
            lifted: The values of the lifted numbers.
        """
        # x - x is 0 for a symbol, and no number for infinity; and a place may hold nothing yet.
        if not all(isinstance(value, Real) and math.isfinite(value) for value in lifted):
            return None
        if not all(question.holds(lifted) for question in self.asked):
            return None
        symbols: Symbols = dict(zip(self.lifted, lifted, strict=True))
        compound: list[tuple[Any, int]] = []
        for leaf, expected in zip(leaves, self.inputs, strict=True):
            if expected is None:
                continue
            for want, size in zip(expected, (*leaf.shape, *leaf.stride()), strict=True):
                if getattr(want, "is_Symbol", False) and want not in symbols:
                    symbols[want] = size
                else:
                    compound.append((want, size))
        for symbol, (low, high) in self.ranges.items():
            if symbol in symbols and not low <= symbols[symbol] <= high:
                return None
        symbols |= {one: evaluate(expression, symbols) for one, expression in self.replaced}
        if any(evaluate(want, symbols) != size for want, size in compound):
            return None
        if not all(evaluate(condition, symbols) for condition in self.conditions):
            return None
        made: dict[Recipe, torch.Tensor] = {}
        if not all(question.holds(symbols, made) for question in self.questions):
            return None
        return symbols

    def compute(self, symbols: Symbols) -> dict[str, Any] | None:
        """Every number of the graph, by the name of its node; None if Python cannot compute one."""
        try:
            return self._compute(symbols)
        except (ArithmeticError, ValueError, TypeError):  # the code itself will raise it
            return None

    def _compute(self, symbols: Symbols) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, how, args, kwargs in self.numbers:
            if callable(how):
                given = pytree.tree_map_only(_Of, lambda ref: found[ref.name], (args, kwargs))
                found[name] = how(*given[0], **given[1])
            else:
                found[name] = evaluate(how, symbols)
        return {name: _plain(number) for name, number in found.items()}


def _bound_strides(environment: Any, leaves: Sequence[Any]) -> None:
    """Give a largest value to strides that are numbers of their own, as of ``tokens[:, :-1]``.

    Buffers between workers are made for the largest layout. A batch beyond it gets another plan.
    """
    for leaf in leaves:
        for stride in leaf.stride() if isinstance(leaf, torch.Tensor) else ():
            symbol = expression_of(stride)
            found = environment.var_to_range.get(symbol)
            if found is not None and math.isinf(float(found.upper)):
                largest = 2 * max(_example(stride), math.prod(map(bound_of, leaf.shape)))
                environment.var_to_range[symbol] = type(found)(found.lower, largest)


def _example(size: Any) -> int:
    """A size in the batch that was recorded; to ask the size itself would fix it."""
    return int(size.node.hint)


@dataclass(frozen=True)
class _Of:
    """Stands for another number among the arguments of one."""

    name: str


def _plain(number: Any) -> Any:
    """A number as Python's own, which operations of torch take; NumPy computes with its own."""
    return number.item() if isinstance(number, np.generic) else number


def _is_plain(node: FxNode) -> bool:
    return not isinstance(node.meta.get("val"), torch.Tensor)


def _symbols(size: Any) -> Any:
    return getattr(size, "free_symbols", ())


def _number(node: FxNode) -> tuple[str, Any, tuple[Any, ...], dict[str, Any]]:
    """Sizes of tensors are known as expressions; what Python made of them is done again.

    sympy may write 0.1 * t * 0.3 as 0.03 * t, which is another number.
    """
    operands = node.all_input_nodes
    if node.target is NUMBER:
        return node.name, node.meta["val"].node.expr, (), {}
    if all(is_number(n) for n in operands):
        given: Any = torch.fx.map_arg((node.args, node.kwargs), _reference)
        return node.name, node.target, *given
    return node.name, node.meta["val"].node.expr, (), {}


def _reference(node: FxNode) -> Any:
    return _Of(node.name)
