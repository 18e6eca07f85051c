"""Try out whether a step gives the same bits where each worker steps its own parameters.

Forked children step the user's own optimizer, hooks and all, over small random values: one has
every parameter, another those of this worker, as in a real step. What they leave behind is
compared. The parent's objects stay as they are.

    round         gradients
    finite        of many sizes, some zero
    some missing  some are None, then all but one
    not finite    one is NaN, then another infinite
"""

from __future__ import annotations

import enum
import functools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphsplit.optimizers import partial_norm
from graphsplit.optimizers.child_process import ChildError, ForkedTrial, raised_where
from graphsplit.optimizers.kept_state import Path, kept_state, text_of_tensor
from graphsplit.optimizers.own_step import by_the_model, step_hooks
from graphsplit.optimizers.ownership import Residence, is_elsewhere
from graphsplit.torch_ext.attributes import STEPPED, note_stepped
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass
from graphsplit.torch_ext.stand_ins import take_back

_DEADLINE_S = 60.0
_MAX_ELEMENTS = 2**20  # of all small parameters together
_CAPS = (64, 16, 8, 4, 3, 2, 1)
# How large the gradients of a step are: small ones first, as what only grows has a largest value.
_SIZES = (1e-8, 1e-6, 1e-4, 1e-2, 1.0, 30.0, 1e4, 0.1)
_NUM_STEPS = {"finite": 24, "some missing": 6, "not finite": 4}
_LOOK_AFTER = (1, 2, 3, 4, 5, 6, 8, 12, 18, 24)  # steps

OnlyOwned = Callable[[], AbstractContextManager[None]]
_Kept = dict[Path, str]
KEPT_IN = "what is kept in "


class TrialPart(enum.Enum):
    """Over what a child steps."""

    ALL = "all parameters"
    OWN = "the parameters of one worker"
    NONE = "nothing: it does not step"


@dataclass(frozen=True)
class Trial:
    """The subject of a trial.

    Attributes:
        optimizer: The user's.
        residence: Where every tensor lives.
        only_owned: Lets the optimizer see nothing else than what lives here.
    """

    optimizer: torch.optim.Optimizer
    residence: Residence
    only_owned: OnlyOwned

    def difference(self, part: TrialPart) -> str | None:
        """The difference between a step over some parameters and one over all, in words.

        Args:
            part: Over which.

        Returns:
            None where both leave the same bits in all that this worker has.
        """
        try:
            return next(filter(None, (self._difference(part, kind) for kind in _NUM_STEPS)), None)
        except ChildError as error:
            return f"it could not be tried out: {error}"

    def _difference(self, part: TrialPart, kind: str) -> str | None:
        whole, own = self._run([TrialPart.ALL, part], kind)
        if whole.raised or own.raised:
            return _raised(whole, own, part) if kind == "finite" else None
        if whole.drawn or own.drawn:
            return f"it draws from {(whole.drawn or own.drawn)[0]}"
        differing = self._differing(whole, own)
        if differing and not any(_is_value(path) for _, path in differing):
            # A clock, for example: what differs between two equal runs says nothing.
            (again,) = self._run([TrialPart.ALL], kind)
            noise = {path for _, path in self._differing(whole, again)}
            differing = [place for place in differing if place[1] not in noise]
        if not differing:
            return None
        return f"{_in_words(differing[0][1])} differs between a step over all and over {part.value}"

    def _run(self, parts: Sequence[TrialPart], kind: str) -> list[_Left]:
        with ExitStack() as stack:
            children = [
                stack.enter_context(
                    ForkedTrial(
                        functools.partial(_report, self, part, kind), deadline_s=_DEADLINE_S
                    )
                )
                for part in parts
            ]
            return [child.report() for child in children]

    def _differing(self, some: _Left, others: _Left) -> list[tuple[int, Path]]:
        """The places of this worker where they differ, with the number of the look at them."""
        residence = self.residence
        elsewhere = {f"<{n}>" for n, owner in residence.owners.items() if owner != residence.rank}
        return [
            (number, path)
            for number, (one, other) in enumerate(zip(some.kept, others.kept, strict=True))
            for path in {**one, **other}
            if elsewhere.isdisjoint(path) and one.get(path) != other.get(path)
        ]


@dataclass(frozen=True)
class _Left:
    """The outcome of the steps of one child.

    Attributes:
        kept: All that is kept, at each look.
        raised: What ended the steps, or None.
        drawn: The generators that were drawn from.
    """

    kept: list[_Kept]
    raised: str | None
    drawn: list[str]


