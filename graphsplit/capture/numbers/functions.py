"""Uses of lifted numbers for which torch's symbols would need their values.

Four things look at the value of a number, and need not make it a constant of the graph:

* a question, ``if step / 1000 < 1``: the graph holds while the answer is the same. It is asked
  again as Python asks it. (torch asks sympy, which may write ``a + b - a`` as ``b``.)
* a function of ``math`` or ``numpy`` of plain numbers, ``float(beta)``, ``int(beta)``: it is done
  again with the numbers.
* arithmetic with floats: likewise. (For sympy ``(k + 1) - k`` is 1, and holds no ``k``.)
* an argument that an operation takes as a plain number, as the rate of a dropout: while it is
  recorded another number stands there, which occurs nowhere else, and by which it is found.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_aggregate

from graphsplit.capture.numbers.lifted import (
    Lifted,
    NotLiftedError,
    QuestionOfNumbers,
    computed,
    made,
    node_of,
)
from graphsplit.capture.numbers.texts import STAND_FOR_ISINSTANCE, is_instance
from graphsplit.guards.changes import Computed
from graphsplit.guards.classes import is_watchable_module
from graphsplit.guards.values import SYMBOLIC
from graphsplit.torch_ext.function_modes import TorchCalls
from graphsplit.torch_ext.replaced import Patch, replaced


def _turned(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The function with its two arguments in the other order."""

    def called(one: Any, other: Any) -> Any:
        return function(other, one)

    called.__name__ = f"turned_{function.__name__}"
    return called


_WHOLE = (int, torch.SymInt)
_ARITHMETIC = {
    name: function
    for one in (operator.add, operator.sub, operator.mul, operator.mod, operator.truediv)
    for name, function in ((f"__{one.__name__}__", one), (f"__r{one.__name__}__", _turned(one)))
}
_COMPARED = {f"__{one}__": getattr(operator, one) for one in ("eq", "ne", "lt", "le", "gt", "ge")}
# Of whole numbers torch's symbols do these as Python does, and know that they are sizes.
_EXACT = {*_ARITHMETIC.values(), *_COMPARED.values()} - {
    _ARITHMETIC[name] for name in ("__truediv__", "__rtruediv__")
}
_RECORDED_BY_TORCH = ("floor", "ceil", "trunc")
_OF_NUMPY = (
    "sqrt cbrt exp exp2 expm1 log log2 log10 log1p sin cos tan arcsin arccos arctan arctan2 sinh "
    "cosh tanh power float_power maximum minimum hypot deg2rad rad2deg sign square reciprocal "
    "interp"
)
_FUNCTIONS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    *(
        (math, name, function)
        for name, function in vars(math).items()
        if callable(function) and not name.startswith("__") and name not in _RECORDED_BY_TORCH
    ),
    *((np, name, getattr(np, name)) for name in _OF_NUMPY.split()),
    # torch rounds what it has divided, and a whole number not at all; and refuses powers of -1.
    *(
        (kind, name, function)
        for kind in (torch.SymFloat, torch.SymInt)
        for name, function in (
            *(*_ARITHMETIC.items(), *_COMPARED.items()),
            ("__floordiv__", operator.floordiv),
            ("__rfloordiv__", _turned(operator.floordiv)),
            ("__pow__", operator.pow),
            ("__rpow__", _turned(operator.pow)),
            ("__round__", round),
        )
    ),
    *((torch.SymFloat, "__neg__", operator.neg), (torch.SymFloat, "__abs__", abs)),
)
_ASKED: tuple[Patch, ...] = ((torch.SymBool, "__bool__"), (torch.SymFloat, "__bool__"))
# A module that is imported meanwhile keeps what is in place of a function of ``math``.
_here = threading.local()
_OF_ARGUMENTS = "python_arg_parser.h"  # where torch takes plain numbers from Python


@contextmanager
def computed_with(lifted: Lifted) -> Iterator[None]:
    """Let Python compute with lifted numbers while a step is recorded.

    Raises:
        NotLiftedError: An operation that takes a number is not recorded with it.
    """
    if not lifted.places:
        yield
        return
    from graphsplit.torch_ext.exporting import SymNode

    found = _Arguments(lifted)
    with ExitStack() as stack:
        for owner, name, function in (*_FUNCTIONS, *_under_names_of_users()):
            was = getattr(owner, name)
            stack.enter_context(replaced(owner, name, _done_again(function, was)))
        for owner, name in _ASKED:
            stack.enter_context(replaced(owner, name, _asked(getattr(owner, name))))
        plain = SymNode.guard_float
        stack.enter_context(replaced(SymNode, "guard_float", found.given_by(plain)))
        if lifted.tensors:
            stack.enter_context(_AnswersForTensors(lifted))
        _here.lifted = lifted
        stack.callback(vars(_here).clear)
        yield
    recorded: Graph = get_proxy_mode().tracer.graph  # type: ignore[union-attr]
    found.put_numbers(recorded)


