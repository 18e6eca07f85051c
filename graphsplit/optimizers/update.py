"""Between the last gradient and the next step: unscale, clip, step; on one worker.

What a plain loop does over all parameters, each worker does over those it owns::

    scaler.scale(loss * loss_scale).backward()                 loss_gradient
    scaler.unscale_(optimizer)                                 partial
    clip_grad_norm_(network.parameters(), max_norm)            partial, clip
    scaler.step(optimizer); scaler.update()                    step
    optimizer.zero_grad()                                      zero_gradients

``partial`` gives the numbers that the other workers need: for each optimizer whether one of its
gradients is infinite or NaN, and the norm of every gradient. ``clip`` takes those of all workers.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Literal

import torch

from graphsplit.errors import ConfigurationError, InvariantError
from graphsplit.optimizers.clip import Clip, GlobalNorm, Kind, Value
from graphsplit.optimizers.gradients import gradients_everywhere
from graphsplit.optimizers.optimizer import OwnedOptimizer
from graphsplit.optimizers.own_step import guard_state
from graphsplit.optimizers.ownership import Residence, is_elsewhere
from graphsplit.optimizers.partial_norm import Share
from graphsplit.partition.shared_norms import REDUCTION_DTYPE
from graphsplit.text import described
from graphsplit.torch_ext.attributes import GROWTH

GradientOrder = Literal["left", "pairs"]
AccumulateBy = Literal["batch", "microbatch"]
_NOTHING_CHECKED, _FINITE = -1.0, 0.0
_NO_GRADIENT = -1.0
# A gradient's dtype travels as its place in this list.
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.complex32,
)


@dataclass(kw_only=True)
class UpdateRules:
    """The rules by which a Model treats gradients.

    Attributes:
        clip: How gradients are clipped, or None.
        scaler: Scales the loss, or None.
        set_to_none: Whether gradients become None before a step, or zeros.
        accumulate: Over how many batches gradients are added up before the optimizers step.
        gradient_order: In which order gradients of microbatches are added.
        gradient_dtype: To what gradients of microbatches and their sums are rounded, or None.
        accumulate_by: Whether each batch is added up by itself, or each microbatch over batches.
    """

    clip: Clip | None = None
    scaler: torch.amp.GradScaler | None = None
    set_to_none: bool = True
    accumulate: int = 1
    gradient_order: GradientOrder = "left"
    gradient_dtype: torch.dtype | None = None
    accumulate_by: AccumulateBy = "batch"

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All optimizers, in the order in which they are stepped."""
        raise NotImplementedError

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled."""
        return self.scaler is not None and self.scaler.is_enabled()

    def partial_sizes(self, owners: Sequence[int], num_workers: int) -> tuple[int, ...] | None:
        """How many numbers each worker tells the others in a step; None if there is no need.

        Args:
            owners: The owner of every parameter of the network.
            num_workers: Size of the cluster.
        """
        num_flags = len(self.optimizers) if self.scales else 0
        if isinstance(self.clip, GlobalNorm):
            return tuple(num_flags + 2 * owners.count(w) for w in range(num_workers))
        return (num_flags,) * num_workers if num_flags else None

    def describe_rules(self) -> str:
        """Clipping and scaling as text: workers whose scripts differ there must notice."""
        scaler = None
        if self.scaler is not None:
            scaler = {k: v for k, v in self.scaler.state_dict().items() if k != GROWTH}
        return (
            f"clip {self.clip}, scaler {scaler}, set_to_none {self.set_to_none}, "
            f"accumulate {self.accumulate} by {self.accumulate_by}, "
            f"gradient_order {self.gradient_order} in {self.gradient_dtype}"
        )


def _guarded(optimizer: torch.optim.Optimizer) -> OwnedOptimizer:
    """An optimizer whose state the Model gives, and not the optimizer itself."""
    guard_state(optimizer)
    return OwnedOptimizer(optimizer)


class Updater:
    """Carries out the rules on one worker.

    Args:
        rules: The rules.
        parameters: The network's parameters, in the order of ``network.parameters()``.

    Attributes:
        on_gradients: Called when the owned gradients are complete and unscaled, before clipping.
        last_norm: The norm of all gradients at the last clipping; None before, and without it.
        settings: The optimizers' settings, as workers compare them.
        loss_scale: The factor of the loss that the script has chosen, applied before backward.
    """

    def __init__(self, rules: UpdateRules, parameters: Iterable[torch.Tensor]) -> None:
        self.rules = rules
        self.on_gradients: Callable[[], None] | None = None
        self.last_norm: torch.Tensor | None = None
        self.loss_scale = 1.0
        self._owners: tuple[int, ...] = ()
        self._share: Share | None = None
        self._residence: Residence | None = None
        self._with_gradient: set[str] = set()
        self.renew(parameters)

    def renew(self, parameters: Iterable[torch.Tensor]) -> None:
        """Go on with other optimizers or parameters; owners are to be settled anew."""
        self._parameters = tuple(parameters)
        self._optimizers = [_guarded(optimizer) for optimizer in self.rules.optimizers]
        self.settings = Settings(self.rules.optimizers)

    def settle(self, residence: Residence) -> None:
        """Take note of where every parameter lives."""
        owners = residence.owner_by_id()
        self._owners = tuple(owners[id(p)] for p in self._parameters if id(p) in owners)
        self._share, self._residence = Share(residence), residence
        for optimizer in self._optimizers:
            optimizer.settle(residence)

    def check_optimizers(self) -> None:
        """Refuse optimizers that several workers cannot step.

        Raises:
            ConfigurationError: One is of that kind.
        """
        for optimizer in self._optimizers:
            optimizer.check()

    def zero_gradients(self) -> None:
        """Before a step: no gradients, or zeros."""
        for optimizer in self._optimizers:
            optimizer.zero_gradients(set_to_none=self.rules.set_to_none)

    def loss_gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """The gradient with which the backward of a loss begins: one, or that of its scaling."""
        scaler, accumulate = self.rules.scaler, self.rules.accumulate
        if not self.rules.scales and accumulate == 1 and self.loss_scale == 1.0:
            return torch.ones_like(loss, memory_format=torch.preserve_format)
        with torch.enable_grad():
            leaf = loss.detach().requires_grad_(True)
            scaled = leaf if self.loss_scale == 1.0 else leaf * self.loss_scale
            scaled = scaled if accumulate == 1 else scaled / accumulate
            scaled = scaled if scaler is None else scaler.scale(scaled)
            (gradient,) = torch.autograd.grad(scaled, leaf)
        return gradient

    def partial(self) -> torch.Tensor:
        """This worker's part: first a flag per optimizer, then two numbers per owned parameter."""
        numbers = self._unscale() if self.rules.scales else []
        self._tell()
        if isinstance(self.rules.clip, GlobalNorm):
            numbers += self._norms(self.rules.clip)
        return torch.tensor(numbers, dtype=REDUCTION_DTYPE)

    def clip(self, parts: Mapping[int, torch.Tensor]) -> None:
        """Clip the owned gradients.

        Args:
            parts: Every worker's part, by worker.

        Raises:
            RuntimeError: The norm is not finite, and that is to be an error; on every worker.
        """
        told = {worker: part.tolist() for worker, part in parts.items()}
        if self.rules.scales:
            num = len(self._optimizers)
            flags = [max(part[i] for part in told.values()) for i in range(num)]
            told = {worker: part[num:] for worker, part in told.items()}
            self._note_nonfinite(flags)
        if isinstance(self.rules.clip, GlobalNorm):
            self.last_norm = self.rules.clip.total(*self._decode(told))
            self.rules.clip.scale(self._owned(), self.last_norm)
        elif isinstance(self.rules.clip, Value):
            self.rules.clip.in_one_process(self._owned())

    def step(self) -> None:
        """Step the optimizers."""
        scaler, clip = self.rules.scaler if self.rules.scales else None, self.rules.clip
        if scaler is None and not isinstance(clip, GlobalNorm):  # else ``partial`` did
            if self.on_gradients is not None:
                self._tell()
            if clip is not None:
                clip.in_one_process(self._owned())
        for optimizer in self._optimizers:
            optimizer.step(scaler)
        if scaler is not None:
            scaler.update()

    @property
    def needs_reduction(self) -> bool:
        """Whether a step needs numbers of other workers' gradients: their ``partial``."""
        return self.rules.scales or isinstance(self.rules.clip, GlobalNorm)

    def note_gradients(self, names: Iterable[str]) -> None:
        """Parameters get gradients in the step under way, wherever they live."""
        self._with_gradient.update(names)

    def _tell(self) -> None:
        if self.on_gradients is None:
            return
        with gradients_everywhere(self._parameters, self._with_gradient):
            self.on_gradients()
        if self._residence is not None and self.rules.set_to_none:
            groups = (group for o in self.rules.optimizers for group in o.param_groups)
            reset = {id(p) for group in groups for p in group["params"]}
            tensors = self._residence.tensors
            self._with_gradient = {n for n in self._with_gradient if id(tensors[n]) not in reset}

    def _owned(self) -> list[torch.Tensor]:
        return [p for p in self._parameters if not is_elsewhere(p)]

    def _unscale(self) -> list[float]:
        """Unscale; for each optimizer, whether something infinite or NaN was found here."""
        scaler = self.rules.scaler
        assert scaler is not None
        scaler.scale(torch.zeros(()))  # workers that do not have the loss know the scale too
        flags = []
        for optimizer in self._optimizers:
            found = optimizer.unscale(scaler)
            flags.append(max((float(f) for f in found.values()), default=_NOTHING_CHECKED))
        return flags

    def _note_nonfinite(self, flags: Sequence[float]) -> None:
        """Let the scaler believe that it has seen every gradient of the job."""
        assert self.rules.scaler is not None
        for optimizer, flag in zip(self._optimizers, flags, strict=True):
            found = optimizer.checks(self.rules.scaler)
            found.clear()
            if flag >= _FINITE:
                found[torch.device("cpu")] = torch.full((), flag, dtype=torch.float32)

    def _norms(self, clip: GlobalNorm) -> list[float]:
        owned = self._owned()
        gradients = [p.grad for p in owned if p.grad is not None]
        norms = iter(clip.norms(gradients))
        numbers: list[float] = []
        for parameter in owned:
            if parameter.grad is None:
                numbers += [_NO_GRADIENT, 0.0]
            else:
                numbers += [_code_of(parameter.grad.dtype), next(norms)]
        return numbers

    def _decode(self, told: Mapping[int, Sequence[float]]) -> tuple[list[float], list[Kind]]:
        """The norms and kinds of all gradients, in the order of the network's parameters."""
        if len(self._owners) != len(self._parameters):
            raise InvariantError("a parameter has no owner")
        unread = {worker: iter(part) for worker, part in told.items()}
        norms, kinds = [], []
        for parameter, owner in zip(self._parameters, self._owners, strict=True):
            code, norm = next(unread[owner]), next(unread[owner])
            if code != _NO_GRADIENT:
                norms.append(norm)
                kinds.append((_DTYPES[int(code)], parameter.device))
        return norms, kinds


