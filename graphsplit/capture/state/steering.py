"""Follow buffers whose values steer Python code, while that code is recorded.

``torch.export`` has no answer to ``if self.count < 3``. Where every worker has the buffer, there is
one: its number is read as an attribute would be, watched, lifted where that gives the same graph,
and what forward adds to it is left at each step, on every worker::

    self.count += 1               the number that is left, made of the one that was there
    if self.count % 4 == 0:       a condition on it
    beta ** self.count.item()     the number itself
    h * self.count                a constant of the graph, which holds for this number alone
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from graphsplit.capture.numbers.lifted import NotLiftedError
from graphsplit.guards.places import NUMBER_OF, Place, PlaceKind
from graphsplit.guards.tensor_attributes import Tensors
from graphsplit.guards.values import SYMBOLIC
from graphsplit.torch_ext.attributes import buffers_of
from graphsplit.torch_ext.function_modes import TorchCalls
from graphsplit.torch_ext.private import FakeTensor, disable_current_modes, pytree
from graphsplit.torch_ext.steering import recorded_apart

_QUESTIONS = ("item", "__bool__", "__int__", "__float__", "__index__", "tolist")
# Of whole numbers, what Python computes as torch does.
_EXACT: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne", "neg")},
    **{name: getattr(operator, name) for name in ("add", "sub", "mul")},
    "remainder": operator.mod,
    "mod": operator.mod,
    "floor_divide": operator.floordiv,
    "floordiv": operator.floordiv,
    "clone": lambda number: number,
    "detach": lambda number: number,
    "rsub": lambda one, other: other - one,
    "radd": lambda one, other: other + one,
    "rmul": lambda one, other: other * one,
}
_COMPARING = ("lt", "le", "gt", "ge", "eq", "ne")
_FOLLOWED = frozenset(
    (*_EXACT, "div", "true_divide", "truediv", "rtruediv", "pow", "rpow", "abs", "invert", "and",
     "or", "xor", "logical_and", "logical_or", "logical_not", "clamp", "minimum", "maximum", "min",
     "max", "to", "float", "int", "long", "bool", "double", "view", "reshape", "squeeze", "exp",
     "log", "sqrt", "cos", "sin", "tanh", "sigmoid", "floor", "ceil", "round", "all", "any")
)  # fmt: skip
_WRITING = {"add_": "add", "iadd": "add", "sub_": "sub", "isub": "sub", "mul_": "mul",
            "imul": "mul", "div_": "div", "itruediv": "div", "fill_": "", "copy_": "", "zero_": "",
            "clamp_": "clamp", "remainder_": "remainder", "imod": "remainder"}  # fmt: skip


@dataclass(frozen=True)
class _Known:
    """A value that is known: of a buffer that steers, or made of such.

    Attributes:
        number: The number, or a symbol.
        form: An empty tensor of its dtype and shape.
        origins: The buffers that it is made of.
    """

    number: Any
    form: torch.Tensor
    origins: frozenset[Any] = frozenset()


class Steering(TorchCalls):
    """Answers what is asked of buffers that steer, and computes with them, outside of the graph.

    Args:
        places: The place of each buffer's number, by the key of the buffer.
        standing: What stands for the buffers while code is recorded.
        note: ``note(place, is_read)``: called before a number is read, or another one is put there.

    Attributes:
        asked: The keys of the buffers of which something was asked.
    """

    def __init__(
        self,
        places: Mapping[tuple[int, str], Place],
        standing: Tensors,
        note: Callable[[Place, bool], None],
    ) -> None:
        super().__init__()
        self._places, self._note = places, note
        self._by_tensor: dict[int, tuple[Any, Any]] = {}
        self._known: Any = WeakTensorKeyDictionary()
        for key in places:
            self._by_tensor[id(standing[key])] = key, standing[key]
        self.asked: set[tuple[int, str]] = set()

    def called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function of torch; outside of the graph, if all its tensors are known."""
        given = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        known = [self._is_known(tensor) for tensor in given]
        if not any(known):
            return function(*args, **kwargs)
        name = getattr(function, "__name__", "").removeprefix("__").removesuffix("__")
        is_method = bool(args) and self._is_known(args[0])
        if all(known) and is_method:
            if f"__{name}__" in _QUESTIONS or name in _QUESTIONS:
                return self._answer(name, args[0])
            if name in _WRITING and id(args[0]) in self._by_tensor:
                self._write(function, name, args, kwargs)
                return args[0]
            if name in _FOLLOWED:
                return self._follow(function, name, args, kwargs)
        if name in ("get", "size", "dim", "numel"):  # attributes: dtype, shape
            return function(*args, **kwargs)
        if name.endswith("_") and is_method:
            raise NotLiftedError(f"{name} of a buffer whose value steers Python code")
        return function(*pytree.tree_map(self._constant, args), **kwargs)

    def settle(self, modules: Mapping[int, nn.Module]) -> None:
        """Take what forward has assigned to buffers as their new numbers."""
        for key, stand_in in list(self._by_tensor.values()):
            buffers = buffers_of(modules[key[0]])
            now = buffers.get(key[1])
            if now is stand_in:
                continue
            if not isinstance(now, torch.Tensor) or now not in self._known:
                self.asked.discard(key)
                raise NotLiftedError(f"buffer {key[1]!r} steers Python code, and gets a new tensor")
            self._put(key, self._known[now])
            buffers[key[1]] = stand_in

    def _is_known(self, value: Any) -> bool:
        is_tensor = isinstance(value, torch.Tensor)
        return is_tensor and (id(value) in self._by_tensor or value in self._known)

    def _of(self, tensor: torch.Tensor) -> _Known:
        if id(tensor) not in self._by_tensor:
            found: _Known = self._known[tensor]
            return found
        key, _ = self._by_tensor[id(tensor)]
        self._note(self._places[key], True)
        number = self._places[key].read()
        return _Known(number, _form(tensor), frozenset((key,)))

    def _answer(self, name: str, tensor: torch.Tensor) -> Any:
        known = self._of(tensor)
        self.asked |= known.origins
        number = known.number
        if name in ("item", "tolist"):
            return number if name == "item" or not known.form.dim() else [number]
        made: Any = {"bool": bool, "int": int, "float": float, "index": operator.index}[name]
        return made(number)

    def _follow(self, function: Any, name: str, args: Any, kwargs: Any) -> torch.Tensor:
        tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        known = [self._of(tensor) for tensor in tensors]
        origins = frozenset().union(*(one.origins for one in known))
        numbers = [self._of(v).number if self._is_known(v) else v for v in args]
        if any(isinstance(one.number, SYMBOLIC) for one in known):
            made = _Known(*_computed(name, numbers, known, kwargs), origins)
        else:
            with disable_current_modes(), torch.no_grad():
                filled, options = pytree.tree_map(self._real, (args, kwargs))
                result = function(*filled, **options)
                if not isinstance(result, torch.Tensor) or result.numel() != 1:
                    raise NotLiftedError(f"{name} of a buffer whose value steers Python code")
                made = _Known(result.item(), torch.empty_like(result), origins)
        with disable_current_modes():
            standing = torch.empty_like(made.form)
        self._known[standing] = made
        return standing

    def _write(self, function: Any, name: str, args: Any, kwargs: Any) -> None:
        key, _ = self._by_tensor[id(args[0])]
        form = _form(args[0])
        if name == "zero_":
            self._put(key, _Known(_of_dtype(0, form), form))
            return
        if not _WRITING[name]:
            value = args[1] if len(args) > 1 else next(iter(kwargs.values()))
            known = self._of(value) if isinstance(value, torch.Tensor) else _Known(value, form)
            self._put(key, known)
            return
        method = getattr(torch.Tensor, _WRITING[name])
        self._put(key, self._known[self._follow(method, _WRITING[name], args, kwargs)])

    def _put(self, key: tuple[int, str], known: _Known) -> None:
        place = self._places[key]
        self._note(place, False)
        number = known.number
        place.write(number if isinstance(number, SYMBOLIC) else _of_dtype(number, self._form(key)))

    def _form(self, key: tuple[int, str]) -> torch.Tensor:
        return next(_form(one) for known, one in self._by_tensor.values() if known == key)

    def _real(self, value: Any) -> Any:
        if not self._is_known(value):
            return value
        known = self._of(value)
        return torch.full_like(known.form, known.number)

    def _constant(self, value: Any) -> Any:
        """A constant of the graph, in place of a value that code computes with."""
        if not self._is_known(value):
            return value
        known = self._of(value)
        self.asked |= known.origins
        if isinstance(known.number, SYMBOLIC):
            raise NotLiftedError("a buffer whose value steers Python code is computed with")
        number = [known.number] if known.form.dim() else known.number
        return torch.tensor(number, dtype=known.form.dtype).reshape(known.form.shape)


