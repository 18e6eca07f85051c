"""Parameters in a script's own loop: each is a value that lives with its owner.

Who asks for its shape is answered at once. An operation on it runs where it is, as on any value of
the script; its gradient is found by backward, and comes before or after that of the network's own
uses as in one process. Optimizers and the network's own runs see the tensors themselves.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.utils.hooks import RemovableHandle

from graphsplit.cluster.wire.messages import ASKING
from graphsplit.distribute.following.casts import refuse_cached_cast
from graphsplit.distribute.values import SPECIAL, LoopValue
from graphsplit.distribute.workers.asking import exchange
from graphsplit.distribute.workers.loop import Loop, empty_as
from graphsplit.distribute.workers.twins import Twin, is_shared
from graphsplit.errors import ConfigurationError
from graphsplit.job.script import ModelCall
from graphsplit.optimizers.ownership import (
    ZERO_GRADS,
    Elsewhere,
    ElsewhereParameter,
    is_elsewhere,
)
from graphsplit.optimizers.parameter_hooks import hooks_of
from graphsplit.runtime.segments.autograd import gradient_sum
from graphsplit.torch_ext.attributes import storage_of, writes_of
from graphsplit.torch_ext.private import (
    DisableTorchFunctionSubclass,
    TensorBase,
    are_subclasses_asked,
    pytree,
)
from graphsplit.torch_ext.stand_ins import GET_GRADIENT, SET_DATA, StandIn, WatchedTensor, become

_KEY = "_graphsplit_in_loop"
_ATTRIBUTES: Any = TensorBase
_SET_GRADIENT, _DELETE_GRADIENT = _ATTRIBUTES.grad.__set__, _ATTRIBUTES.grad.__delete__
_OF_GRADIENT = frozenset({GET_GRADIENT, _SET_GRADIENT, _DELETE_GRADIENT})


class InLoop:
    """A parameter's place in the loop that trains it.

    Args:
        loop: The workers.
        owner: The worker that has its value.
        gradients: Those of its network: ``of`` gives its own as the script sees it.
        parameter: The parameter.
        number: Its own number, the same on all workers.
    """

    def __init__(
        self, loop: Loop, owner: int, gradients: Any, parameter: torch.Tensor, number: Any
    ) -> None:
        self.loop, self.owner, self.gradients, self.number = loop, owner, gradients, number
        self.mark, self._emptied_at = zlib.crc32(repr(number).encode()), -1
        strides = parameter.true_strides() if isinstance(parameter, StandIn) else parameter.stride()
        # Elsewhere all that the script reads shares its counter of writes, as it does here.
        with torch.inference_mode(False):  # where writes are counted
            self.shape = empty_as(parameter, strides)

    def __str__(self) -> str:
        return " ".join(map(str, self.number))

    def note_emptied(self) -> None:
        """Its gradient becomes None, or zeros, for the first time since a backward added to it."""
        taken = self.loop.taken
        if self._emptied_at != taken.count:
            self._emptied_at = taken.count
            taken.note_emptied(self.mark)

    def note_set(self, name: str, value: Any = None) -> None:
        """It is given a gradient, data or a hook: each worker would do so to what is there."""
        plain = [value] if type(value) in (torch.Tensor, nn.Parameter) else []
        marks = [value.mark] if isinstance(value, LoopValue) else []
        what, taken = f"{name} of {self}", self.loop.taken
        is_emptied = self._emptied_at == taken.count
        taken.note(what, plain, [self.mark, *marks], is_write=True)
        if is_emptied and name == "data":  # net.to(device) looks twice at the gradient, where it is
            self._emptied_at = taken.count


def enter_loop(parameter: torch.Tensor, known: InLoop) -> None:
    """Let a parameter answer as a value of the script's loop."""
    setattr(parameter, _KEY, known)
    is_parameter = isinstance(parameter, nn.Parameter)
    become(parameter, _KINDS[is_parameter, is_elsewhere(parameter)])


def in_loop(parameter: Any) -> InLoop | None:
    """Its place in a loop, if a script's own trains it."""
    found: InLoop | None = getattr(parameter, _KEY, None)
    return found


def mark_of(tensor: Any, loop: Loop) -> Callable[[], Any]:
    """A function whose results differ if a parameter or buffer was written to between them.

    Args:
        tensor: It; None where it is not known.
        loop: The workers.
    """
    is_stepped = tensor is None or tensor.requires_grad
    is_called, ids = not isinstance(tensor, nn.Parameter), frozenset([id(tensor)])

    def mark() -> Any:
        known = in_loop(tensor)
        counted = tensor if known is None or known.loop.rank == known.owner else known.shape
        with DisableTorchFunctionSubclass():
            is_counted = counted is not None and not counted.is_inference()
            writes = writes_of(counted) if is_counted else None
        steps = loop.steps.latest(ids) * is_stepped
        calls = loop.calls.latest(ids, is_sure=False) * is_called
        return known is None, writes, steps, calls, loop.loads.latest(ids)

    return mark


