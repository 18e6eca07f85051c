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
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from graphsplit.capture.numbers.lifted import NotLiftedError
from graphsplit.capture.state.shown_numbers import (
    NumberCell,
    ShownNumber,
    as_held,
    form_of,
    may_be_run,
    run_on_numbers,
    written_name,
)
from graphsplit.guards.places import NUMBER_OF, Place, PlaceKind
from graphsplit.guards.tensor_attributes import Tensors
from graphsplit.guards.values import SYMBOLIC
from graphsplit.torch_ext.attributes import buffers_of, storage_of, writes_of
from graphsplit.torch_ext.function_modes import TorchCalls
from graphsplit.torch_ext.private import FakeTensor, disable_current_modes, pytree
from graphsplit.torch_ext.steering import recorded_apart

_QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "item": lambda number: number,
    "tolist": lambda number: number,
    "bool": bool,
    "int": int,
    "float": float,
    "index": operator.index,
}
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)  # bool is a mask
_Key = tuple[int, str]


class NotFollowedError(NotLiftedError):
    """A buffer cannot be followed: what is written to it is no number that is known.

    Attributes:
        keys: The buffer, or those that it is made of.
    """

    def __init__(self, text: str, keys: frozenset[_Key]) -> None:
        super().__init__(text)
        self.keys = keys


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
        places: Mapping[_Key, Place],
        standing: Tensors,
        note: Callable[[Place, bool], None],
    ) -> None:
        super().__init__()
        self._places, self._note = places, note
        self._standing = {key: standing[key] for key in places}
        self._cells: dict[NumberCell, _Key] = {}
        self._shown: Any = WeakTensorKeyDictionary()
        for key, tensor in self._standing.items():
            form = form_of(tensor)
            cell = NumberCell(None, form, frozenset((key,)))
            self._cells[cell], self._shown[tensor] = key, ShownNumber(cell, form)
        self._constants: list[tuple[torch.Tensor, int, NumberCell, int | None]] = []
        self.asked: set[_Key] = set()

    def called(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function of torch; outside of the graph, if all its tensors are known."""
        name = _name_of(function)
        if name in ("getitem", "setitem"):
            args = (args[0], self._as_index(args[1]), *args[2:])
        given = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        known = [one for tensor in given if (one := self._look(tensor)) is not None]
        if not known:
            return function(*args, **kwargs)
        first = self._look(args[0]) if args else None
        if first is not None and name in _QUESTIONS:
            return self._answer(name, first)
        if len(known) == len(given) and first is not None and may_be_run(name):
            return self._run(function, name, args, kwargs)
        if name in ("get", "size", "dim", "numel"):  # attributes: dtype, shape
            return function(*args, **kwargs)
        if name == "set" and len(known) == 2 and _is_same(*known):  # `buffer.data += 1` ends so
            return None
        self._check_not_written(function, name, args, kwargs)
        return self._run_on_constants(function, args, kwargs)

    def _check_not_written(self, function: Any, name: str, args: Any, kwargs: Any) -> None:
        is_setter = name in ("set", "delete")
        is_writing = is_setter or written_name(name) is not None
        places = (args[:1] if is_writing else (), kwargs.get("out"))
        written = [one for leaf in pytree.tree_leaves(places) if (one := self._look(leaf))]
        if written:
            text = f"{name} of a buffer whose value steers Python code"
            raise NotFollowedError(text, written[0].cell.origins)

    def settle(self, modules: Mapping[int, nn.Module]) -> None:
        """Take what forward has assigned to buffers as their new numbers.

        Raises:
            NotFollowedError: A buffer got what is no number that is known.
        """
        for constant, version, cell, num_writes in self._constants:
            is_stale = num_writes is not None and cell.num_writes != num_writes
            if writes_of(constant) != version or is_stale:
                raise NotFollowedError(
                    "a buffer whose value steers Python code is written to", cell.origins
                )
        shared = set(self._cells)
        for cell, key in list(self._cells.items()):
            buffers = buffers_of(modules[key[0]])
            now = buffers.get(key[1])
            if now is self._standing[key]:
                continue
            one = self._look(now)
            is_same = one is not None and one.cell is cell
            if one is None or not _has_form(one.form, cell.form) or one.cell in shared - {cell}:
                raise NotFollowedError(
                    f"buffer {key[1]!r} steers Python code, and gets a new tensor",
                    frozenset((key,)),
                )
            shared.add(one.cell)
            if not is_same:
                self._put(cell, self._read(one.cell))
            buffers[key[1]] = self._standing[key]

    def _look(self, value: Any) -> ShownNumber | None:
        """The number that a value shows, if that is known."""
        shown: ShownNumber | None = (
            self._shown.get(value) if isinstance(value, torch.Tensor) else None
        )
        return shown

    def _read(self, cell: NumberCell) -> Any:
        """The present number in a cell."""
        if cell not in self._cells:
            return cell.number
        place = self._places[self._cells[cell]]
        self._note(place, True)
        return place.read()

    def _as_index(self, value: Any) -> Any:
        """An index with numbers in place of the tensors for whose values torch asks."""
        if type(value) is tuple:
            return tuple(map(self._as_index, value))
        if isinstance(value, slice):
            ends = [(end, self._look(end)) for end in (value.start, value.stop, value.step)]
            return slice(*(end if one is None else self._answer("index", one) for end, one in ends))
        one = self._look(value)
        is_number = one is not None and not one.form.dim() and one.form.dtype in _INTEGERS
        return self._answer("index", one) if one is not None and is_number else value

    def _answer(self, name: str, shown: ShownNumber) -> Any:
        self.asked |= shown.cell.origins
        made = _QUESTIONS[name](self._read(shown.cell))
        for _ in shown.form.shape if name == "tolist" else ():
            made = [made]
        return made

    def _run(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        outcome = run_on_numbers(function, name, (args, kwargs), self._look, self._read)
        for cell, number in outcome.written.items():
            self._put(cell, number)
        if not isinstance(outcome.result, ShownNumber):
            return outcome.result
        with disable_current_modes():
            standing = torch.empty_like(outcome.result.form)
        self._shown[standing] = outcome.result
        return standing

    def _put(self, cell: NumberCell, number: Any) -> None:
        number = as_held(number, cell.form)
        cell.num_writes += 1
        if cell in self._cells:
            place = self._places[self._cells[cell]]
            self._note(place, False)
            place.write(number)
        else:
            cell.number = number

    def _run_on_constants(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Record a function, with constants of the graph in place of what it computes with."""
        made: list[tuple[torch.Tensor, NumberCell]] = []

        def constant(value: Any) -> Any:
            shown = self._look(value)
            if shown is None:
                return value
            number, form = self._read(shown.cell), shown.form
            if isinstance(number, SYMBOLIC):
                raise NotLiftedError("a buffer whose value steers Python code is computed with")
            new = torch.tensor(number, dtype=form.dtype).reshape(form.shape)
            made.append((new, shown.cell))
            return new

        args, kwargs = pytree.tree_map(constant, (args, kwargs))
        versions = [writes_of(new) for new, _ in made]
        result = function(*args, **kwargs)
        views = {
            storage_of(leaf)
            for leaf in pytree.tree_leaves(result)
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        }
        for (new, cell), version in zip(made, versions, strict=True):
            is_viewed = storage_of(new) in views
            self._constants.append((new, version, cell, cell.num_writes if is_viewed else None))
        return result


def _name_of(function: Any) -> str:
    """``add`` of ``Tensor.__add__``; the attribute's, of one that may be another tensor."""
    name = getattr(function, "__name__", "").removeprefix("__").removesuffix("__")
    attribute = getattr(getattr(function, "__self__", None), "__name__", "")
    return attribute if name == "get" and attribute in ("data", "T", "mT") else name


def _is_same(one: ShownNumber, other: ShownNumber) -> bool:
    return one.cell is other.cell and _has_form(one.form, other.form)


def _has_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and one.shape == other.shape


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
