"""How a value known at capture is made, so that it can be made again for other sizes.

With dynamic dimensions one graph serves many shapes. What the network's code asked of a known value
(``if mask.all():``) was answered for the sizes of the example; the graph holds for other sizes if
the answers are the same there. So every known value keeps its recipe: the function that made it,
with the recipes of its operands and with sizes as expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_aggregate

from graphsplit.torch_ext.private import leaves_of

Symbols = dict[Any, Any]


def evaluate(expression: Any, symbols: Symbols) -> Any:
    """The number, or the truth, that an expression is for some sizes."""
    if isinstance(expression, int) or getattr(expression, "is_Integer", False):
        return int(expression)
    if getattr(expression, "is_Boolean", False) and not expression.free_symbols:
        return bool(expression)
    from graphsplit.torch_ext.exporting import PythonReferenceAnalysis, sympy_interp

    return sympy_interp(PythonReferenceAnalysis, symbols, expression)


def expression_of(size: Any) -> Any:
    """A size as a number or an expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


@dataclass(frozen=True)
class _Size:
    """Stands for a size among the arguments of a recipe."""

    expression: Any


@dataclass(frozen=True, eq=False)
class Recipe:
    """How a known value is made.

    Attributes:
        function: What makes it.
        arguments: Its positional and keyword arguments; recipes stand for tensors.
        index: Which of several results it is.
        is_dynamic: Whether sizes that may change take part.
    """

    function: Callable[..., Any]
    arguments: Any
    index: int
    is_dynamic: bool

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        recipes: Mapping[torch.Tensor, Recipe],
        index: int = 0,
    ) -> Recipe:
        """The recipe for a result of a call whose tensors have recipes."""
        is_dynamic = False

        def keep(given: Any) -> Any:
            nonlocal is_dynamic
            if isinstance(given, torch.Tensor):
                is_dynamic |= recipes[given].is_dynamic
                return recipes[given]
            if isinstance(given, torch.SymInt):
                is_dynamic = True
                return _Size(expression_of(given))
            return given

        arguments = map_aggregate((args, dict(kwargs)), keep)
        return cls(function, arguments, index, is_dynamic)

    def make(self, symbols: Symbols, made: dict[Recipe, torch.Tensor]) -> torch.Tensor:
        """The value for some sizes; ``made`` holds what was made on the way."""
        if self not in made:
            args, kwargs = _filled_in(self.arguments, symbols, made)
            results = leaves_of(torch.Tensor, self.function(*args, **kwargs))
            made[self] = results[self.index]
        return made[self]


@dataclass(frozen=True)
class Question:
    """A question of a network's code about a known value, with the answer the graph rests on.

    Attributes:
        recipe: The value.
        function: The question, such as ``torch.Tensor.__bool__``.
        arguments: What else was given to it.
        answer: The answer.
    """

    recipe: Recipe
    function: Callable[..., Any]
    arguments: Any
    answer: Any

    def holds(self, symbols: Symbols, made: dict[Recipe, torch.Tensor]) -> bool:
        """Whether the answer is the same for some sizes."""
        args, kwargs = _filled_in(self.arguments, symbols, made)
        found = self.function(self.recipe.make(symbols, made), *args, **kwargs)
        return bool(found == self.answer)


def _filled_in(arguments: Any, symbols: Symbols, made: dict[Recipe, torch.Tensor]) -> Any:
    def fill(given: Any) -> Any:
        if isinstance(given, Recipe):
            return given.make(symbols, made)
        return evaluate(given.expression, symbols) if isinstance(given, _Size) else given

    return map_aggregate(arguments, fill)
