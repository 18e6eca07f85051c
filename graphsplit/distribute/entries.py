"""``optimizer.state`` of a script's own loop: the entries of all workers, on every worker.

Each entry lives with its parameter. Torch and graphsplit see those of this worker. The script sees
all: a tensor in one is a value of the loop, and what it puts into one is kept by the owner. The
first look after a change asks what all workers have, as a look at ``p.grad`` does.
"""

from __future__ import annotations

import copy
import json
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from graphsplit.checkpoint.contents import parameters_of
from graphsplit.cluster.wire.messages import ASKING
from graphsplit.distribute.copies import make_copies
from graphsplit.distribute.parameters import in_loop
from graphsplit.distribute.values import LoopValue, as_value
from graphsplit.distribute.workers.asking import exchange
from graphsplit.distribute.workers.loop import Loop, shape_of
from graphsplit.distribute.workers.twins import Twin, is_shared
from graphsplit.errors import ConfigurationError, OwnershipError
from graphsplit.frames import is_users
from graphsplit.job.script import ModelCall
from graphsplit.optimizers.optimizer import order_of
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.torch_ext.attributes import storage_of
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass

_PLAIN = (type(None), bool, int, float, str)
_DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
_SAME = "="  # the form of a tensor that was there at the last look
_COUNT_OF_LISTED = max(map(sys.getrefcount, [{}]))  # of what stands in one list alone
_METHODS = (
    *("__getitem__", "__setitem__", "__delitem__", "__iter__", "__reversed__", "__len__"),
    *("__contains__", "__eq__", "__ne__", "__repr__", "__or__", "__ior__", "get", "pop"),
    *("popitem", "setdefault", "keys", "values", "items", "update", "clear", "copy"),
)
_WRITING = frozenset(_METHODS) & {
    *("__getitem__", "__setitem__", "__delitem__", "__ior__"),  # the first makes an entry
    *("pop", "popitem", "setdefault", "update", "clear"),
}


