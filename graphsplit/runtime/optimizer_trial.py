"""Try out whether a step gives the same bits where each worker steps its own parameters.

Two forked children step the user's own optimizer, hooks and all, over small random values: one
has every parameter, the other those of this worker, as in a real step. What they leave behind is
compared. The parent's objects stay as they are.

    phase        gradients
    finite       of many sizes, some None, some zero
    not finite   one NaN, then one infinite
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphsplit.runtime import partial_norm
from graphsplit.runtime.child_process import Child, ChildError, raised_where
from graphsplit.runtime.kept_state import Path, kept_state, text_of_tensor
from graphsplit.runtime.ownership import Residence, is_elsewhere, take_back
from graphsplit.runtime.per_parameter import step_hooks

_DEADLINE_S = 60.0
_MAX_ELEMENTS = 2**20  # of all small parameters together
_CAPS = (64, 16, 8, 4, 3, 2, 1)
# How large the gradients of a step are; a norm that is clipped must be found above and below.
_FINITE = (1.0, 1e-3, 1.0, 30.0, 1e-6, 1.0, 1e4, 1.0, 0.1, 1.0, 1.0, 1e-2)
_NOT_FINITE = (float("nan"), float("inf"))

OnlyOwned = Callable[[], AbstractContextManager[None]]
_Kept = dict[Path, str]


@dataclass(frozen=True)
class _Left:
    """What the steps of one child have left.

    Attributes:
        phases: What was kept after each phase that ended.
        raised: What ended the steps, or None.
        drawn: The generators that were drawn from.
    """

    phases: list[_Kept]
    raised: str | None
    drawn: list[str]

    def as_json(self) -> Any:
        """For the way out of the child."""
        return [[list(kept.items()) for kept in self.phases], self.raised, self.drawn]

    @classmethod
    def of_json(cls, value: Any) -> _Left:
        """What a child has reported."""
        phases, raised, drawn = value
        return cls([{tuple(path): text for path, text in kept} for kept in phases], raised, drawn)


def find_difference(
    optimizer: torch.optim.Optimizer, residence: Residence, only_owned: OnlyOwned
) -> str | None:
    """What a step over the parameters of this worker does otherwise than one over all, in words.

    Args:
        optimizer: The user's.
        residence: Where every tensor lives.
        only_owned: Lets the optimizer see nothing else than what lives here.

    Returns:
        None where both leave the same bits.
    """
    try:
        children = [
            Child(
                lambda has_all=has_all: _try(optimizer, residence, only_owned, has_all).as_json(),  # type: ignore[misc]
                deadline_s=_DEADLINE_S,
            )
            for has_all in (True, False)
        ]
        whole, own = [_Left.of_json(child.report()) for child in children]
    except ChildError as error:
        return f"it could not be tried out: {error}"
    return _difference(whole, own, residence)


def _difference(whole: _Left, own: _Left, residence: Residence) -> str | None:
    if whole.raised and not whole.phases:
        return f"it could not be tried out: its step raised {whole.raised}"
    if bool(own.raised) != bool(whole.raised) or len(own.phases) != len(whole.phases):
        who = "the parameters of one worker" if own.raised else "all parameters"
        return f"its step raised over {who}, and only there: {own.raised or whole.raised}"
    if whole.drawn or own.drawn:
        return f"it draws from {(whole.drawn or own.drawn)[0]}"
    elsewhere = {f"<{name}>" for name, owner in residence.owners.items() if owner != residence.rank}
    for of_all, of_own in zip(whole.phases, own.phases, strict=True):
        for path in [*of_all, *(path for path in of_own if path not in of_all)]:
            if elsewhere.isdisjoint(path) and of_all.get(path) != of_own.get(path):
                return f"{_in_words(path)} differs between a step over all and over some of them"
    return None


def _in_words(path: Path) -> str:
    if len(path) == 1:
        return f"the value of {path[0][1:-1]!r}"
    return f"what is kept in {''.join(path).replace('optimizer.state', 'the state of ')}"


# In the child.


def _try(
    optimizer: torch.optim.Optimizer, residence: Residence, only_owned: OnlyOwned, has_all: bool
) -> _Left:
    phases: list[_Kept] = []
    before = _generators()
    try:
        trained = _make_small(optimizer, residence, has_all)
        for phase in (_FINITE, _NOT_FINITE):
            for number, size in enumerate(phase):
                _step(optimizer, only_owned, has_all, trained, number, size)
            phases.append(_kept(optimizer, residence, has_all))
    except Exception as error:
        return _Left(phases, raised_where(error), [])
    after = _generators()
    return _Left(phases, None, [name for name, state in before.items() if after[name] != state])


def _step(
    optimizer: torch.optim.Optimizer,
    only_owned: OnlyOwned,
    has_all: bool,
    trained: Mapping[int, torch.Tensor],
    number: int,
    size: float,
) -> None:
    def zero_and_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for index, parameter in trained.items():
            parameter.grad = _gradient(parameter, index, number, size)
        optimizer.step()

    if has_all:
        zero_and_step()
    else:
        with only_owned():
            zero_and_step()


def _gradient(parameter: torch.Tensor, index: int, step: int, size: float) -> torch.Tensor | None:
    """A parameter's gradient in a step; alike in both children."""
    value = _random(parameter, index, step)
    if size not in _FINITE:
        if index == step and value.numel():
            value.reshape(-1)[0] = size
        return value
    is_none = (
        (step == 1 and index % 3 == 0)
        or (step == 4 and index % 2 == 1)
        or (step == 6 and index > 0)
    )
    if is_none:
        return None
    return torch.zeros_like(value) if step == 8 and index % 2 == 0 else value * size


