"""Methods of values that are no operations: questions, iteration, hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from graphsplit.cluster.wire.messages import SAVING
from graphsplit.distribute.values import SPECIAL, Function, LoopValue, as_value, operate
from graphsplit.distribute.workers.asking import device_of, refuse_inside
from graphsplit.distribute.workers.loop import Loop, shape_of
from graphsplit.errors import ConfigurationError
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass, pytree

_ASKING = frozenset(
    [
        "item",
        "tolist",
        "numpy",
        "__bool__",
        "__float__",
        "__int__",
        "__complex__",
        "__index__",
        "__repr__",
        "__str__",
        "__format__",
        "__array__",
        "__contains__",
        "__deepcopy__",
        "__reduce_ex__",
        "equal",
        "allclose",
        "is_nonzero",
    ]
)


def _asked(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tell all workers the values, and go on with ordinary tensors."""

    def plain(value: Any) -> Any:
        if not isinstance(value, LoopValue):
            return value
        name = getattr(func, "__name__", "value")
        found = value.everywhere(SAVING if name == "__reduce_ex__" else name).detach()
        return found.requires_grad_() if value.held.requires_grad else found

    args, kwargs = pytree.tree_map(plain, pytree.tree_map(as_value, (args, kwargs)))
    result = func(*args, **kwargs)
    if isinstance(result, np.ndarray):  # a copy: a write into it would be lost
        result.flags.writeable = False
    return result