class Entries(defaultdict[Any, Any]):
    """The state of an optimizer between its steps, as the script sees it.

    Attributes:
        here: The entries of this worker, which torch and graphsplit see.
    """

    def __init__(
        self,
        here: Any,
        loop: Loop,
        optimizer: torch.optim.Optimizer,
        owners: Callable[[], Mapping[int, int]],
    ) -> None:
        super().__init__(dict)
        self.here, self._loop, self._owners_now = here, loop, owners
        self._optimizer = weakref.ref(optimizer)
        self._known: dict[Any, dict[Any, Any]] = {}  # what the owners have
        self._known_at = -1  # how many changes there were
        self._put_in: list[dict[Any, Any]] = []  # since the last step
        self._question = f"optimizer.state of {type(optimizer).__name__}"

    def __missing__(self, key: Any) -> Any:
        self[key] = {}  # graphsplit's file: in `here`
        return self.here[key]

    def __reduce__(self) -> Any:
        self.look()
        return defaultdict, (dict,), None, None, iter(list(dict.items(self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.look()
        return copy.deepcopy(defaultdict(dict, dict.items(self)), memo)

    def answer(self, kind: Any, holder: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """The answer of a method that the script calls; the same on all workers.

        Args:
            kind: Whose method it is.
            holder: All entries, or one of them.
            name: The method's name.
            *args: Its arguments.
            **kwargs: Those by name.

        Raises:
            OwnershipError: It is called in a hook, which one worker alone runs, and is about more
                than a parameter that lives there.
        """
        if self._loop.is_in_backward or self._loop.job.depth:
            return self._answer_alone(holder, name, args, kwargs)
        self.look()
        if holder is self and name == "__getitem__" and not dict.__contains__(self, args[0]):
            dict.__setitem__(self, args[0], {})
        result = getattr(kind, name)(holder, *args, **kwargs)
        if name in _WRITING:
            with torch.no_grad():
                self._put(list(dict.keys(self)) if holder is self else [holder.key])
            if name in ("__getitem__", "setdefault"):
                result = dict.__getitem__(holder, args[0])
        return result

    def look(self) -> None:
        """Collective: see what all workers have, if that may have changed."""
        if self._known_at != self._loop.num_changes:
            self._loop.job.script.collective(ModelCall(ASKING + self._question, self._learn))
            self._known_at = self._loop.num_changes

    def refuse_held(self) -> None:
        """Before a step: refuse dictionaries that were put in as entries, and that are held still.

        Raises:
            ConfigurationError: One is: in one process the step would change it.
        """
        put, self._put_in = self._put_in, []
        if max(map(sys.getrefcount, put), default=0) > _COUNT_OF_LISTED:
            raise ConfigurationError(
                "optimizer.state[p] was set to a dictionary that the script still holds: in one "
                "process this step changes it, here it changes what the owner of p has\n"
                "  Fix: optimizer.state[p] = dict(entry), and look at optimizer.state[p] then."
            )

    def _answer_alone(self, holder: Any, name: str, args: Any, kwargs: Any) -> Any:
        key = args[0] if args else None
        if holder is self and isinstance(key, torch.Tensor) and not is_elsewhere(key):
            return getattr(self.here, name)(*args, **kwargs)
        raise OwnershipError(
            f"optimizer.state was asked for more than the entry of a parameter that lives there "
            f"({name}), in a hook, which one worker alone runs\n"
            f"  Fix: do so between two steps, on every worker."
        )

    def _learn(self) -> None:
        loop, optimizer = self._loop, self._optimizer()
        assert optimizer is not None
        order = order_of(optimizer)
        order.note(optimizer)
        owners, parameters = self._owners_now(), parameters_of(optimizer)
        mine = {
            place: [order.made[p], [self._form(p, key) for key in self.here[p]]]
            for place, p in enumerate(parameters)
            if owners.get(id(p)) == loop.rank and p in self.here
        }
        with loop.job.reporting(), DisableTorchFunctionSubclass():
            told = [json.loads(one) for one in exchange(loop, self._question, json.dumps(mine))]
        found: list[tuple[tuple[float, ...], Any, Any]] = []
        for place, p in enumerate(parameters):
            owner = owners.get(id(p))
            its = None if owner is None else told[owner].get(str(place))
            if its is not None:
                values = {key: self._shown(p, key, form) for key, form in its[1]}
                found.append((tuple(its[0]), p, values))
        for key, entry in self.here.items():
            if owners.get(id(key)) is None:  # every worker has it
                found.append((order.made.get(key, (-1,)), key, entry))
        found.sort(key=lambda one: one[0])
        _fill(self, {key: self._entry(key, values, owners) for _, key, values in found})
        self._known = {key: _values_of(entry) for key, entry in dict.items(self)}

    def _entry(self, key: Any, values: Any, owners: Mapping[int, int]) -> Any:
        if id(key) not in owners:
            return values
        entry = dict.get(self, key)
        if type(entry) is not _Entry:
            entry = _Entry(self, key)
        _fill(entry, values)
        return entry

    def _form(self, parameter: Any, key: Any) -> Any:
        """A key and its value that is here, as the others are told of it."""
        value, known = self.here[parameter][key], self._known.get(parameter, {}).get(key)
        if type(key) not in _PLAIN:
            return str(key), f"{type(value).__name__} under a {type(key).__name__}"
        if type(value) in _PLAIN:
            return key, [value]
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return key, type(value).__name__
        if isinstance(known, LoopValue) and known.whole is value:
            return key, _SAME
        return key, (str(value.dtype), list(value.shape), list(value.stride()))

    def _shown(self, parameter: Any, key: Any, form: Any) -> Any:
        """A value, as the script sees it; its owner has told the form."""
        if form == _SAME:
            return self._known[parameter][key]
        if isinstance(form, str):
            raise OwnershipError(
                f"optimizer.state[p][{key!r}] is a {form}; numbers, texts and dense tensors can be "
                f"looked at there, under keys that are numbers or texts, on every worker\n"
                f"  Fix: optimizer.state_dict()['state'] has all; load a changed copy.deepcopy of "
                f"it by load_state_dict."
            )
        if len(form) == 1:
            return form[0]
        dtype, shape, strides = form
        if self._is_here(parameter):
            return self._value(parameter, key, self.here[parameter][key])
        elsewhere = torch.empty_strided(shape, strides, dtype=_DTYPES[dtype], device="meta")
        return self._value(parameter, key, elsewhere)

    def _value(self, parameter: Any, key: Any, inner: torch.Tensor) -> LoopValue:
        known = in_loop(parameter)
        number = "optimizer.state", str(key), "of", str(known or self._place(parameter))
        owner = self._owners_now()[id(parameter)]
        return LoopValue.of(inner, owner, self._loop, number)

    def _is_here(self, parameter: Any) -> bool:
        return self._owners_now().get(id(parameter)) == self._loop.rank

    def _place(self, parameter: Any) -> str:
        optimizer = self._optimizer()
        assert optimizer is not None
        return f"parameter {[id(p) for p in parameters_of(optimizer)].index(id(parameter))}"

    def _put(self, keys: Iterable[Any]) -> None:
        """Let the owners have what the script has changed, of these keys."""
        optimizer, owners, before = self._optimizer(), self._owners_now(), [*map(id, self._known)]
        assert optimizer is not None
        for key in keys:
            if not dict.__contains__(self, key):
                continue  # an entry that was taken out
            entry = dict.__getitem__(self, key)
            if id(key) not in owners:
                self.here[key] = entry
            elif key not in self._known or not _are_same(self._known[key], entry):
                self._put_entry(key, entry)
            self._known[key] = _values_of(dict.__getitem__(self, key))
        now = [*map(id, dict.keys(self))]
        if before == now:
            return
        for key in [key for key in self._known if not dict.__contains__(self, key)]:
            self._note(key, "deleted")
            self.here.pop(key, None)
        self._known = {key: self._known[key] for key in dict.keys(self)}
        order = order_of(optimizer)
        order.made = {
            key: (order.num_steps, place)
            for place, key in enumerate(dict.keys(self))
            if key in self.here and isinstance(key, torch.Tensor)
        }

    def _put_entry(self, parameter: Any, entry: Any) -> None:
        if not isinstance(entry, dict):
            raise ConfigurationError(
                f"optimizer.state[p] was set to a {type(entry).__name__}\n  Fix: set it to a dict."
            )
        known, here = self._known.get(parameter), self._is_here(parameter)
        before = self.here.get(parameter, {}) if here else {}
        if known is None or not entry:
            self._note(parameter, "set")
        shown, mine = {}, {}
        for key, value in dict.items(entry):
            if known is not None and known.get(key, _SAME) is value:
                shown[key], mine[key] = value, before.get(key)
            else:
                shown[key], mine[key] = self._given(parameter, key, value)
        for key in known or ():
            if key not in shown:
                self._note(parameter, "deleted", key)
        if type(entry) is dict:
            self._put_in.append(entry)
        if type(entry) is not _Entry or entry.key is not parameter:
            entry = _Entry(self, parameter)
            dict.__setitem__(self, parameter, entry)
        _fill(entry, shown)
        if here:
            kept = self.here[parameter]
            kept.clear()
            kept.update(mine)

    def _given(self, parameter: Any, key: Any, value: Any) -> tuple[Any, Any]:
        """A value that was put into an entry, as the script sees it, and as it is kept here."""
        value, owner = as_value(value), self._owners_now()[id(parameter)]
        if type(value) in _PLAIN:
            self._note(parameter, key, value)
            return value, value
        if isinstance(value, LoopValue):
            self._note(parameter, key, marks=[value.mark])
            return self._of_loop(parameter, key, value, owner)
        if type(value) is not torch.Tensor or is_shared(value):
            raise ConfigurationError(
                f"optimizer.state[p][{key!r}] was set to a {type(value).__name__}, or to one whose "
                f"memory another tensor has: it could not be kept by the worker that has p alone\n"
                f"  Fix: set it to a number, a text, or a tensor of its own, value.clone()."
            )
        self._note(parameter, key, value)
        inner, loop = value.detach(), self._loop
        make_copies([(value, f"optimizer.state[p][{key!r}]")], lambda _: lambda: loop.steps.count)
        here = self._is_here(parameter)
        return self._value(parameter, key, inner if here else shape_of(inner)), inner

    def _of_loop(
        self, parameter: Any, key: Any, value: LoopValue, owner: int
    ) -> tuple[LoopValue, torch.Tensor]:
        loop = self._loop
        if value.home == owner:  # steps will write to it, on its worker alone
            value.learn(value.held, is_fixed=False, version=(object(), -1))
            return value, value.held.detach() if value.held.requires_grad else value.held
        inner = value.at(owner)
        shown = self._value(parameter, key, inner)
        memory = storage_of(inner)
        twin = Twin(
            "optimizer.state",
            value.held,
            lambda t: storage_of(t) == memory,
            lambda: loop.steps.count,
        )
        loop.twins.add(inner, twin)
        return shown, inner

    def _note(self, parameter: Any, *operands: Any, marks: Iterable[int] = ()) -> None:
        known = in_loop(parameter)
        what = known or self._place(parameter)
        self._loop.taken.note(f"optimizer.state of {what}", operands, marks, is_write=True)


class _Entry(dict[Any, Any]):
    """The entry of one parameter, as the script sees it.

    Attributes:
        entries: All entries.
        key: The parameter.
    """

    def __init__(self, entries: Entries, key: Any) -> None:
        super().__init__()
        self.entries, self.key = entries, key

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.entries.look()
        return copy.deepcopy(dict(dict.items(self)), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(dict.items(self)),)


def _of_all(name: str) -> Any:
    def method(self: Entries, *args: Any, **kwargs: Any) -> Any:
        if is_users(sys._getframe(1).f_code.co_filename):
            return self.answer(defaultdict, self, name, *args, **kwargs)
        return getattr(self.here, name)(*args, **kwargs)

    return method


def _of_one(name: str) -> Any:
    def method(self: _Entry, *args: Any, **kwargs: Any) -> Any:
        return self.entries.answer(dict, self, name, *args, **kwargs)

    return method


for _name in _METHODS:
    setattr(Entries, _name, _of_all(_name))
    setattr(_Entry, _name, _of_one(_name))


def _fill(target: Any, values: Mapping[Any, Any]) -> None:
    """Let a dictionary have these values; one that has them is left alone, for who walks it."""
    if [*map(id, dict.keys(target))] != [*map(id, values)]:
        dict.clear(target)
    for key, value in values.items():
        dict.__setitem__(target, key, value)


def _values_of(entry: Any) -> dict[Any, Any]:
    return dict(dict.items(entry))


def _are_same(known: Mapping[Any, Any], entry: Any) -> bool:
    """Whether an entry has these values still."""
    if not isinstance(entry, dict) or [*known] != [*dict.keys(entry)]:
        return False
    return all(one is other for one, other in zip(known.values(), dict.values(entry), strict=True))
