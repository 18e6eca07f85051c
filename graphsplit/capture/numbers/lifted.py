"""Numbers that Python code reads, as operands of the graph instead of constants in it.

``beta *= 0.99`` between two steps would need a new graph each time. So a number that took a second
value is *lifted*: while the step is recorded a symbol stands in its place, what Python makes of it
is recorded, and each step computes with its present value. What the code asked of the symbol
(``if beta > 0.5``) was answered for its present value; each question is a condition under which the
graph holds. Where an answer is needed for good (``float(beta)``), the condition is that the number
stays what it is: then it is no use to lift it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)

from graphsplit.errors import CaptureError
from graphsplit.guards.changes import Computed
from graphsplit.guards.places import Place
from graphsplit.torch_ext.private import HigherOrderOperator, OperatorBase, active_fake_mode


class NotLiftedError(CaptureError):
    """A number's value is needed, so that it cannot be an operand.

    Attributes:
        asked: The operation that makes it of a tensor's values, if there is one.
    """

    asked: Node | None = None


class _Number(HigherOrderOperator):
    """Stands for a lifted number in a recorded graph; workers know its value, it never runs."""

    def __init__(self) -> None:
        super().__init__("graphsplit_number", cacheable=False)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("graphsplit_number is a placeholder")


NUMBER = _Number()


@dataclass
class Lifted:
    """The numbers that were lifted while one step was recorded.

    Attributes:
        places: Where they are kept.
        symbols: The symbol of each.
        conditions: Expressions of symbols that must be true.
    """

    places: tuple[Place, ...] = ()
    symbols: list[Any] = field(default_factory=list)
    conditions: list[Any] = field(default_factory=list)


@contextmanager
def lifted_in_place(places: Sequence[Place]) -> Iterator[Lifted]:
    """Let places hold symbols while a step is recorded.

    Raises:
        NotLiftedError: A condition mixes a lifted number with sizes.
    """
    lifted = Lifted(tuple(places))
    if not places:
        yield lifted
        return
    fake_mode: Any = active_fake_mode()
    environment, tracer = fake_mode.shape_env, get_proxy_mode().tracer  # type: ignore[union-attr]
    values = [place.read() for place in places]
    try:
        for index, (place, value) in enumerate(zip(places, values, strict=True)):
            place.write(_symbol(index, value, lifted, environment, tracer))
        yield lifted
        _take_conditions(lifted, environment)
    finally:
        for place, value in zip(places, values, strict=True):
            place.write(value)


def _symbol(index: int, value: Any, lifted: Lifted, environment: Any, tracer: Any) -> Any:
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    from graphsplit.torch_ext.private_symbolic import ConstantSource

    source = ConstantSource(f"graphsplit_lifted_{index}")
    value = float(value) if isinstance(value, float) else value  # NumPy's is one, too
    symbol = environment.create_unspecified_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
    lifted.symbols.append(symbol)
    make = (
        environment.create_symfloatnode
        if isinstance(value, float)
        else environment.create_symintnode
    )
    number = make(symbol, hint=value, source=source)
    proxy = tracer.create_proxy("call_function", NUMBER, (index,), {}, name=f"lifted_{index}")
    track_tensor_tree(number, proxy, constant=None, tracer=tracer)
    return number


def _take_conditions(lifted: Lifted, environment: Any) -> None:
    """Take conditions on lifted numbers away from torch, which knows of no input behind them."""
    import sympy  # type: ignore[import-untyped]

    own, rest = set(lifted.symbols), []
    for guard in environment.guards:
        found = guard.expr.free_symbols
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
    tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
    slot = get_proxy_slot(number, tracer, None)
    if slot is None:
        raise NotLiftedError("a number was made in a way that was not recorded")
    found: Computed = _of(slot.force().node)
    return found


def _of(node: Any) -> Any:
    if not isinstance(node, Node):
        return node
    if node.target is NUMBER:
        return Computed(None, (node.args[0],))
    if node.op != "call_function" or node.kwargs or isinstance(node.target, OperatorBase):
        error = NotLiftedError(f"a number is made by {node.target}")
        error.asked = node
        raise error
    return Computed(node.target, tuple(_of(argument) for argument in node.args))  # type: ignore[arg-type]