class _Read(Function):
    """A parameter that the script uses, as a step of its autograd graph."""

    @staticmethod
    def forward(ctx: Any, held: list[Any], anchor: torch.Tensor) -> torch.Tensor:
        """The value on its worker, its shape elsewhere."""
        parameter, known = held
        ctx.graphsplit_read, ctx.graphsplit_anchor = parameter, anchor
        value: torch.Tensor = _inside(parameter, known)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Add it to what the parameter has been given so far."""
        parameter, known = ctx.graphsplit_read, in_loop(ctx.graphsplit_read)
        assert known is not None
        totals = known.loop.totals_now()
        if known.loop.rank == known.owner:
            total = gradient_sum((totals.get(id(parameter)), gradient))
            assert total is not None
            totals[id(parameter)] = total
        return None, None


_read: Callable[[list[Any], torch.Tensor], torch.Tensor] = _Read.apply


def _inside(parameter: torch.Tensor, known: InLoop) -> torch.Tensor:
    with DisableTorchFunctionSubclass():
        here = known.loop.rank == known.owner
        return parameter.detach() if here else known.shape.detach()


def _value_of(parameter: torch.Tensor) -> LoopValue:
    """A parameter, as a value of the script."""
    known = in_loop(parameter)
    assert known is not None
    with DisableTorchFunctionSubclass():
        if torch.is_grad_enabled() and parameter.requires_grad:
            refuse_cached_cast("a parameter of a distributed network")
            inner = _read([parameter, known], torch.zeros((), requires_grad=True))
        else:
            inner = _inside(parameter, known)
            inner.requires_grad_(parameter.requires_grad)
    return LoopValue.of(inner, known.owner, known.loop, known.number)


def _answer(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The answer of a function of torch for a parameter in a loop."""
    if func in _OF_GRADIENT:
        own: InLoop | None = getattr(args[0], _KEY, None)
        if own is None or not own.loop.job.depth:
            return _gradient(func, own, args)
    if func not in StandIn.harmless:
        known = next(k for leaf in pytree.tree_leaves((args, kwargs)) if (k := in_loop(leaf)))
        if not known.loop.job.depth:
            return _by_value(func, args, kwargs)
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Elsewhere):
                leaf.need_value(getattr(func, "__name__", str(func)))
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _get_gradient(parameter: torch.Tensor) -> Any:
    """``p.grad``, as the script sees it: asked of every parameter in each step."""
    known: InLoop | None = vars(parameter).get(_KEY)
    if known is None or known.loop.job.depth or not are_subclasses_asked():
        return GET_GRADIENT(parameter)
    if sys._getframe(1).f_code not in ZERO_GRADS:
        return known.gradients.of(parameter)
    known.note_emptied()
    if known.loop.twins:  # zeros are written as any operation writes
        return known.gradients.of(parameter)
    known.loop.num_changes += 1
    with DisableTorchFunctionSubclass():
        return None if is_elsewhere(parameter) else GET_GRADIENT(parameter)


def _set_gradient(parameter: torch.Tensor, *given: Any) -> None:
    func = _SET_GRADIENT if given else _DELETE_GRADIENT
    known: InLoop | None = vars(parameter).get(_KEY)
    if known is None or known.loop.job.depth or not are_subclasses_asked():
        func(parameter, *given)
        return
    if sys._getframe(1).f_code not in ZERO_GRADS:  # else noted where it was looked at
        value = given[0] if given else None
        if value is None:
            known.note_emptied()
        else:
            known.note_set("grad", value)
    _gradient(func, known, (parameter, *given))


