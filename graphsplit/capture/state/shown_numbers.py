"""Numbers that tensors of one element show, and functions of torch run on them outside of a graph.

Several tensors may show one number: a buffer, ``buffer[0]``, ``buffer.view(1)``. So a number stands
in a cell, and what is written to one of them is written to all. Whether a result is such a view,
and which cells a function writes to, torch says itself: it is run on real tensors, one a cell.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphsplit.capture.numbers.lifted import NotLiftedError
from graphsplit.guards.values import SYMBOLIC
from graphsplit.torch_ext.attributes import writes_of
from graphsplit.torch_ext.private import disable_current_modes, pytree

# Of whole numbers, what Python computes as torch does.
_EXACT: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne", "neg")},
    **{name: getattr(operator, name) for name in ("add", "sub", "mul")},
    "remainder": operator.mod,
    "mod": operator.mod,
    "floor_divide": operator.floordiv,
    "floordiv": operator.floordiv,
    "clone": lambda number: number,
    "rsub": lambda one, other: other - one,
    "radd": lambda one, other: other + one,
    "rmul": lambda one, other: other * one,
}
_PUTTING = {"fill": 1, "copy": 1, "setitem": 2}  # which argument is the new number
VIEWING = frozenset(
    ("detach", "view", "reshape", "squeeze", "unsqueeze", "flatten", "getitem", "data", "T", "mT")
)
FOLLOWED = frozenset(
    (*_EXACT, *VIEWING, "div", "true_divide", "truediv", "rtruediv", "pow", "rpow", "abs", "invert",
     "and", "or", "xor", "logical_and", "logical_or", "logical_not", "clamp", "minimum", "maximum",
     "min", "max", "to", "float", "int", "long", "bool", "double", "exp", "log", "sqrt", "cos",
     "sin", "tanh", "sigmoid", "floor", "ceil", "round", "all", "any")
)  # fmt: skip


@dataclass(eq=False)
class NumberCell:
    """A number, or a symbol, and the form of what first showed it.

    Attributes:
        number: The number; that of a buffer is read where it is.
        form: An empty tensor of its dtype and shape.
        origins: The buffers that it is made of.
        num_writes: How often it was written to.
    """

    number: Any
    form: torch.Tensor
    origins: frozenset[Any] = frozenset()
    num_writes: int = 0


@dataclass(frozen=True)
class ShownNumber:
    """The number in a cell, in the form of a tensor that shows it."""

    cell: NumberCell
    form: torch.Tensor


@dataclass(frozen=True)
class ComputedNumbers:
    """The effect of a function on numbers.

    Attributes:
        result: What it returns: an argument, what a new tensor shows, or None.
        written: The new number of each cell that was written to.
    """

    result: torch.Tensor | ShownNumber | None
    written: Mapping[NumberCell, Any]


def written_name(name: str) -> str | None:
    """The function that computes what one writes in place: ``add`` of ``add_`` and ``iadd``."""
    if name == "setitem":
        return name
    if name.endswith("_"):
        return name[:-1]
    plain = name.removeprefix("i")
    return plain if plain != name and f"__i{plain}__" in dir(torch.Tensor) else None


def may_be_run(name: str) -> bool:
    """Whether a function may be run on numbers alone: it draws nothing, and asks for nothing."""
    return name in FOLLOWED or name == "zero_" or (written_name(name) in FOLLOWED | _PUTTING.keys())


def form_of(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor of the same dtype and shape."""
    with disable_current_modes():
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype)


def as_held(number: Any, form: torch.Tensor) -> Any:
    """The number that a tensor holds when it is filled with one.

    Raises:
        NotLiftedError: A symbol of another kind, which would be rounded.
    """
    if isinstance(number, SYMBOLIC):
        kinds = {torch.int64: torch.SymInt, torch.bool: torch.SymBool}
        if type(number) is not kinds.get(form.dtype):
            raise NotLiftedError("a number is rounded to what a buffer that steers Python holds")
        return number
    with disable_current_modes():
        return torch.full_like(form, number).item()


