"""Everything that can be changed behind a network and its loss, found by following references."""

from __future__ import annotations

import enum
import functools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import changing_networks as networks
import numpy as np
import torch
from torch import nn

from graphsplit.optimizers.ownership import is_elsewhere

FLOATS = (0.5, 1.0, -0.0, 0.0, 1.5, -0.25, 0.1, 2.0, 1e-3)
# Numbers of torch's own modules that may take other values, and which.
OF_TORCH: dict[str, tuple[Any, ...]] = {
    "p": (0.0, 0.1, 0.3, 0.7),
    "momentum": (0.1, 0.3, 0.5, None),
    "eps": (1e-5, 1e-3, 0.1),
    "negative_slope": (0.01, 0.1, 0.3),
    "dropout": (0.0, 0.1, 0.4),
    "beta": (1.0, 0.5),
}
RATES = ("drop", "decay")
_LARGEST = 6  # entries of a container

Draw = random.Random
Change = Callable[[Draw], object]


@dataclass(frozen=True)
class Site:
    """A place that can be changed.

    Attributes:
        path: How it is reached.
        change: Changes it. What it does depends on nothing but what is drawn, and what is there.
        is_shared: Whether all networks of the process have it in common.
    """

    path: str
    change: Change
    is_shared: bool = False

    @property
    def is_unused(self) -> bool:
        """Whether nobody reads it."""
        return "unused" in self.path


def sites(net: nn.Module, loss_fn: Any) -> list[Site]:
    """All places of a network and its loss, in an order of their own."""
    seen: set[int] = set()
    found = [*_inside("net", net, seen), *_inside("loss", loss_fn, seen), *_shared()]
    return sorted(found, key=lambda site: site.path)


def _inside(path: str, value: Any, seen: set[int]) -> Iterator[Site]:
    """The sites of an object and of all that it holds."""
    if id(value) in seen:
        return
    seen.add(id(value))
    kinds: tuple[tuple[Any, Callable[[str, Any, set[int]], Iterator[Site]]], ...] = (
        (nn.Module, _of_module),
        (dict, _of_dict),
        ((list, deque), _of_list),
        (set, _of_set),
        (np.ndarray, _of_array),
        (FunctionType, _of_function),
        (functools.partial, _of_partial),
    )
    for kind, find in kinds:
        if isinstance(value, kind):
            yield from find(path, value, seen)
            return
    module = type(value).__module__
    is_frozen = isinstance(value, (tuple, enum.Enum, MappingProxyType, networks.Fixed))
    if isinstance(value, ModuleType):
        module = "types" if value.__name__ == networks.by_hand().__name__ else ""
    if module in (networks.__name__, "types", "collections") and not is_frozen:
        yield from _of_attributes(path, value, seen)


def _held(path: str, value: Any, put: Callable[[Any], object], seen: set[int]) -> Iterator[Site]:
    """The site of a value, and those inside it."""
    choices = _others(path.rpartition(".")[2], value)
    if choices is not None:
        yield Site(path, lambda draw: put(draw.choice(choices)))
    yield from _inside(path, value, seen)


def _others(name: str, value: Any) -> tuple[Any, ...] | None:
    """What may stand in the place of a value; None if nothing may."""
    if isinstance(value, bool):
        return (True, False)
    if isinstance(value, networks.Style):
        return tuple(networks.Style)
    if isinstance(value, networks.Rates):
        return tuple(networks.Rates(rate, 0.0) for rate in FLOATS)
    if isinstance(value, networks.Fixed):
        steps = ((), (1,), (2, 3, 4))
        return tuple(networks.Fixed(r, d, s) for r in FLOATS for d in (True, False) for s in steps)
    if name == "pair":
        return tuple((one, other) for one in FLOATS for other in FLOATS)
    if name in ("use", "text"):
        return ("a", "b") if name == "use" else ("", "ab", "abc")
    if name in RATES:
        return (0.0, 0.2, 0.5)
    if isinstance(value, int):
        return (1, 2, 3, 1.0) if name in ("power", "n") else (0, 1, 2, 3, True)
    if isinstance(value, float):
        return (*FLOATS, 1, True)
    return networks.ACTIVATIONS if any(value is one for one in networks.ACTIVATIONS) else None


def _of_module(path: str, module: nn.Module, seen: set[int]) -> Iterator[Site]:
    yield Site(f"{path}.training", lambda draw: module.train(draw.random() < 0.5))
    yield Site(f"{path}.training alone", lambda draw: setattr(module, "training", _coin(draw)))
    is_torchs = type(module).__module__.startswith("torch.")
    if is_torchs:
        for name in OF_TORCH.keys() & vars(module).keys():
            yield Site(
                f"{path}.{name}", lambda draw, n=name: setattr(module, n, draw.choice(OF_TORCH[n]))
            )
    else:
        yield from _of_attributes(path, module, seen)
    for name, tensor in [
        *module._parameters.items(),
        *module._buffers.items(),
        *vars(module).items(),
    ]:
        if isinstance(tensor, torch.Tensor):
            yield from _of_tensor(f"{path}.{name}", module, name, tensor)
    yield from _of_hooks(path, module)
    for name, child in module._modules.items():
        if child is not None:
            yield from _inside(f"{path}.{name}", child, seen)
            yield from _of_child(f"{path}.{name}", module, name, child)
    if isinstance(module, networks.Replaced):
        yield from _of_another(path, module)
    if isinstance(module, (nn.ModuleDict, nn.Sequential, nn.ModuleList)):
        yield Site(f"{path} in another order", lambda draw: _rotate(module))


