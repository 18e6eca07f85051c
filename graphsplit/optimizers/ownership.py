"""Parameters and buffers live on one worker; elsewhere a stand-in keeps their shape and no memory.

Its storage is a single value, expanded to the shape of the tensor before it
(``torch_ext/stand_ins.py``). It is NaN: ``x.add_(y, alpha=net.rate)`` reads it in C++, unasked.

All workers run the same script, so ``net.beta.mul_(0.9)`` between two steps runs on the owner too:
elsewhere it is left out, and noted. Whether all have written to the same tensors is compared before
the next step (``planning.compared.writes``).

What all workers have, as a copy of the network that no step has used, *moves* when something that
lives on one worker is written to it: ``average.lerp_(weight, 0.1)`` is done where the weight lives,
and elsewhere the average becomes a stand-in. That worker itself notices nothing; it is told before
the first plan with the tensor is made (``planning.compared.moved``).
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from graphsplit.errors import OwnershipError
from graphsplit.torch_ext.attributes import CONVERT, LOAD, base_of, buffer_of_form
from graphsplit.torch_ext.attributes import WRITES as NUM_WRITES
from graphsplit.torch_ext.data_attribute import is_of_model
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass, leaves_of, pytree
from graphsplit.torch_ext.stand_ins import (
    APART,
    CASTING,
    DRAWS,
    GET_DATA,
    GET_GRADIENT,
    HISTORY,
    OF_EACH,
    SET_DATA,
    SET_GRADIENT,
    WRITES,
    StandIn,
    become,
    computes,
    counts_with,
    has_history,
    home_of,
    in_backward,
    in_form,
    is_known,
    is_view,
    looks_at_form,
    take_back,
    without_value,
)

IN_STATE = "optimizer.state"  # what asks, where its entry there is looked for
WHOSE = "_graphsplit_whose"  # attribute of a stand-in: its name, its owner, its old strides
_VIEWED = "_graphsplit_viewed"  # of a view: the stand-in of which it is one
_APART = "_graphsplit_apart"  # of a view of which autograd knows nothing
LEFT_OUT = "_graphsplit_left_out"  # likewise: the number of the latest write that was left out
GRADIENT = "_graphsplit_gradient"  # of a parameter whose gradient may be changed now: that
OF_GRADIENT = "the gradient of "
_WRITING = {function.__name__ for function in WRITES} - {"copy_"}
num_writes = attrgetter(NUM_WRITES)
_LOADING = getattr(nn.Module, LOAD).__code__
_MOVED = "_graphsplit_moved"  # of a stand-in: how it has moved
# What makes a value of what it detaches: nobody may take a stand-in for one.
_KEEPING = nn.Parameter.__new__.__code__
# Functions of torch that treat every parameter by itself: they may be told «no gradient».
ZERO_GRADS = tuple(
    inspect.unwrap(function).__code__
    for function in (
        *(torch.optim.Optimizer.zero_grad, nn.Module.zero_grad),
        getattr(nn.Module, CONVERT),
    )
)


@dataclass
class Moved:
    """The move of a tensor that all workers had.

    Attributes:
        owner: Where it lives since.
        num_writes: How often it has been written to, as its owner counts; None if not all counts.
    """

    owner: int
    num_writes: int | None


class Elsewhere(StandIn):
    """A tensor whose value lives on another worker: refuses to hand it out.

    Attributes:
        may_move: Whether what all workers have may move to one now.
    """

    harmless = StandIn.harmless - {GET_GRADIENT}
    num_left_out: ClassVar[int] = 0  # writes to all of them, in this process
    may_move: ClassVar[Callable[[], bool]] = staticmethod(lambda: False)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        caller = sys._getframe(1).f_code
        if func in (GET_GRADIENT, SET_GRADIENT) and hasattr(args[0], GRADIENT):
            return getattr(args[0], GRADIENT)(*args)
        if func in OF_EACH:
            return _write_each(OF_EACH[func], args, kwargs or {})
        if func in WRITES or func in DRAWS:
            written = args[0] if args else (kwargs or {}).get("tensor")  # as nn.init has it
            # A state that was read from a file is loaded by the Model: each takes what it owns.
            is_told = caller is not _LOADING or isinstance(args[1], Elsewhere)
            if func in WRITES and is_told:
                operands = args[1:], _with(kwargs, "tensor", None)
                with_history = _writes_history(written, operands)
                _move(written, operands)
                if with_history and isinstance(written, Elsewhere):
                    setattr(written, HISTORY, True)
            if isinstance(written, Elsewhere) and is_told:
                if func in DRAWS:  # as its owner does
                    with torch.no_grad():
                        form = in_form(written)
                        func(*(args and (form, *args[1:])), **_with(kwargs, "tensor", form))
                written.note_write()
                return written
        elif (index := looks_at_form(func, args, kwargs)) is not None:
            args = (*args[:index], in_form(args[index]), *args[index + 1 :])
            return func(*args, **(kwargs or {}))
        elif func == SET_DATA and _is_set(*args):
            return None
        elif func == torch.Tensor.register_hook and is_made(args[0]):
            return RemovableHandle(OrderedDict())  # it goes through no backward
        elif caller is _KEEPING and func in APART and is_made(args[0]):
            return stand_in(in_form(args[0], device="meta"), *getattr(args[0], WHOSE)[:2])
        elif is_view(func, args) and isinstance(args[0], Elsewhere) and caller is not _KEEPING:
            return args[0].viewed(func, args[1:], kwargs or {})
        elif computes(func, args, kwargs) and caller is not _KEEPING:
            made = _computed_elsewhere(func, args, kwargs or {})
            if made is not None:
                return made
        return super().__torch_function__(func, types, args, kwargs)

    def note_write(self) -> None:
        """Note that a write was left out."""
        home = getattr(self, _VIEWED, self)
        moved: Moved | None = getattr(home, _MOVED, None)
        if moved is None:
            Elsewhere.num_left_out += 1
            setattr(home, LEFT_OUT, Elsewhere.num_left_out)
        elif moved.num_writes is not None:
            moved.num_writes += 1

    def is_whole(self, value: torch.Tensor) -> bool:
        """Whether a tensor is a view of all of this one, in its form."""
        is_view = getattr(value, _VIEWED, None) is getattr(self, _VIEWED, self)
        if not (is_view and isinstance(value, Elsewhere)):
            return False
        return (value.shape, value.true_strides()) == (self.shape, self.true_strides())

    def viewed(
        self, func: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> torch.Tensor:
        """The stand-in for a view: who writes to it writes to what lives elsewhere."""
        name, owner, _ = getattr(self, WHOSE)
        form, home = in_form(self, device="meta"), getattr(self, _VIEWED, self)
        if func != GET_DATA:
            form = func(form, *arguments, **options)
        elif hasattr(home, _MOVED):  # writes to it do not count
            getattr(home, _MOVED).num_writes = None
        made = stand_in(form, name, owner, of=home, with_history=has_history(func, [self]))
        if func in APART or hasattr(self, _APART):
            setattr(made, _APART, True)
        return made

    def need_value(self, asked: str) -> None:
        """Refuse.

        Raises:
            OwnershipError: Unless it is the gradient, and ``zero_grad`` that asks.
        """
        # No gradient is here, and who looks at those of all parameters (the norm of the gradients
        # found here would be taken for that of all) would take that for «has none».
        if asked != "grad" or sys._getframe(3).f_code not in ZERO_GRADS:
            raise OwnershipError(self._message(asked))

    def as_data_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The data of a tensor that is set to this one; what all workers have moves there.

        Raises:
            OwnershipError: The tensor is of a Model that has run, or this one's memory is shared.
        """
        if isinstance(tensor, Elsewhere):
            return self
        if is_made(self) and tensor.shape == self.shape and tensor.dtype == self.dtype:
            _move(tensor, self)
        if (move := moved(tensor)) is None:
            self.need_value("data")
        else:
            move.num_writes = None  # its owner does not count that
        return self

    def true_strides(self) -> tuple[int, ...]:
        """The strides that the tensor has on its worker."""
        strides: tuple[int, ...] = getattr(self, WHOSE)[2]
        return strides

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        name, owner, _ = getattr(self, WHOSE)
        return f"<{name}: lives on worker {owner}>"

    def _message(self, asked: str) -> str:
        name, owner, _ = getattr(self, WHOSE)
        fix = (
            f"read it on worker {owner}, or call model.state_dict() on every worker, which gathers "
            f"all values. To run the network, call model.predict(x); with averages of its weights, "
            f"let a copy hold them (copy.deepcopy(net)), not torch.func.functional_call. Change "
            f"the device, and in a job that recovers the dtype, before the first step. To write, "
            f"let all workers do so between two steps, in place and under torch.no_grad()."
        )
        if asked == "data":
            fix = f"p.data.copy_(value), where both live on worker {owner}: place both alike."
        if asked in _WRITING:
            fix = (
                f"let what is written to with it live on worker {owner} too: place both alike, and "
                f"let a Model that holds the other one run a step, or predict, before."
            )
        if asked == "grad" or OF_GRADIENT in name:
            fix = (
                "to clip, use Model(..., clip=gs.clip.GlobalNorm(max_norm)); to change each by "
                "itself, do so for all of net.parameters() in a callback's on_gradients; to look "
                "at values, go through context.owned_parameters() there."
            )
        if asked.startswith(IN_STATE):
            fix = (
                f"read it on worker {owner}, where it is in optimizer.state, or call "
                f"model.optimizer_state_dict() on every worker. To reset it, go through those that "
                f"are here: for entry in optimizer.state.values()."
            )
        if asked == "copy_":
            fix = (
                "to load a state, call model.load_state_dict(state) on every worker, not "
                "net.load_state_dict: each takes what it owns."
            )
        of = "gradient of" if asked == "grad" else "value of"
        where = f"lives on worker {owner}, not here (asked for by {asked})"
        return f"the {of} {name!r} {where}\n  Fix: {fix}"