def run_on_numbers(
    function: Callable[..., Any],
    name: str,
    given: tuple[tuple[Any, ...], Mapping[str, Any]],
    shown: Callable[[Any], ShownNumber | None],
    read: Callable[[NumberCell], Any],
) -> ComputedNumbers:
    """Run a function of which all tensors show numbers.

    Args:
        function: The function of torch.
        name: Its name, without underscores around it.
        given: Its arguments, a tensor first.
        shown: What a value shows; None of what is no such tensor.
        read: The number in a cell; called only for those that decide what comes out.

    Raises:
        NotLiftedError: It cannot be computed so.
    """
    leaves = {id(v): (v, one) for v in pytree.tree_leaves(given) if (one := shown(v)) is not None}
    cells = list(dict.fromkeys(one.cell for _, one in leaves.values()))
    unread = _unread(name, given, leaves)
    numbers = {cell: 1 if cell in unread else read(cell) for cell in cells}
    is_symbolic = any(
        isinstance(v, SYMBOLIC) for v in (*pytree.tree_leaves(given), *numbers.values())
    )
    with disable_current_modes(), torch.no_grad():
        real = {c: torch.full_like(c.form, 1 if is_symbolic else numbers[c]) for c in cells}
        before = {cell: writes_of(tensor) for cell, tensor in real.items()}
        stands = {n: real[one.cell].view(one.form.shape) for n, (_, one) in leaves.items()}
        args, kwargs = pytree.tree_map(lambda v: _standing(v, stands), given)
        try:
            result = function(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise NotLiftedError(f"{_words(name)}: {error}") from None
        written = {c: t.item() for c, t in real.items() if writes_of(t) != before[c]}
        number = None
        if is_symbolic and name not in VIEWING:
            values = [numbers[leaves[id(v)][1].cell] if id(v) in leaves else v for v in given[0]]
            number = _computed(name, values, cells, given)
            written = dict.fromkeys(written, number)
        return ComputedNumbers(_result(name, result, (leaves, stands, real), number), written)


def _unread(
    name: str, given: Any, leaves: Mapping[int, tuple[Any, ShownNumber]]
) -> frozenset[NumberCell]:
    """The cells whose numbers do not matter: of a view, or put anew."""
    first, *others = [leaves[id(v)][1].cell for v in pytree.tree_leaves(given) if id(v) in leaves]
    if name == "setitem" and not _is_whole_index(given[0][1], leaves[id(given[0][0])][1].form):
        return frozenset()
    is_put = name == "zero_" or written_name(name) in _PUTTING
    return frozenset((first,)) - set(others) if is_put or name in VIEWING else frozenset()


def _standing(value: Any, stands: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, SYMBOLIC):
        return 1
    return stands.get(id(value), value)


def _result(name: str, result: Any, ran: Any, number: Any) -> torch.Tensor | ShownNumber | None:
    """The value for the user's code of a function that was run on real tensors."""
    leaves, stands, real = ran
    if result is None:
        return None
    if not isinstance(result, torch.Tensor) or result.numel() != 1:
        raise NotLiftedError(_words(name))
    for key, stand in stands.items():
        if result is stand:
            argument: torch.Tensor = leaves[key][0]
            return argument
    for cell, tensor in real.items():
        if result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            if result.dtype is not tensor.dtype:
                raise NotLiftedError(_words(name))
            return ShownNumber(cell, torch.empty_like(result))
    origins = frozenset().union(*(cell.origins for cell in real))
    form = torch.empty_like(result)
    return ShownNumber(NumberCell(result.item() if number is None else number, form, origins), form)


def _computed(
    name: str,
    numbers: Sequence[Any],
    cells: Sequence[NumberCell],
    given: tuple[Any, Mapping[str, Any]],
) -> Any:
    """The number that Python computes with symbols of whole numbers."""
    if name == "zero_":
        return 0
    plain = written_name(name)
    if plain in _PUTTING and not given[1]:
        if plain == "setitem" and not _is_whole_index(given[0][1], cells[0].form):
            raise NotLiftedError(_words(name))
        return numbers[_PUTTING[plain]]
    plain = name if name in _EXACT else plain
    is_whole = all(cell.form.dtype is torch.int64 for cell in cells) and not given[1]
    if plain not in _EXACT or not is_whole or any(isinstance(n, float) for n in numbers):
        raise NotLiftedError(_words(name))
    return _EXACT[plain](*numbers)


def _is_whole_index(index: Any, form: torch.Tensor) -> bool:
    """Whether an index takes the one element that there is; it is made of plain numbers."""
    if any(isinstance(v, (torch.Tensor, *SYMBOLIC)) for v in pytree.tree_leaves(index)):
        return False
    with disable_current_modes():
        return bool(torch.empty_like(form)[index].numel())


def _words(name: str) -> str:
    return f"{name} of a buffer whose value steers Python code"