def _code_of(dtype: torch.dtype) -> float:
    if dtype not in _DTYPES:
        raise ConfigurationError(
            f"clipping by the global norm met a gradient of {dtype}; expected a floating-point or "
            f"complex one"
        )
    return float(_DTYPES.index(dtype))


def _described(value: Any) -> str:
    is_class = isinstance(value, type)
    return f"the class {value.__name__}" if is_class else f"a {type(value).__name__}"


def rules_problems(optimizers: Any, clip: Any, scaler: Any) -> list[str]:
    """Problems of a Model's arguments, in words."""
    problems = []
    is_one = optimizers is None or isinstance(optimizers, torch.optim.Optimizer)
    if not is_one and not isinstance(optimizers, (list, tuple)):
        return [f"optimizer is {_described(optimizers)}; expected a torch.optim.Optimizer"]
    several = [optimizers] if is_one and optimizers is not None else optimizers or []
    for optimizer in several:
        name = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.Optimizer):
            problems.append(
                f"optimizer is {_described(optimizer)}; expected a torch.optim.Optimizer"
            )
        elif isinstance(optimizer, torch.optim.LBFGS):
            problems.append(
                "LBFGS runs the step several times by a closure, which a Model does not; use "
                "another optimizer, or keep your loop and give it gs.distribute(net)"
            )
        elif any(group.get("differentiable") for group in optimizer.param_groups):
            problems.append(
                f"{name} has differentiable=True, which steps parameters that are no leaves; "
                f"leave it out"
            )
    if len({id(optimizer) for optimizer in several}) < len(several):
        problems.append("optimizer names the same optimizer twice")
    if clip is not None and not isinstance(clip, (GlobalNorm, Value)):
        shown = repr(clip) if isinstance(clip, (int, float, str)) else described(clip)
        problems.append(f"clip is {shown}; expected gs.clip.GlobalNorm(...) or gs.clip.Value(...)")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        problems.append(f"scaler is {described(scaler)}; expected a torch.amp.GradScaler")
    return problems