def _raised(whole: _Left, own: _Left, part: TrialPart) -> str:
    if whole.raised:
        return f"it could not be tried out: its step raised {whole.raised}"
    return f"its step over {part.value} raised {own.raised}"


def _is_value(path: Path) -> bool:
    return len(path) == 1 or path[1:2] == (".state",)


def _in_words(path: Path) -> str:
    if len(path) == 1:
        return f"the value of {path[0][1:-1]!r}"
    return f"{KEPT_IN}{''.join(path)}"


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Let a learning rate scheduler believe that there was a step: other workers have taken it."""
    if "step" in vars(optimizer):
        note_stepped(optimizer)


def generator_states() -> dict[str, Any]:
    """The states of the generators of the process, by name; to be compared."""
    found: dict[str, Any] = {
        "torch's generator": bytes(torch.default_generator.get_state().numpy()),
        "Python's random": random.getstate(),
    }
    if "numpy" in sys.modules:
        kind, words, *rest = sys.modules["numpy"].random.get_state()
        found["numpy.random"] = kind, words.tobytes(), rest
    return found


# In the child.


def _report(trial: Trial, part: TrialPart, kind: str) -> _Left:
    with DisableTorchFunctionSubclass():  # tensors of an own loop would ask other workers
        return _try(trial, part, kind)


def _try(trial: Trial, part: TrialPart, kind: str) -> _Left:
    before, kept = generator_states(), []
    try:
        trained = _make_small(trial, part)
        for number in range(_NUM_STEPS[kind]):
            gradients = {
                index: _gradient(parameter, index, number, kind)
                for index, parameter in trained.items()
            }
            if part is not TrialPart.NONE:
                with nullcontext() if part is TrialPart.ALL else trial.only_owned():
                    trial.optimizer.zero_grad(set_to_none=True)
                    for index, parameter in trained.items():
                        parameter.grad = gradients[index]
                    with by_the_model():
                        trial.optimizer.step()
            if number + 1 in _LOOK_AFTER:
                kept.append(_kept(trial))
    except Exception as error:
        return _Left([], raised_where(error), [])
    after = generator_states()
    return _Left(kept, None, [name for name, state in before.items() if after[name] != state])


def _gradient(parameter: torch.Tensor, index: int, step: int, kind: str) -> torch.Tensor | None:
    """A parameter's gradient in a step; alike in all children."""
    value = _random(parameter, index, step) * _SIZES[step % len(_SIZES)]
    if kind == "finite":
        return torch.zeros_like(value) if step % 8 == 5 and index % 2 == 0 else value
    if kind == "some missing":
        missing = (index % 2 == 0, index % 2 == 1, index > 0)[step % 3]
        return None if step and missing else value
    if index == step - 1 and value.numel():
        value.reshape(-1)[0] = (float("nan"), float("inf"))[index % 2]
    return value


def _random(like: torch.Tensor, index: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + 1000 * index + step)
    dtype = like.dtype if like.dtype.is_complex else torch.float32
    return torch.randn(like.shape, generator=generator, dtype=dtype).to(like.dtype)


def _make_small(trial: Trial, part: TrialPart) -> dict[int, torch.Tensor]:
    """Give parameters small random values; returns the trained ones that are here, by number."""
    residence = trial.residence
    if part is TrialPart.ALL:
        partial_norm.forget()
        for tensor in residence.unique():
            if is_elsewhere(tensor):
                take_back(tensor)
    parameters = [t for t in residence.unique() if isinstance(t, nn.Parameter)]
    cap = _cap([tuple(p.shape) for p in parameters])
    here: dict[int, torch.Tensor] = {}
    for index, parameter in enumerate(parameters):
        if is_elsewhere(parameter):
            continue
        small = torch.empty(_small(tuple(parameter.shape), cap), dtype=parameter.dtype)
        is_number = small.is_floating_point() or small.is_complex()
        parameter.data = _random(small, index, -1) * 0.1 if is_number else torch.zeros_like(small)
        parameter.grad = None
        if parameter.requires_grad:
            here[index] = parameter
    if cap is not None:
        for tensor in _tensors_in(vars(trial.optimizer), residence.names(), set()):
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
    """The state that an optimizer keeps beside the network's own tensors."""
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


def _kept(trial: Trial) -> _Kept:
    """The values of the tensors that are here, and all that the code of a step can reach."""
    optimizer, residence = trial.optimizer, trial.residence
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
    reached = kept_state(roots, residence.names())
    return kept | {path: text for path, text in reached.items() if path[1:2] != (f".{STEPPED}",)}
