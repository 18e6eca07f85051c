"""Answer questions about values that are known while a network is captured.

Capture runs a network on tensors without values, so ``if mask.all():`` has no answer there. Two
kinds of values are known all the same, and what is computed from them alone:

* masks of nothing but ones, as a tokenizer makes them for texts of one length. That an input is one
  is part of a batch's signature, so a graph is used for such batches only.
* what follows from shapes, such as ``torch.arange(x.shape[1])``.

transformers leaves a mask out where it masks nothing, and other kernels with other bits run; but it
does not ask a tensor that looks fake. So those whose value is known do not look fake to it.

With dynamic sizes one graph serves many shapes, and an answer may hold for one alone. The values
are those for the sizes of the example then, and what was asked is noted, to be asked again for
other sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx.node import map_aggregate
from torch.utils.weak import WeakTensorKeyDictionary

from graphsplit.capture.numbers.recipes import Question, Recipe
from graphsplit.torch_ext.attributes import schema_of, storage_of
from graphsplit.torch_ext.fakes import looks_real_to_transformers
from graphsplit.torch_ext.function_modes import TorchCalls
from graphsplit.torch_ext.private import disable_current_modes, leaves_of, pytree

_MOST_ELEMENTS = 1 << 18
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FACTORIES = ("arange", "zeros", "ones", "full", "eye", "tensor")
# Nothing random, nothing in place, nothing with an effect.
_FUNCTIONS = {
    "__getitem__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__and__",
    "__or__", "__xor__", "__invert__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__",
    "__rmul__", "__floordiv__", "__mod__", "__neg__", "eq", "ne", "lt", "le", "gt", "ge",
    "logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_and", "bitwise_or",
    "bitwise_not", "add", "sub", "rsub", "mul", "neg", "abs", "clamp", "floor_divide",
    "remainder", "where", "isin", "all", "any", "sum", "cumsum", "diff", "max", "min", "amax",
    "amin", "argmax", "argmin", "count_nonzero", "prod", "to", "type", "bool", "int", "long",
    "short", "byte", "type_as", "contiguous", "clone", "detach", "view", "reshape", "flatten",
    "unflatten", "expand", "expand_as", "permute", "transpose", "t", "squeeze", "unsqueeze",
    "narrow", "select", "index_select", "gather", "flip", "roll", "repeat", "repeat_interleave",
    "tile", "cat", "stack", "chunk", "split", "unbind", "broadcast_to", "broadcast_tensors",
    "pad", "tril", "triu", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
    "new_full", "numel", "size", "dim", "masked_fill", "sort", "argsort", "unique_consecutive",
    "unique", "nonzero", "argwhere", "masked_select", "bincount",
}  # fmt: skip
# The shapes of what they return depend on values, and it has memory of its own.
_SIZED_BY_VALUES = (
    "unique_consecutive", "unique", "nonzero", "argwhere", "masked_select", "bincount",
)  # fmt: skip
_WRITING = {
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__",
    "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
    "add_", "sub_", "mul_", "clamp_", "fill_", "zero_", "masked_fill_", "copy_",
}  # fmt: skip
_QUESTIONS = ("__bool__", "__int__", "__index__", "item", "tolist")


def is_all_ones(value: Any) -> bool:
    """Whether a value is a mask that masks nothing: whole numbers, two dimensions or more."""
    if not isinstance(value, torch.Tensor) or value.dtype not in _WHOLE or value.dim() < 2:
        return False
    if value.is_meta or value.numel() == 0 or int(value[(0,) * value.dim()]) != 1:
        return False
    return bool((value == 1).all())


class KnownValues(TorchCalls):
    """Follows known values through a network's code, and answers what is asked of them."""

    def __init__(self) -> None:
        super().__init__()
        self._real: Any = WeakTensorKeyDictionary()
        self._recipes: Any = WeakTensorKeyDictionary()
        self.questions: list[Question] = []

    def note_ones(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is nothing but ones."""
        args, kwargs = (tuple(tensor.shape),), {"dtype": tensor.dtype}
        self._real[tensor] = self._run_on_values(torch.ones, args, kwargs)
        self._recipes[tensor] = Recipe.of(torch.ones, args, kwargs, recipes=self._recipes)

    def knows(self, tensor: Any) -> bool:
        """Whether the value of a tensor is known."""
        return isinstance(tensor, torch.Tensor) and tensor in self._real

    def called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function, and note its result if it follows from known values."""
        name = getattr(function, "__name__", "")
        if name in _QUESTIONS and args and self.knows(args[0]):
            return self._answer(function, args, kwargs)
        given = pytree.tree_leaves((args, kwargs))
        if name in _FUNCTIONS or name in _FACTORIES:
            if self._are_known(given, name):
                return self._follow(function, name, args, kwargs)
        elif any(self.knows(value) for value in given) and _may_write(function, name, kwargs):
            if "out" in kwargs or not (name in _WRITING and self._may_be_run(given, name)):
                self._forget_memory_of(given)
            else:
                self._run_on_values(function, args, kwargs)
        return function(*args, **kwargs)

    def _answer(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        answer = self._run_on_values(function, args, kwargs)
        recipe = self._recipes[args[0]]
        if recipe.is_dynamic:
            self.questions.append(Question(recipe, function, (args[1:], kwargs), answer))
        return answer

    def _may_be_run(self, given: Sequence[Any], name: str) -> bool:
        """Whether to follow what is written into known values; recipes do not know of writes."""
        return not self._is_dynamic(given) and self._are_known(given, name)

    def _is_dynamic(self, *given: Any) -> bool:
        values = pytree.tree_leaves(given)
        return any(isinstance(value, torch.SymInt) for value in values) or any(
            self._recipes[value].is_dynamic for value in values if self.knows(value)
        )

    def _constant(self, value: Any) -> Any:
        """A known value that the graph holds as it is; ``value`` where it is no tensor."""
        if not isinstance(value, torch.Tensor):
            return value
        if not value.numel():  # a list would tell no more than the first size
            args: tuple[Any, ...] = (tuple(value.shape),)
            function: Callable[..., Any] = torch.zeros
        else:
            args, function = (value.tolist(),), torch.tensor
        kwargs: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        made = function(*args, **kwargs)
        self._real[made] = value
        self._recipes[made] = Recipe.of(function, args, kwargs, recipes=self._recipes)
        return made

    def _are_known(self, given: Sequence[Any], name: str) -> bool:
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        if any(isinstance(value, (torch.SymFloat, torch.SymBool)) for value in given):
            return False
        if any(_hint(value) is None for value in given if isinstance(value, torch.SymInt)):
            return False
        if not tensors:
            return name in _FACTORIES
        return all(tensor in self._real for tensor in tensors)

    def _follow(
        self,
        function: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        is_sized = name in _SIZED_BY_VALUES or (name == "__getitem__" and _has_mask(args[1]))
        if is_sized and not self._is_dynamic(args, kwargs):
            return pytree.tree_map(self._constant, self._run_on_values(function, args, kwargs))
        found = function(*args, **kwargs)
        results = leaves_of(torch.Tensor, found)
        if not results or not all(_is_small(result) for result in results):
            return found
        real = self._run_on_values(function, args, kwargs)
        reals = leaves_of(torch.Tensor, real)
        for index, (result, value) in enumerate(zip(results, reals, strict=True)):
            self._real[result] = value
            self._recipes[result] = Recipe.of(
                function, args, kwargs, recipes=self._recipes, index=index
            )
        return found

    def _run_on_values(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        real_args, real_kwargs = map_aggregate((args, kwargs), self._value)
        with disable_current_modes():
            return function(*real_args, **real_kwargs)

    def _value(self, given: Any) -> Any:
        if isinstance(given, torch.SymInt):
            return _hint(given)
        return self._real[given] if isinstance(given, torch.Tensor) else given

    def _forget_memory_of(self, given: Sequence[Any]) -> None:
        """Forget tensors that were written to, and those that share their memory."""
        touched = {storage_of(self._real[v]) for v in given if self.knows(v)}
        for tensor, value in list(self._real.items()):
            if storage_of(value) in touched:
                del self._real[tensor], self._recipes[tensor]


def _may_write(function: Any, name: str, kwargs: dict[str, Any]) -> bool:
    schema = schema_of(function)
    if schema is not None:
        return schema.is_mutable
    return "out" in kwargs or name in _WRITING or (name.endswith("_") and not name.endswith("__"))


def _has_mask(index: Any) -> bool:
    masks = (torch.bool, torch.uint8)
    return any(isinstance(i, torch.Tensor) and i.dtype in masks for i in pytree.tree_leaves(index))


def _hint(size: torch.SymInt) -> int | None:
    """The size in the example; None if it depends on values."""
    hint = size.node.hint
    return None if hint is None else int(hint)


def _is_small(result: torch.Tensor) -> bool:
    sizes: list[Any] = list(result.shape)
    numbers: list[Any] = [_hint(s) if isinstance(s, torch.SymInt) else s for s in sizes]
    return None not in numbers and math.prod(numbers) <= _MOST_ELEMENTS


@contextmanager
def answers_known_values(ones: Sequence[torch.Tensor]) -> Iterator[list[Question]]:
    """Answer questions about known values inside.

    Args:
        ones: The inputs of the capture that stand for masks of nothing but ones.

    Yields:
        The questions whose answers other sizes may change, as they are asked.
    """
    known = KnownValues()
    for tensor in ones:
        known.note_ones(tensor)
    with known, looks_real_to_transformers(known.knows):
        yield known.questions
