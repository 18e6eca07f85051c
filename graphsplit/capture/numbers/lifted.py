"""Numbers that Python code reads, as operands of the graph instead of constants in it.

``beta *= 0.99`` between two steps would need a new graph each time. So a number that took a second
value is *lifted*: while the step is recorded a symbol stands in its place, what Python makes of it
is recorded, and each step computes with its present value. What the code asked of the symbol
(``if beta > 0.5``) was answered for its present value; each question is a condition under which the
graph holds. Where an answer is needed for good (an index), the condition is that the number
stays what it is: then it is no use to lift it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)

from graphsplit.capture.operations.opaque_call import Placeholder
from graphsplit.errors import CaptureError
from graphsplit.guards.changes import Computed
from graphsplit.guards.places import Place
from graphsplit.guards.values import SYMBOLIC, number_of
from graphsplit.torch_ext.attributes import writes_of
from graphsplit.torch_ext.private import HigherOrderOperator, OperatorBase, active_fake_mode


class NotLiftedError(CaptureError):
    """A number's value is needed, so that it cannot be an operand.

    Attributes:
        asked: The operation that makes it of a tensor's values, if there is one.
    """

    asked: Node | None = None


# Stands for a lifted number in a recorded graph: workers know its value.
NUMBER = Placeholder("graphsplit_number")
_here = threading.local()  # has the tracer, while numbers are lifted
_HOW = "graphsplit_computed"  # in the meta of a node


class _Function(HigherOrderOperator):
    """A function of plain numbers, in a recorded graph; workers do it for themselves."""

    def __init__(self, function: Callable[..., Any]) -> None:
        name = f"{getattr(function, '__module__', '')}_{function.__name__}".replace(".", "_")
        super().__init__(f"graphsplit_{name}", cacheable=False)  # type: ignore[no-untyped-call]
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args)


_functions: dict[Callable[..., Any], _Function] = {}


@dataclass(frozen=True)
class QuestionOfNumbers:
    """A question of Python code about lifted numbers, with the answer that the graph rests on.

    Attributes:
        how: How what was asked is made.
        answer: Whether it is true.
    """

    how: Computed
    answer: bool

    @classmethod
    def of(cls, how: Computed, values: Sequence[Any]) -> QuestionOfNumbers:
        """The question, with its answer for some values."""
        return cls(how, bool(how.value(values)))

    def holds(self, values: Sequence[Any]) -> bool:
        """Whether the answer is the same for others; not if Python has none."""
        try:
            return bool(self.how.value(values)) is self.answer
        except (ArithmeticError, ValueError, TypeError):
            return False


@dataclass
class Lifted:
    """The numbers that were lifted while one step was recorded.

    Attributes:
        places: Where they are kept.
        values: Their values while it was.
        symbols: The symbol of each.
        made: Symbols of what Python has made of them by functions.
        conditions: Expressions of symbols that must be true.
        questions: What was asked of them.
        tensors: By identity, the tensors that stand for those in tensors, each with its symbol.
    """

    places: tuple[Place, ...] = ()
    values: tuple[Any, ...] = ()
    symbols: list[Any] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)
    conditions: list[Any] = field(default_factory=list)
    questions: list[QuestionOfNumbers] = field(default_factory=list)
    tensors: dict[int, tuple[torch.Tensor, Any]] = field(default_factory=dict)

    def shown(self, value: Any) -> Any:
        """The number in a tensor that stands for one, unless code has written to it."""
        tensor, number = self.tensors.get(id(value), (None, None))
        return number if tensor is not None and not writes_of(tensor) else value


@contextmanager
def lifted_in_place(places: Sequence[Place]) -> Iterator[Lifted]:
    """Let places hold symbols while a step is recorded.

    Raises:
        NotLiftedError: A condition mixes a lifted number with sizes.
    """
    before = [place.read() for place in places]
    lifted = Lifted(tuple(places), tuple(map(number_of, before)))
    if not places:
        yield lifted
        return
    _here.tracer = get_proxy_mode().tracer  # type: ignore[union-attr]
    try:
        for index, (place, value) in enumerate(zip(places, lifted.values, strict=True)):
            number = _stand_in(value, lifted.symbols, NUMBER, (index,), f"lifted_{index}")
            if isinstance(before[index], torch.Tensor):
                tensor = as_tensor(number, before[index])
                lifted.tensors[id(tensor)] = tensor, number
                place.write(tensor)
            else:
                place.write(number)
        yield lifted
        _take_conditions(lifted)
    finally:
        del _here.tracer
        lifted.tensors.clear()
        for place, value in zip(places, before, strict=True):
            place.write(value)


def as_tensor(number: Any, form: torch.Tensor) -> torch.Tensor:
    """The tensor of one element that stands for one of the user's, in what is recorded."""
    made = torch.scalar_tensor(number, dtype=form.dtype)
    for _ in form.shape:
        made = torch.stack([made])
    return made