def _of_tensor(path: str, module: nn.Module, name: str, tensor: torch.Tensor) -> Iterator[Site]:
    """A parameter, a buffer or a mere attribute: other values, another tensor, trained or not."""
    if not tensor.is_floating_point():
        return
    yield Site(f"{path} in place", lambda draw: _scale(getattr(module, name), draw))
    shape = tuple(tensor.shape)
    if not isinstance(tensor, nn.Parameter):
        yield Site(
            f"{path} replaced",
            lambda draw: setattr(module, name, torch.full(shape, draw.choice(FLOATS))),
        )
        return
    yield Site(
        f"{path}.requires_grad", lambda draw: getattr(module, name).requires_grad_(_coin(draw))
    )
    for act in (_hook_gradient, _hook_accumulated, _unhook):
        label = act.__name__.strip("_").replace("_", " ")
        yield Site(f"{path} {label}", lambda draw, act=act: act(getattr(module, name), draw))
    if not isinstance(module, (nn.GRU, nn.MultiheadAttention)):
        yield Site(
            f"{path} replaced",
            lambda draw: setattr(
                module, name, nn.Parameter(torch.full(shape, draw.choice(FLOATS)))
            ),
        )


def _hook_gradient(parameter: torch.Tensor, draw: Draw) -> None:
    factor = draw.choice((0.5, 1.5))
    if parameter.requires_grad and len(parameter._backward_hooks or ()) < 2:
        parameter.register_hook(lambda gradient: gradient * factor)


def _hook_accumulated(parameter: torch.Tensor, draw: Draw) -> None:
    limit = draw.choice((0.01, 0.1))

    def clamp(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-limit, limit)

    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(clamp)


def _unhook(parameter: torch.Tensor, draw: Draw) -> None:
    for table in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        if table:
            del table[draw.choice(list(table))]


def _scale(tensor: torch.Tensor, draw: Draw) -> None:
    by = draw.choice((0.5, 1.5))
    if not is_elsewhere(tensor):
        tensor.data.mul_(by)


def _of_hooks(path: str, module: nn.Module) -> Iterator[Site]:
    if isinstance(
        module,
        (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.GRU, nn.MultiheadAttention),
    ):
        return  # never called, or with other results

    def add(draw: Draw) -> None:
        factor = draw.choice(FLOATS)
        if len(module._forward_hooks) < 2:
            module.register_forward_hook(lambda module, args, out: out * factor)

    def add_before(draw: Draw) -> None:
        factor = draw.choice(FLOATS)
        if len(module._forward_pre_hooks) < 2:
            module.register_forward_pre_hook(lambda module, args: (args[0] + factor,))

    def own_forward(draw: Draw) -> None:
        original, factor = type(module).forward, draw.choice(FLOATS)
        module.forward = lambda *args: original(module, *args) * factor

    if not path.startswith("loss"):
        yield Site(f"{path} hook", add)
        yield Site(f"{path} hook before", add_before)
        yield Site(f"{path}.forward", own_forward)
    yield Site(f"{path} no hook", lambda draw: module._forward_hooks.clear())
    yield Site(f"{path} own forward back", lambda draw: vars(module).pop("forward", None))


def _of_child(path: str, module: nn.Module, name: str, child: nn.Module) -> Iterator[Site]:
    """A layer: wrapped, taken out, another one, another one of this network."""
    if isinstance(module, nn.MultiheadAttention) or type(child) not in (
        nn.Linear,
        nn.Dropout,
        nn.Tanh,
        nn.ReLU,
        nn.BatchNorm1d,
    ):
        return
    if name in ("first", "second", "middle"):
        return  # they are placed, or asked for their weight
    yield Site(f"{path} wrapped", lambda draw: module.add_module(name, nn.Sequential(child)))
    yield Site(f"{path} taken out", lambda draw: module.add_module(name, nn.Identity()))
    yield Site(f"{path} another", lambda draw: module.add_module(name, _layer(draw)))
    yield Site(f"{path} deleted and set", lambda draw: _set_again(module, name))


def _set_again(module: nn.Module, name: str) -> None:
    module.add_module(name, module._modules.pop(name))


def _layer(draw: Draw) -> nn.Module:
    return draw.choice((nn.Tanh, nn.Sigmoid, nn.Softplus))()


def _rotate(module: Any) -> None:
    first = next(iter(module._modules), None)
    if isinstance(module, nn.ModuleDict) and first is not None:
        _set_again(module, first)
    elif len(module._modules) > 1:
        children = list(module._modules.values())
        names = list(module._modules)
        module._modules.clear()
        module._modules.update(zip(names, [*children[1:], children[0]], strict=True))