def _by_value(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func == SET_DATA:
        return _set_data(func, args[0], args[1])
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        args = (_value_of(args[0]), *args[1:])
    return LoopValue.__torch_function__(func, (), args, kwargs)


def _set_data(func: Any, parameter: torch.Tensor, given: torch.Tensor) -> None:
    known = in_loop(parameter)
    if known is None:  # a plain tensor takes the value of a parameter
        value = given.shared() if isinstance(given, LoopValue) else _value_of(given).everywhere()
        func(parameter, value)
        return
    if in_loop(given) is not None:
        given = _value_of(given)
    value = given
    known.note_set("data", value)
    if isinstance(value, LoopValue):
        if value.home != known.owner and is_shared(value.held):
            raise ConfigurationError(
                "data of a parameter was set to that of a tensor on another worker, which is held "
                "elsewhere too: in one process both would have one memory from now on\n"
                "  Fix: p.data.copy_(value); in the place of nn.utils.vector_to_parameters a loop "
                "over vector.split([p.numel() for p in net.parameters()]) that does so."
            )
        given = _copied("data", value, known).detach()
    if given.shape != parameter.shape or given.dtype != parameter.dtype:
        raise ConfigurationError(
            f"data of a parameter of {tuple(parameter.shape)} and {parameter.dtype} was set to "
            f"{tuple(given.shape)} and {given.dtype}\n"
            f"  Fix: change shapes and dtypes before gs.distribute."
        )
    with DisableTorchFunctionSubclass():
        if known.loop.rank == known.owner:
            func(parameter, given)
    known.loop.num_changes += 1
    known.loop.steps.note([id(parameter)])
    _note_copied("data", value, parameter, known)


def _copied(name: str, value: LoopValue, known: InLoop) -> torch.Tensor:
    """A value where a parameter is, to be its gradient or data."""
    if value.home != known.owner and (value.is_gradient or known.gradients.has(value.held)):
        raise ConfigurationError(
            f"{name} of a parameter was set to the gradient of one on another worker: in one "
            f"process both would have one memory from now on\n"
            f"  Fix: b.{name} = a.grad.clone(), there and in one process."
        )
    return value.at(known.owner)


def _note_copied(name: str, value: Any, parameter: torch.Tensor, known: InLoop) -> None:
    """Take note of what was set: a value of another worker and its copy go different ways."""
    twins, gradients = known.loop.twins, known.gradients
    twins.forget(name, parameter)
    if isinstance(value, LoopValue) and value.home != known.owner:
        mark = mark_of(parameter, known.loop) if name == "data" else _no_mark
        has = partial(gradients.has, parameter=parameter)
        twins.add(parameter, Twin(name, value.held, has, mark))


def _no_mark() -> None:
    """Gradients are written to by operations and by backward, which say so."""


def _gradient(func: Any, known: InLoop | None, args: tuple[Any, ...]) -> Any:
    parameter = args[0]
    if known is None:  # a plain tensor is given a parameter for its gradient
        raise ConfigurationError(
            "grad of a tensor was set to a parameter of a distributed network\n"
            "  Fix: set it to a copy, parameter.detach().clone()."
        )
    if func == GET_GRADIENT:
        return known.gradients.of(parameter)
    known.loop.num_changes += 1
    value = args[1] if args[1:] else None
    if isinstance(value, LoopValue):
        args = (parameter, _copied("grad", value, known))
    _note_copied("grad", value, parameter, known)
    if is_elsewhere(parameter):
        return None
    with DisableTorchFunctionSubclass():
        return func(*args)


def _as_data_of(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.data = parameter``; a plain tensor would have its memory, which is refused."""
    return parameter if in_loop(tensor) is not None else _value_of(parameter).as_data_of(tensor)


class _Hook(RemovableHandle):
    """A hook on a parameter in a loop, which all workers remove."""

    def remove(self) -> None:
        """Remove it."""
        known = in_loop(self)
        assert known is not None
        if not (known.loop.is_in_backward or known.loop.job.depth):  # removes itself as it runs
            known.note_set("removed hook")
        super().remove()


def _hooked(name: str) -> Any:
    def hooked(parameter: Any, hook: Any) -> Any:
        handle = getattr(torch.Tensor, name)(parameter, hook)
        known = in_loop(parameter)
        if known is not None and not known.loop.job.depth:
            known.note_set(name)
            handle.__class__ = _Hook
            setattr(handle, _KEY, known)
        return handle

    return hooked


def _set_memory(parameter: torch.Tensor, *given: Any) -> torch.Tensor:
    """``p.set_(tensor)``, which asks no ``__torch_function__``."""
    known = in_loop(parameter)
    if known is None or known.loop.job.depth or not are_subclasses_asked():
        return torch.Tensor.set_(parameter, *given)
    if len(given) != 1 or not isinstance(given[0], torch.Tensor):
        SPECIAL["set_"](torch.Tensor.set_, (parameter, *given), {})
    _set_data(SET_DATA, parameter, given[0])
    return parameter


class _Answers(torch.Tensor):
    """The answers of every tensor in a loop: to functions of torch, and to other methods."""

    set_ = _set_memory  # type: ignore[assignment]
    register_hook, register_post_accumulate_grad_hook = map(
        _hooked, ("register_hook", "register_post_accumulate_grad_hook")
    )

    as_loop_value = _value_of
    as_data_of = _as_data_of
    grad = property(_get_gradient, _set_gradient, _set_gradient)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(self._everywhere())

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _answer(func, types, args, kwargs or {})

    def _everywhere(self) -> torch.Tensor:
        value = _value_of(self).everywhere().clone()
        is_parameter = isinstance(self, nn.Parameter)
        return nn.Parameter(value, self.requires_grad) if is_parameter else value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self._everywhere()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._everywhere().__reduce_ex__(protocol)


class _InLoop(_Answers, WatchedTensor, nn.Parameter):
    """A parameter that lives here, of a network that the script's own loop trains."""


class _InLoopElsewhere(_Answers, ElsewhereParameter):  # type: ignore[misc]
    """A parameter that lives on another worker, of a network that the own loop trains."""


class _BufferInLoop(_Answers, WatchedTensor):
    """A buffer that lives here, of such a network."""


class _BufferInLoopElsewhere(_Answers, Elsewhere):  # type: ignore[misc]
    """A buffer that lives on another worker, of such a network."""


# By whether it is a parameter, and whether it lives elsewhere.
_KINDS: dict[tuple[bool, bool], Any] = {
    (True, False): _InLoop,
    (True, True): _InLoopElsewhere,
    (False, False): _BufferInLoop,
    (False, True): _BufferInLoopElsewhere,
}


# Gradients of parameters, as the script sees them: each on its worker, stand-ins elsewhere.
#
# ``p.grad`` gives the same answer on every worker: None, or a value that lives with the parameter.
# Optimizers and the network's own backward see the tensors themselves.


class Gradients:
    """The gradients of one network's parameters.

    Args:
        parameters: The parameters, in order.
        buffers: The buffers, which have none.
        owners: The owner of each.
        loop: The workers.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buffers: Sequence[torch.Tensor],
        owners: Mapping[int, int],
        loop: Loop,
    ) -> None:
        self._parameters = list(parameters)
        self._owners = owners
        self._loop = loop
        self._known: dict[int, LoopValue | None] = {}
        self._known_at = -1  # how many changes there were
        self._number = loop.num_settled  # the same on all workers
        self._question = f"grad of parameters of network {self._number}"
        for index, tensor in enumerate((*parameters, *buffers)):
            number = "parameter", index, "of network", self._number
            known = InLoop(loop, owners[id(tensor)], self, tensor, number)
            for _ in () if in_loop(tensor) else hooks_of(tensor):  # that it has had until now
                known.note_set("hook")
            enter_loop(tensor, known)

    def of(self, parameter: torch.Tensor) -> LoopValue | None:
        """The gradient of a parameter; the first time after a change workers tell each other."""
        if self._known_at != self._loop.num_changes:
            call = ModelCall(f"{ASKING}{self._question}", self._learn)
            self._known = self._loop.job.script.collective(call)
            self._known_at = self._loop.num_changes
        return self._known.get(id(parameter))

    def has(self, tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> bool:
        """Whether a tensor is in the memory of a gradient that was looked at: of one, or of any."""
        found = self._known.values() if parameter is None else [self._known.get(id(parameter))]
        memory = storage_of(tensor)
        return any(one is not None and storage_of(one.held) == memory for one in found)

    def _learn(self) -> dict[int, LoopValue | None]:
        with self._loop.job.reporting(), DisableTorchFunctionSubclass():
            return self._exchanged()

    def _exchanged(self) -> dict[int, LoopValue | None]:
        rank = self._loop.rank
        own = [p for p in self._parameters if self._owners[id(p)] == rank]
        told = exchange(self._loop, self._question, "".join(map(_kind_of, own)))
        kinds = [iter(text) for text in told]
        found: dict[int, LoopValue | None] = {}
        for index, parameter in enumerate(self._parameters):
            owner = self._owners[id(parameter)]
            kind = next(kinds[owner])
            if kind == "s":
                raise ConfigurationError(
                    "the gradient of a parameter is sparse; the script's own loop can look at "
                    "dense ones only\n  Fix: make the embedding with sparse=False."
                )
            held = _shape_of(parameter) if isinstance(parameter, StandIn) else parameter.grad
            if kind == "1" and held is not None:
                number = "gradient", index, "of network", self._number
                found[id(parameter)] = LoopValue.of(held, owner, self._loop, number)
            else:
                found[id(parameter)] = None
        return found


def _kind_of(parameter: torch.Tensor) -> str:
    gradient = parameter.grad
    if gradient is None:
        return "0"
    return "1" if gradient.layout is torch.strided else "s"


def _shape_of(parameter: StandIn) -> torch.Tensor:
    """A stand-in for a gradient that is on another worker: laid out as the parameter is there."""
    return empty_as(parameter, parameter.true_strides())