# The settings of optimizers that scripts change, as numbers that workers compare at each step.
#
# Each worker steps what lives there with its own copy of the optimizer. A script that changes a
# learning rate on one worker alone, or a data set that does so where it is read, would train a part
# of the network at another rate than the rest.

# What optimizers count themselves is in their groups too, and only where they have parameters: of
# classes that are not torch's, these alone are known to be the script's.
_COMPARED = ("lr", "weight_decay", "momentum", "betas", "eps")
_MAX_TOLD = 24  # numbers; a checksum stands for the rest
MOST_SETTINGS = _MAX_TOLD + 1
"""How many numbers ``Settings`` gives at most."""

_NONE = float("nan")


class Settings:
    """The settings of a Model's optimizers.

    Args:
        optimizers: The optimizers; they are not held.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = [(weakref.ref(one), _keys_of(one)) for one in optimizers]
        self._seen: list[Any] = []
        self._has_tensors = False  # whose values change in place
        self._numbers: tuple[float, ...] = ()

    def numbers(self) -> tuple[float, ...]:
        """The first numbers among the settings, learning rates before all, and a checksum."""
        now: list[Any] = []
        for held, keys in self._optimizers:  # at every step: a generator would take as long again
            for group in getattr(held(), "param_groups", ()):
                now += map(group.get, keys)
        is_same = len(now) == len(self._seen) and all(map(is_, now, self._seen))
        if not is_same or self._has_tensors:
            self._seen = now
            self._has_tensors = any(isinstance(value, torch.Tensor) for value in now)
            told = (number for *_, number in self._told())
            self._numbers = (*told, float(zlib.crc32(repr(list(map(_plain, now))).encode())))
        return self._numbers if now else ()

    def differing(
        self, mine: Sequence[float], theirs: Sequence[float], ranks: tuple[int, int]
    ) -> list[str]:
        """The settings that are not the same on two workers, in words.

        Args:
            mine: The numbers of this worker.
            theirs: Those of the other one.
            ranks: This worker, and the other one.
        """
        rank, other = ranks
        if len(mine) != len(theirs):
            return [f"the optimizers have other groups on worker {rank} than on worker {other}"]
        pairs = zip(self._told(), mine, theirs, strict=False)
        found = [
            f"{name} of the optimizer's group {number} is {value!r} on worker {rank}, "
            f"{_as(value, there)!r} on worker {other}"
            for (number, name, value, _), here, there in pairs
            if repr(here) != repr(there)
        ]
        if found or mine[-1:] == theirs[-1:]:
            return found
        kept = [{key: group[key] for key in keys if key in group} for group, keys in self._groups()]
        return [
            f"the optimizer's settings are {str(kept)[:300]} on worker {rank}, and others on "
            f"worker {other}"
        ]

    def _groups(self) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
        for held, keys in self._optimizers:
            optimizer = held()
            for group in () if optimizer is None else optimizer.param_groups:
                yield group, keys

    def _told(self) -> list[tuple[int, str, Any, float]]:
        """Group, name, value and number of the settings that are numbers."""
        found = []
        for number, (group, keys) in enumerate(self._groups()):
            for key in keys:
                value = _plain(group.get(key))
                many = isinstance(value, tuple)
                for index, one in enumerate(value if many else (value,)):
                    if one is None or isinstance(one, (bool, int, float)):
                        name = f"{key}[{index}]" if many else key
                        found.append((number, name, one, _NONE if one is None else float(one)))
        found.sort(key=lambda told: told[1] != "lr")
        return found[:_MAX_TOLD]


def _keys_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    return tuple(optimizer.defaults) if is_torchs else _COMPARED


def _as(value: Any, number: float) -> Any:
    """Another worker's number as the setting that it stands for."""
    if number != number:
        return None
    is_whole = isinstance(value, (bool, int)) and number.is_integer()
    return type(value)(number) if is_whole else number


def _plain(value: Any) -> Any:
    """A value whose text is the same on all workers."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain else type(value).__name__