def _random(like: torch.Tensor, index: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + 1000 * index + step)
    dtype = like.dtype if like.dtype.is_complex else torch.float32
    return torch.randn(like.shape, generator=generator, dtype=dtype).to(like.dtype)


def _make_small(
    optimizer: torch.optim.Optimizer, residence: Residence, has_all: bool
) -> dict[int, torch.Tensor]:
    """Give parameters small random values; returns the trained ones that are here, by number."""
    if has_all:
        partial_norm.forget()
    parameters = [t for t in residence.unique() if isinstance(t, nn.Parameter)]
    cap = _cap([tuple(p.shape) for p in parameters])
    here: dict[int, torch.Tensor] = {}
    for index, parameter in enumerate(parameters):
        if has_all and is_elsewhere(parameter):
            take_back(parameter)
        if is_elsewhere(parameter):
            continue
        small = torch.empty(_small(tuple(parameter.shape), cap), dtype=parameter.dtype)
        is_number = small.is_floating_point() or small.is_complex()
        parameter.data = _random(small, index, -1) if is_number else torch.zeros_like(small)
        parameter.grad = None
        if parameter.requires_grad:
            here[index] = parameter
    if has_all:
        for tensor in residence.unique():
            if is_elsewhere(tensor):
                take_back(tensor)
    if cap is not None:
        names = residence.names()
        for tensor in _tensors_in(vars(optimizer), names, set()):
            tensor.data = tensor.data[tuple(slice(0, cap) for _ in tensor.shape)].clone()
    return _by_owner(here, parameters, residence)


def _by_owner(
    here: dict[int, torch.Tensor], parameters: Sequence[torch.Tensor], residence: Residence
) -> dict[int, torch.Tensor]:
    """Number parameters so that 0 and 1 live on two workers: theirs are the ones not finite."""
    owners = residence.owner_by_id()
    first = next((i for i, p in enumerate(parameters) if p.requires_grad), 0)
    other = next(
        (
            i
            for i, p in enumerate(parameters)
            if p.requires_grad and owners[id(p)] != owners[id(parameters[first])]
        ),
        first,
    )
    order = sorted(range(len(parameters)), key=lambda i: (i != first, i != other, i))
    return {number: here[index] for number, index in enumerate(order) if index in here}


def _cap(shapes: list[tuple[int, ...]]) -> int | None:
    """How large a dimension may be; None: all stay as they are."""
    for cap in (None, *_CAPS):
        if sum(torch.Size(_small(shape, cap)).numel() for shape in shapes) <= _MAX_ELEMENTS:
            return cap
    return _CAPS[-1]


def _small(shape: tuple[int, ...], cap: int | None) -> tuple[int, ...]:
    return shape if cap is None else tuple(min(size, cap) for size in shape)


def _tensors_in(value: Any, names: Mapping[int, str], seen: set[int]) -> Iterator[torch.Tensor]:
    """What an optimizer keeps beside the network's own tensors."""
    if id(value) in names or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors_in(entry, names, seen)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors_in(entry, names, seen)


def _kept(optimizer: torch.optim.Optimizer, residence: Residence, has_all: bool) -> _Kept:
    """The values of the tensors that are here, and all that the code of a step can reach."""
    kept: _Kept = {
        (f"<{name}>",): text_of_tensor(tensor)
        for name, tensor in residence.tensors.items()
        if not is_elsewhere(tensor)
    }
    roots = {
        "optimizer": optimizer,
        "hooks": step_hooks(optimizer),
        **{
            kind.__qualname__: kind
            for kind in type(optimizer).__mro__
            if kind.__module__.partition(".")[0] not in ("torch", "builtins")
        },
    }
    return kept | kept_state(roots, residence.names())


def _generators() -> dict[str, Any]:
    found: dict[str, Any] = {
        "torch's generator": torch.default_generator.get_state().tolist(),
        "Python's random": random.getstate(),
    }
    if "numpy" in sys.modules:
        found["numpy.random"] = repr(sys.modules["numpy"].random.get_state(legacy=False))
    return found