def _form(tensor: torch.Tensor) -> torch.Tensor:
    with disable_current_modes():
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype)


def _of_dtype(number: Any, form: torch.Tensor) -> Any:
    """The number that a tensor holds when it is filled with one."""
    with disable_current_modes():
        return torch.full_like(form, number).item()


def _computed(
    name: str, numbers: list[Any], known: list[_Known], kwargs: Any
) -> tuple[Any, torch.Tensor]:
    """The result that Python computes with symbols of whole numbers, and its form."""
    form = known[0].form
    is_whole = all(one.form.dtype is torch.int64 for one in known) and not kwargs
    if name not in _EXACT or not is_whole or any(isinstance(n, float) for n in numbers):
        raise NotLiftedError(f"{name} of a buffer whose value steers Python code")
    dtype = torch.bool if name in _COMPARING else form.dtype
    with disable_current_modes():
        form = torch.empty(form.shape, dtype=dtype)
    return _EXACT[name](*numbers), form


@contextmanager
def buffers_followed(
    modules: Mapping[int, nn.Module],
    state: Tensors,
    keys: frozenset[tuple[int, str]],
    label_of: Callable[[int], tuple[str, str]],
    note: Callable[[Place, bool], None],
    standing: Tensors,
) -> Iterator[set[tuple[int, str]]]:
    """Follow some buffers inside; gives the keys of those of which something was asked.

    Args:
        modules: The modules by identity.
        state: Parameters and buffers, as they are outside.
        keys: The buffers to follow.
        label_of: The name for people, and the path, of the module with an identity.
        note: Called before a number is read, or another one is put there.
        standing: What stands for parameters and buffers inside.
    """
    places = {}
    for number, name in sorted(keys, key=lambda key: (label_of(key[0]), key[1])):
        if isinstance(standing.get((number, name)), FakeTensor):
            label, path = label_of(number)
            held = vars(modules[number])
            text = f"{NUMBER_OF}{label}.{name}"
            places[number, name] = Place(PlaceKind.NUMBER, held, name, text, module=path)
    steering = Steering(places, standing, note)
    with steering:
        yield steering.asked
        steering.settle(modules)


@contextmanager
def numbers_apart(
    modules: Mapping[int, nn.Module], state: Tensors, keys: frozenset[tuple[int, str]]
) -> Iterator[None]:
    """Let what is written to these buffers' numbers inside be written to no tensor."""
    with recorded_apart({(id(vars(modules[n])), name): state[n, name] for n, name in keys}):
        yield