def _of_attributes(path: str, one: Any, seen: set[int]) -> Iterator[Site]:
    names = [*getattr(type(one), "__slots__", ()), *vars(one)] if hasattr(one, "__dict__") else [
        *type(one).__slots__
    ]  # fmt: skip
    for name in names:
        if not name.startswith("_") and name not in ("training", "forward"):
            yield from _held(
                f"{path}.{name}", getattr(one, name), lambda v, n=name: setattr(one, n, v), seen
            )


def _of_partial(path: str, held: Any, seen: set[int]) -> Iterator[Site]:
    for key in held.keywords:
        put = functools.partial(held.keywords.__setitem__, key)
        yield from _held(f"{path}.{key}", held.keywords[key], put, seen)


def _of_another(path: str, one: Any) -> Iterator[Site]:
    """An attribute that comes and goes."""
    yield Site(f"{path} another attribute", lambda draw: setattr(one, "another", draw.random()))
    yield Site(f"{path} no other attribute", lambda draw: vars(one).pop("another", None))


def _of_dict(path: str, held: dict[Any, Any], seen: set[int]) -> Iterator[Site]:
    for key in held:
        yield from _held(f"{path}.{key}", held[key], lambda v, k=key: held.__setitem__(k, v), seen)
    yield Site(f"{path} another entry", lambda draw: held.update({"another": draw.random()}))
    if isinstance(held, OrderedDict):
        yield Site(f"{path} order", lambda draw: held.move_to_end(next(iter(held))))


def _of_list(path: str, held: Any, seen: set[int]) -> Iterator[Site]:
    for index in range(len(held)):
        yield from _held(
            f"{path}.{index}", held[index], lambda v, i=index: held.__setitem__(i, v), seen
        )

    def append(draw: Draw) -> None:
        if len(held) < _LARGEST:
            held.append(type(held[0])(draw.choice((1, 2)))) if len(held) else held.append(1)

    def pop(draw: Draw) -> None:
        if len(held) > 1:
            held.pop()

    if all(isinstance(item, (int, float)) for item in held):
        yield Site(f"{path} grows", append)
        yield Site(f"{path} shrinks", pop)
    if isinstance(held, deque):
        yield Site(f"{path} turned", lambda draw: held.rotate())
    else:
        yield Site(f"{path} reversed", lambda draw: held.reverse())


def _of_set(path: str, held: set[Any], seen: set[int]) -> Iterator[Site]:
    yield Site(f"{path} grows", lambda draw: held.add(draw.randrange(_LARGEST)))
    yield Site(f"{path} shrinks", lambda draw: held.discard(draw.randrange(_LARGEST)))


def _of_array(path: str, held: Any, seen: set[int]) -> Iterator[Site]:
    for index in range(len(held)):
        yield Site(
            f"{path}.{index}", lambda draw, i=index: held.__setitem__(i, draw.choice(FLOATS))
        )


def _of_function(path: str, function: Any, seen: set[int]) -> Iterator[Site]:
    """Closure, defaults and attributes; the function may be common to all networks."""
    if function.__module__ != networks.__name__:
        return
    names, cells = function.__code__.co_freevars, function.__closure__ or ()
    for name, cell in zip(names, cells, strict=True):
        put = functools.partial(setattr, cell, "cell_contents")
        yield from _held(f"{path}.<{name}>", cell.cell_contents, put, seen)
    if function.__defaults__:
        numbers = (1, 2, 3)
        yield Site(
            f"{path} defaults",
            lambda draw: setattr(function, "__defaults__", (draw.choice(numbers),)),
        )
    for name in function.__kwdefaults__ or ():
        yield Site(
            f"{path} default {name}",
            lambda draw, n=name: function.__kwdefaults__.update({n: draw.choice(FLOATS)}),
        )
    yield from _of_dict(path, vars(function), seen) if vars(function) else ()


def _shared() -> Iterator[Site]:
    """Class attributes, methods and globals: all networks have them in common."""
    for one, name in [
        (networks.Block, "gain"),
        (networks.Block, "unused_gain"),
        (networks.Doubled, "factor"),
        (networks, "GAIN"),
        (networks, "UNUSED_GAIN"),
    ]:
        label = f"{one.__name__}.{name}".replace("UNUSED", "unused")
        yield Site(
            label, lambda draw, o=one, n=name: setattr(o, n, draw.choice(FLOATS)), is_shared=True
        )
    for key in ("gain", "unused"):
        yield Site(
            f"SHARED_TABLE.{key}",
            lambda draw, k=key: networks.SHARED_TABLE.update({k: draw.choice(FLOATS)}),
            is_shared=True,
        )

    def method(draw: Draw) -> None:
        factor = draw.choice(FLOATS)
        networks.Block.scaled = lambda self, h: h * factor  # type: ignore[method-assign]

    yield Site("Block.scaled", method, is_shared=True)


def _coin(draw: Draw) -> bool:
    return draw.random() < 0.5