def _under_names_of_users() -> Iterator[tuple[ModuleType, str, Callable[..., Any]]]:
    """The functions that modules of the user's have as globals: ``from math import exp``."""
    known = {id(function): function for owner, _, function in _FUNCTIONS if owner in (math, np)}
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and is_watchable_module(module):
            for name, value in list(vars(module).items()):
                if id(value) in known:
                    yield module, name, known[id(value)]


def _done_again(function: Callable[..., Any], was: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(was)
    def called(*args: Any, **kwargs: Any) -> Any:
        is_exact = function in _EXACT and all(isinstance(one, _WHOLE) for one in args)
        if not kwargs and not is_exact and _are_lifted(args):
            return made(_here.lifted, function, args)
        return was(*args, **kwargs)

    return called


def _are_lifted(args: tuple[Any, ...]) -> bool:
    """Whether lifted numbers, and plain ones, are all that is there."""
    symbolic = [one for one in args if isinstance(one, SYMBOLIC)]
    is_here = bool(symbolic) and hasattr(_here, "lifted")
    if not is_here or not all(map(_is_plain, args)):
        return False
    try:
        return all(computed(one) is not None for one in symbolic)
    except NotLiftedError:  # a size
        return False


def _is_plain(one: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return all(_is_plain(item) and not isinstance(item, SYMBOLIC) for item in one)
    return isinstance(one, (int, float, np.generic, *SYMBOLIC))


def _asked(ask: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def called(number: Any) -> bool:
        if not _are_lifted((number,)):
            return ask(number)
        lifted: Lifted = _here.lifted
        question = QuestionOfNumbers.of(computed(number), lifted.values)
        lifted.questions.append(question)
        return question.answer

    return called


def _converting(kind: Any) -> type:
    """``float`` or ``int``, which makes a symbol of one."""

    class OfKind(type):
        def __call__(cls, *args: Any, **options: Any) -> Any:
            if len(args) == 1 and not options and hasattr(_here, "lifted"):
                args = (_number(args[0]),)
            if len(args) == 1 and not options and _are_lifted(args):
                return made(_here.lifted, kind, args)
            return kind(*args, **options)

        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, kind)

        def __subclasscheck__(cls, one: type) -> bool:
            return issubclass(one, kind)

    return OfKind(kind.__name__, (kind,), {})


def _number(value: Any) -> Any:
    """The number in a tensor of one element; else the value."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _is_instance(one: Any, kinds: Any) -> bool:
    if not _are_lifted((one,)):
        return is_instance(one, kinds)
    return bool(made(_here.lifted, isinstance, (one, kinds)))


STAND_FOR_ISINSTANCE.add(_is_instance.__code__)


CONVERSIONS: dict[str, Any] = {
    "float": _converting(float),
    "int": _converting(int),
    "isinstance": _is_instance,
}
"""Stand for Python's own among the globals of code that is recorded with lifted numbers."""


class _AnswersForTensors(TorchCalls):
    """Answers code that asks a tensor for its number, where a number is lifted that is in one."""

    def __init__(self, lifted: Lifted) -> None:
        super().__init__()
        self._lifted = lifted

    def called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function of torch."""
        if function is torch.Tensor.item:
            number = self._lifted.shown(args[0])
            if number is not args[0]:
                return number
        return function(*args, **kwargs)


class _Arguments:
    """The numbers that operations take as plain ones.

    Args:
        lifted: The numbers that are lifted.
    """

    def __init__(self, lifted: Lifted) -> None:
        self._lifted = lifted
        self._nodes: dict[float, Node] = {}  # by what stands there

    def given_by(self, plain: Callable[..., float]) -> Callable[..., float]:
        """Gives operations another number that is found again, in place of a lifted one."""

        def given(symbol: Any, file: str, line: int) -> float:
            number = torch.SymFloat(symbol)
            if not file.endswith(_OF_ARGUMENTS) or not _are_lifted((number,)):
                return plain(symbol, file, line)
            how, values = computed(number), self._lifted.values
            # A dropout at the rate 0 draws nothing, and hands out what it was given.
            is_zero = Computed(operator.eq, (how, 0.0))
            self._lifted.questions.append(QuestionOfNumbers.of(is_zero, values))
            standing = _beside(float(how.value(values)), len(self._nodes))
            self._nodes[standing] = node_of(number)
            return standing

        return given

    def put_numbers(self, graph: Graph) -> None:
        """Let operations take the numbers themselves.

        Raises:
            NotLiftedError: What stood for one of them was used in another way.
        """
        missing = set(self._nodes)

        def put(argument: Any) -> Any:
            if type(argument) is float and argument in self._nodes:
                missing.discard(argument)
                return self._nodes[argument]
            return argument

        for node in graph.nodes if self._nodes else ():
            node.args = map_aggregate(node.args, put)
            node.kwargs = map_aggregate(node.kwargs, put)
        if missing:
            raise NotLiftedError("an operation computes with a number before it is recorded")


def _beside(value: float, number: int) -> float:
    """A number close by, as no code has written it; towards zero, as a rate is at most one."""
    part = math.modf((number + 1) * 0.6180339887498949)[0]
    return value * (1 - part * 2.0**-20) if value else part * 2.0**-40