def made(lifted: Lifted, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The number, or the answer, that a function of plain numbers makes of lifted ones.

    Raises:
        NotLiftedError: It makes something else.
    """
    how = Computed(function, tuple(_of(node_of(a)) if _is_symbolic(a) else a for a in args))
    value = how.value(lifted.values)
    if isinstance(value, (bool, np.bool_)):
        lifted.questions.append(QuestionOfNumbers(how, bool(value)))
        return value
    if not isinstance(value, (int, float, np.number)):
        raise NotLiftedError(f"{function} makes a {type(value).__name__} of a number")
    if function not in _functions:
        _functions[function] = _Function(function)
    given = tuple(node_of(a) if _is_symbolic(a) else a for a in args)
    name = f"made_{len(lifted.made)}"
    return _stand_in(value, lifted.made, _functions[function], given, name)


def _stand_in(value: Any, symbols: list[Any], target: Any, args: Any, name: str) -> Any:
    """The symbolic number that stands for a value; its symbol is added to others."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    from graphsplit.torch_ext.exporting import ConstantSource

    fake_mode: Any = active_fake_mode()
    environment, tracer = fake_mode.shape_env, get_proxy_mode().tracer  # type: ignore[union-attr]
    source = ConstantSource(f"graphsplit_{name}")
    value = float(value) if isinstance(value, (float, np.floating)) else int(value)
    symbol = environment.create_unspecified_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
    symbols.append(symbol)
    make = (
        environment.create_symfloatnode
        if isinstance(value, float)
        else environment.create_symintnode
    )
    number = make(symbol, hint=value, source=source)
    given = tuple(Proxy(a, tracer) if isinstance(a, Node) else a for a in args)
    proxy = tracer.create_proxy("call_function", target, given, {}, name=name)
    track_tensor_tree(number, proxy, constant=None, tracer=tracer)
    return number


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, SYMBOLIC)


def _take_conditions(lifted: Lifted) -> None:
    """Take conditions on lifted numbers away from torch, which knows of no input behind them."""
    import sympy  # type: ignore[import-untyped]

    fake_mode: Any = active_fake_mode()
    environment = fake_mode.shape_env
    own, rest = set(lifted.symbols), []
    # Of NumPy's, torch itself has asked as if they were Python's.
    values = zip(lifted.symbols, lifted.values, strict=True)
    theirs = (s for s, value in values if not isinstance(value, (int, float)))
    apart = {*lifted.made, *theirs}
    for guard in environment.guards:
        found = guard.expr.free_symbols
        if not found.isdisjoint(apart):
            raise NotLiftedError(f"a condition on a number that is not plain: {guard.expr}")
        if not found & own:
            rest.append(guard)
        elif any(map(_is_rounded, sympy.preorder_traversal(guard.expr))):
            raise NotLiftedError(f"a condition on what arithmetic rounds: {guard.expr}")
        elif found <= own:
            lifted.conditions.append(guard.expr)
        else:
            raise NotLiftedError(f"a condition mixes a lifted number with sizes: {guard.expr}")
    environment.guards[:] = rest


def _is_rounded(expression: Any) -> bool:
    """Whether sympy may write it in another way, which gives another float: a + b - a as b."""
    import sympy

    return isinstance(expression, (sympy.Add, sympy.Mul, sympy.Pow)) and any(
        not symbol.is_integer for symbol in expression.free_symbols
    )


def computed(number: Any) -> Computed:
    """How a number is made of the lifted ones, from what was recorded.

    Raises:
        NotLiftedError: Something else takes part.
    """
    found: Computed = _of(node_of(number))
    return found


def node_of(number: Any) -> Node:
    """The node of a number in what is recorded."""
    # Code of PyTorch's that finds shapes may ask a number, while nothing is recorded.
    tracer: Any = vars(_here).get("tracer") or get_proxy_mode().tracer  # type: ignore[union-attr]
    slot = get_proxy_slot(number, tracer, None)
    if slot is None:
        raise NotLiftedError("a number was made in a way that was not recorded")
    node: Node = slot.force().node
    return node


def _of(node: Any) -> Any:
    if not isinstance(node, Node):
        return node
    if _HOW not in node.meta:  # what is used twice is made once
        node.meta[_HOW] = _how(node)
    return node.meta[_HOW]


def _how(node: Node) -> Computed:
    if node.target is NUMBER:
        return Computed(None, (node.args[0],))
    if isinstance(node.target, _Function):
        return Computed(node.target.function, tuple(map(_of, node.args)))
    if node.op != "call_function" or node.kwargs or isinstance(node.target, OperatorBase):
        error = NotLiftedError(f"a number is made by {node.target}")
        error.asked = node
        raise error
    return Computed(node.target, tuple(_of(argument) for argument in node.args))  # type: ignore[arg-type]