def stand_in(
    form: torch.Tensor,
    name: str,
    owner: int,
    of: torch.Tensor | None = None,
    *,
    with_history: bool = False,
) -> Elsewhere:
    """A stand-in for a view of a tensor, or for a value of its own, in the form of another one."""
    with DisableTorchFunctionSubclass():
        made: Any = without_value(torch.empty((), dtype=form.dtype)).expand(form.shape)
    if with_history:
        setattr(made, HISTORY, True)
    setattr(made, WHOSE, (name, owner, form.stride()))
    made.__class__ = Elsewhere
    setattr(made, _VIEWED, made if of is None else of)
    found: Elsewhere = made
    return found


def is_made(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for a value that one worker has computed for the script."""
    return isinstance(tensor, Elsewhere) and getattr(tensor, _VIEWED, None) is tensor


def note_state(tensor: torch.Tensor, name: str) -> None:
    """Note that a tensor is a Model's, which has moved no more."""
    if isinstance(tensor, Elsewhere) and hasattr(tensor, _VIEWED):
        if not is_made(tensor) or not Elsewhere.may_move():
            tensor.need_value(f"{name!r}, which is a view of it")
        setattr(tensor, WHOSE, (name, *getattr(tensor, WHOSE)[1:]))
        for mark in (_VIEWED, LEFT_OUT):
            vars(tensor).pop(mark, None)
    vars(tensor).pop(_MOVED, None)


def moved(tensor: torch.Tensor) -> Moved | None:
    """The move of a stand-in, until its owner knows of it."""
    if is_made(tensor):
        return Moved(getattr(tensor, WHOSE)[1], None)
    found: Moved | None = getattr(tensor, _MOVED, None)
    return found


def _move(written: Any, operands: Any) -> None:
    """Let what all workers have live where what is written to it does.

    It stays as it is where that is not known, or where it is of a Model that has run: then what is
    written has to live where that does.
    """
    given = leaves_of(Elsewhere, operands)
    whose = {getattr(v, WHOSE)[1] for v in given}
    if type(written) not in (torch.Tensor, nn.Parameter) or len(whose) != 1:
        return
    owner: int = whose.pop()
    home = home_of(written) if Elsewhere.may_move() and not in_backward() else None
    if home is None or is_of_model(home):
        return
    name = f"what {getattr(given[0], WHOSE)[0]} was written to"
    if not is_elsewhere(home):
        before = num_writes(home) if counts_with(written, home) else None
        setattr(home, _MOVED, Moved(owner, before))
        free(home, name=name, owner=owner)
    if written is not home:
        free(written, name=name, owner=owner)
        setattr(written, _VIEWED, home)


def _writes_history(written: Any, operands: Any) -> bool:
    """Whether what is written has a history; only what autograd knows nothing of may get one.

    ``w.data += b @ a`` gives ``w`` none. A buffer would have one on its worker alone.

    Raises:
        OwnershipError: It is written to anything else.
    """
    given = leaves_of(Elsewhere, operands)
    if not any(map(is_known, given)):
        return False
    is_apart = hasattr(written, _APART) or (
        type(written) is torch.Tensor and base_of(written) is written is not home_of(written)
    )
    if not is_apart:
        given[0].need_value("a write with gradients switched on")
    return True


def _write_each(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Write to each of some tensors, of which not all are here."""
    for index, written in enumerate(args[0]):
        given = [v[index] if isinstance(v, (tuple, list)) else v for v in args[1:]]
        options = {n: v[index] if isinstance(v, (tuple, list)) else v for n, v in kwargs.items()}
        func(written, *given, **options)


def _is_set(tensor: Elsewhere, value: torch.Tensor) -> bool:
    """Whether a stand-in has been given other data, as far as that concerns this worker."""
    if tensor is value or tensor.is_whole(value):
        return True  # ``p.data += 1`` sets what it was given
    is_other = tensor.dtype != value.dtype
    if tensor.shape != value.shape or (is_other and not Elsewhere.may_move()):
        return False  # of another dtype, who comes back would not know
    if not _is_of_its_own(value, tensor):
        return False
    if is_other:
        _recast(tensor, value.dtype)
    tensor.note_write()
    return True


def _is_of_its_own(value: torch.Tensor, tensor: Elsewhere) -> bool:
    """Whether a value may become a stand-in's data: nothing else, of a Model, lies in its memory.

    ``w.data = 0.9 * w.data + noise``. What is here lives where the tensor does from then on.
    """
    owner: int = getattr(tensor, WHOSE)[1]
    if isinstance(value, Elsewhere):
        is_made = getattr(value, _VIEWED, None) is value and getattr(value, WHOSE)[1] == owner
        return is_made and value.true_strides() == tensor.true_strides()
    if type(value) is not torch.Tensor or value.stride() != tensor.true_strides():
        return False
    if is_of_model(value) or home_of(value) is not value:
        return False
    free(value, name=f"what was made the data of {getattr(tensor, WHOSE)[0]}", owner=owner)
    setattr(value, _VIEWED, getattr(tensor, _VIEWED, tensor))
    return True


def _computed_elsewhere(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Elsewhere | None:
    """The stand-in for what one worker computes of its tensors: it may be written to others there.

    ``w.data += scale * b.data @ a.data`` runs on all workers. None: the values are on several.
    """
    given = leaves_of(Elsewhere, (args, kwargs))
    whose = {getattr(v, WHOSE)[1] for v in given}
    if len(whose) != 1:
        return None
    device = None if func in CASTING else "meta"  # that one is given may be the present one
    with DisableTorchFunctionSubclass():
        formed, options = pytree.tree_map(
            lambda v: in_form(v, device=device) if isinstance(v, torch.Tensor) else v,
            (tuple(args), dict(kwargs)),
        )
        form = func(*formed, **options)
    if func in CASTING and form is formed[0]:
        itself: Elsewhere = args[0]
        return itself
    name = f"what {func.__name__} makes of {getattr(given[0], WHOSE)[0]}"
    known = has_history(func, pytree.tree_leaves((args, kwargs)))
    return stand_in(form, name, *whose, with_history=known)


def _with(kwargs: Any, name: str, value: Any) -> dict[str, Any]:
    return {key: value if key == name else held for key, held in (kwargs or {}).items()}


class ElsewhereParameter(Elsewhere, nn.Parameter):
    """A parameter whose value lives on another worker."""


def free(
    tensor: torch.Tensor, *, name: str, owner: int, strides: tuple[int, ...] | None = None
) -> None:
    """Free a tensor's memory and turn it into a stand-in.

    Args:
        tensor: A parameter or buffer.
        name: Its qualified name.
        owner: The worker it lives on.
        strides: Its true strides, where the tensor itself has lost them already.
    """
    if is_elsewhere(tensor):
        return
    strides = tensor.stride() if strides is None else strides
    tensor.data = without_value(tensor)
    tensor.grad = None
    setattr(tensor, WHOSE, (buffer_of_form(name), owner, strides))
    become(tensor, ElsewhereParameter if isinstance(tensor, nn.Parameter) else Elsewhere)


def bring_back(tensor: Elsewhere) -> None:
    """Make a stand-in an ordinary tensor again, in its true form and without a value (NaN)."""
    memory = in_form(tensor)
    missing = without_value(memory)
    take_back(tensor)
    for name in (LEFT_OUT, _VIEWED, "_is_param"):
        vars(tensor).pop(name, None)
    with torch.no_grad():
        tensor.data = memory.copy_(missing)


def resize(tensor: torch.Tensor, shape: Sequence[int]) -> None:
    """Give a stand-in the shape that what it stands for has got on its owner."""
    name, owner, _ = getattr(tensor, WHOSE)
    take_back(tensor)
    tensor.data = torch.empty(tuple(shape), dtype=tensor.dtype, device=tensor.device)
    free(tensor, name=name, owner=owner)


def _recast(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Give a stand-in the dtype that what it stands for has got on its owner."""
    name, owner, strides = getattr(tensor, WHOSE)
    take_back(tensor)
    tensor.data = tensor.data.new_empty((), dtype=dtype).expand(tensor.shape)
    free(tensor, name=name, owner=owner, strides=strides)


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a stand-in for a value that lives on another worker."""
    return isinstance(tensor, Elsewhere)


@dataclass(frozen=True)
class Residence:
    """Where the tensors of a network and its loss live, as one worker sees it.

    Attributes:
        tensors: Parameters and buffers by name; tied ones under each name.
        owners: The owner of each.
        rank: This worker.
        num_workers: Size of the cluster.
    """

    tensors: Mapping[str, torch.Tensor]
    owners: Mapping[str, int]
    rank: int
    num_workers: int

    def unique(self) -> list[torch.Tensor]:
        """Every tensor once."""
        return list({id(tensor): tensor for tensor in self.tensors.values()}.values())

    def names(self) -> dict[int, str]:
        """The first name of each tensor, by its id."""
        names: dict[int, str] = {}
        for name, tensor in self.tensors.items():
            names.setdefault(id(tensor), name)
        return names

    def owner_by_id(self) -> dict[int, int]:
        """The owner of each tensor, by its id."""
        return {id(tensor): self.owners[name] for name, tensor in self.tensors.items()}