def _memory(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name, value = getattr(func, "__name__", ""), as_value(args[0])
    if isinstance(value, LoopValue):
        refuse_inside(value.loop, name)
    raise ConfigurationError(
        f"{name}() of a value that lives on one worker: its memory is there, and each worker would "
        f"get another copy\n"
        f"  Fix: write to values under torch.no_grad(); compare tensors with `is`, and "
        f"their sizes by nbytes; value.detach().numpy() and net.state_dict() give copies."
    )


def _length(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args[0].shape:
        raise TypeError("len() of a 0-d tensor")
    return args[0].shape[0]


def need_whole_gradient(value: LoopValue, asked: str) -> None:
    """Refuse what asks for a whole gradient, of which the script's own graph has a part.

    Raises:
        ConfigurationError: The network that made the value has gone on from it.
    """
    if value.goes_on:
        raise ConfigurationError(
            f"{asked} for a value that a network hands out, and goes on from itself: the gradient "
            f"that comes through the network ends at its edge\n"
            f"  Fix: distribute the part before the value and the part after it, each by itself, "
            f"and call the one on what the other returns."
        )


def _hooked(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hooks are given what the script holds of a gradient."""
    value, hook = args
    need_whole_gradient(value, "a hook (register_hook)")

    def run(gradient: torch.Tensor) -> torch.Tensor | None:
        given = LoopValue.of(gradient, value.home, value.loop, ("gradient of", value.number))
        found = hook(given)
        return found.at(value.home) if isinstance(found, LoopValue) else found

    return value.whole.register_hook(run)


def _retained(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    value = as_value(args[0])
    if isinstance(value, LoopValue):
        need_whole_gradient(value, "retain_grad()")
    func(value.whole if isinstance(value, LoopValue) else value)


def _to(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``value.to(...)``; where there are accelerators, all workers ask whether it is a copy."""
    given = [as_value(one) for one in (*args[1:], *kwargs.values())]
    where = next((one for one in given if isinstance(one, (str, torch.device, torch.Tensor))), None)
    value = as_value(args[0])
    if where is None or not isinstance(value, LoopValue) or not torch.accelerator.is_available():
        return operate(func, args, kwargs)
    dtypes = [getattr(one, "dtype", one) for one in given]
    dtype = next((one for one in dtypes if isinstance(one, torch.dtype)), value.dtype)
    flags = dict(
        zip(("non_blocking", "copy"), (f for f in args if isinstance(f, bool)), strict=False)
    )
    options = {
        **flags,
        **{k: v for k, v in kwargs.items() if k not in ("device", "tensor", "dtype")},
    }
    target = where.device if isinstance(where, torch.Tensor) else torch.device(where)
    if target.type != "cpu" and ":" not in str(target):
        target = torch.device(target.type, torch.accelerator.current_device_index())
    if target == device_of(value):
        return operate(torch.Tensor.to, (args[0], dtype), options)
    return operate(torch.Tensor.to, (args[0], target, dtype), {**options, "copy": True})


def _to_cpu(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _to(torch.Tensor.to, (args[0], torch.device("cpu")), kwargs)


def _to_cuda(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {**dict(zip(("device", "non_blocking"), args[1:], strict=False)), **kwargs}
    number = given.pop("device", None)
    where = torch.device("cuda", number) if isinstance(number, int) else number
    return _to(torch.Tensor.to, (args[0], where or torch.device("cuda")), given)


def _type(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``value.type()``, and ``value.type(torch.LongTensor)``, which names a device as well."""
    given = dict(zip(("self", "dtype"), args, strict=False))
    value, kind = as_value(given["self"]), given.get("dtype", kwargs.get("dtype"))
    if isinstance(kind, str):
        kind = functools.reduce(getattr, kind.removeprefix("torch.").split("."), torch)
    if kind is None:
        where = device_of(value) if torch.accelerator.is_available() else torch.device("cpu")
        return torch.empty(0, dtype=value.dtype, device=where).type()
    if isinstance(kind, torch.dtype):
        return operate(torch.Tensor.to, (value, kind), {})
    where = torch.device("cuda" if kind.is_cuda else "cpu")
    return _to(torch.Tensor.to, (value, where, kind.dtype), {})


_OF_MEMORY = ("untyped_storage", "storage", "_typed_storage", "data_ptr", "__dlpack__", "set_")
SPECIAL.update({name: _memory for name in (*_OF_MEMORY, "__dlpack_device__", "share_memory_")})
SPECIAL.update({name: _asked for name in _ASKING})
SPECIAL.update(__len__=_length, register_hook=_hooked, to=_to, cpu=_to_cpu, cuda=_to_cuda)
SPECIAL.update(__iter__=lambda func, args, kwargs: iter(torch.Tensor.unbind(args[0], 0)))
SPECIAL.update(retain_grad=_retained, type=_type)


# Operations on many values at once, such as the gradients of all parameters: each where it is.

_PREFIX = "_foreach_"


def _foreach(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One after the other: such functions treat every element by itself."""
    size = len(args[0])

    def of(argument: Any, index: int) -> Any:
        is_list = isinstance(argument, (list, tuple)) and len(argument) == size
        return [argument[index]] if is_list else argument

    found = [
        operate(func, [of(a, i) for a in args], {k: of(v, i) for k, v in kwargs.items()})
        for i in range(size)
    ]
    return None if any(one is None for one in found) else [one[0] for one in found]


def _unscale(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale gradients; whether one is infinite or NaN is found out over all workers."""
    gradients, found_inf, inverse = args
    if not all(isinstance(g, LoopValue) for g in gradients):
        raise ConfigurationError(
            "a GradScaler was given an optimizer with parameters of a distributed network and "
            "others\n  Fix: make an optimizer for each."
        )
    loop: Loop = gradients[0].loop
    for home in sorted({g.home for g in gradients}):
        flag = torch.zeros_like(found_inf)
        for gradient in gradients if loop.twins else ():
            loop.twins.check_write(gradient.held)
        if loop.rank == home:
            held = [g.held for g in gradients if g.home == home]
            if any(h.device != flag.device for h in held):
                raise ConfigurationError(
                    "a GradScaler unscales gradients on a GPU, of a network that gs.distribute "
                    "has cut\n  Fix: gs.Model(..., scaler=scaler, autocast=torch.float16); or "
                    "bfloat16, which needs no scaler."
                )
            with DisableTorchFunctionSubclass():
                func(held, flag, inverse)
        flag = loop.share(flag if loop.rank == home else shape_of(flag), home)
        found_inf.copy_(torch.maximum(found_inf, flag))
    loop.num_changes += 1


SPECIAL["_amp_foreach_non_finite_check_and_unscale_"] = _unscale
SPECIAL.update({name: _foreach for name in dir(torch) if name.startswith(_PREFIX)})
