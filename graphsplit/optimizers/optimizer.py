"""The user's optimizer, stepped over the parameters that live here."""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from operator import is_, itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from graphsplit.errors import ConfigurationError
from graphsplit.frames import where_defined
from graphsplit.optimizers import partial_norm
from graphsplit.optimizers.own_step import (
    by_the_model,
    code_of_step,
    guard_step,
    is_said,
    step_hooks,
)
from graphsplit.optimizers.ownership import WHOSE, Residence, is_elsewhere
from graphsplit.optimizers.per_parameter import is_listed, replaced_step
from graphsplit.optimizers.trial import KEPT_IN, Trial, TrialPart, generator_states, note_step
from graphsplit.torch_ext.attributes import scaler_findings
from graphsplit.torch_ext.private import CHOICE_OF_FORM, foreach_devices


class _Verdict(enum.Enum):
    """This worker's share of an optimizer."""

    STEP = "steps it over what lives here"
    LEAVE = "leaves it to the workers that have its parameters"
    REFUSE = "refuses it"


@dataclass(frozen=True)
class _Judged:
    """A verdict, and what it was found for.

    Attributes:
        code: All that decides what a step does.
        members: The parameters of each group.
        owners: The workers that have some of them.
        verdict: What was found.
        reason: Why it is refused.
        has_some: Whether this worker has some of the parameters.
        is_known: Whether nothing needs to be found out: it is PyTorch's own, or nobody else steps.
        is_torchs: Whether all code of its step is PyTorch's own, which leaves groups as they are.
    """

    code: tuple[Any, ...]
    members: tuple[tuple[torch.Tensor, ...], ...]
    owners: tuple[int, ...] = ()
    verdict: _Verdict = _Verdict.STEP
    reason: str = ""
    has_some: bool = True
    is_known: bool = True
    is_torchs: bool = False


@dataclass
class StateOrder:
    """When each entry of an optimizer's state was made: all workers' stand in that order.

    PyTorch makes an entry at the first step of its parameter, which a frozen one has later.

    Attributes:
        num_steps: Steps so far, equal on all workers.
        made: Of each entry here: the step, and the parameter's position among all.
    """

    num_steps: int = 0
    made: dict[torch.Tensor, tuple[int, int]] = field(default_factory=dict)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note entries that are new, and forget those that are gone."""
        if len(self.made) == len(optimizer.state):
            return
        everything = (p for group in optimizer.param_groups for p in group["params"])
        positions = {id(p): position for position, p in enumerate(everything)}
        before, self.made = self.made, {}
        for key in optimizer.state:
            if id(key) in positions:
                self.made[key] = before.get(key, (self.num_steps, positions[id(key)]))

    def note_loaded(self, parameters: Sequence[torch.Tensor]) -> None:
        """The entries of some parameters were loaded, on all workers in this order."""
        self.num_steps = 0
        self.made = {parameter: (0, position) for position, parameter in enumerate(parameters)}


_orders: WeakKeyDictionary[torch.optim.Optimizer, StateOrder] = WeakKeyDictionary()


def order_of(optimizer: torch.optim.Optimizer) -> StateOrder:
    """The order of an optimizer's state."""
    return _orders.setdefault(optimizer, StateOrder())


class OwnedOptimizer:
    """Steps an optimizer on one worker.

    The optimizers of ``torch.optim`` treat every parameter by itself, so each worker may step
    those it owns: the results are those of one process. Others are tried out, as soon as it is
    known who owns what, and again where their hooks or groups have changed. Settings, hooks and
    schedulers work on the user's own object, whose groups hold all parameters before and after.

    Args:
        optimizer: The user's optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._order = order_of(optimizer)
        guard_step(optimizer)
        self._residence: Residence | None = None
        self._owned: list[list[torch.Tensor]] = []
        self._counted: list[list[torch.Tensor]] = []
        self._on_devices: list[int] = []  # groups with owned parameters that are on no CPU
        self._owners: tuple[int, ...] = ()
        self._judged: _Judged | None = None

    def settle(self, residence: Residence) -> None:
        """Take note of where parameters live, and find out whether each worker may step its own."""
        self._residence = residence
        self._counted = []
        self._judge()

    @property
    def is_part(self) -> bool:
        """Whether a step over what lives here, if that is anything, is a part of that over all."""
        return self._judge().verdict is _Verdict.STEP

    def check(self) -> _Judged:
        """Refuse an optimizer whose step over what lives here is not a part of that over all.

        Raises:
            ConfigurationError: It is so, or that could not be found out.
        """
        judged = self._judge()
        if judged.verdict is _Verdict.REFUSE:
            raise ConfigurationError(_refusal(self._optimizer, judged))
        return judged

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Step the owned parameters, or have the scaler do it where all gradients are finite.

        Raises:
            ConfigurationError: As ``check``; or it draws random numbers.
        """
        judged = self.check()
        self._order.note(self._optimizer)
        self._order.num_steps += 1
        if judged.is_known:
            self._step(scaler)
            return
        if judged.verdict is _Verdict.LEAVE:
            note_step(self._optimizer)
            return
        with self._without_draws(), partial_norm.allowed():
            self._step(scaler)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, the script itself steps it: over what lives here.

        Raises:
            ConfigurationError: As ``step``; or only some workers can step it.
        """
        judged = self.check()
        if judged.verdict is _Verdict.LEAVE:
            raise ConfigurationError(
                f"{_described(self._optimizer)} has none of its parameters on this worker, and "
                f"cannot be stepped without\n  Fix: use gs.per_parameter(optimizer) if it treats "
                f"every parameter by itself."
            )
        self._order.note(self._optimizer)
        self._order.num_steps += 1
        unknown = nullcontext() if judged.is_known else self._without_draws()
        norms = nullcontext() if judged.is_known else partial_norm.allowed()
        with unknown, norms, self._only_owned(), by_the_model():
            yield
        self._order.note(self._optimizer)

    def zero_gradients(self, *, set_to_none: bool = True) -> None:
        """Set the gradients of the owned parameters to None, or to zeros."""
        self._refresh()
        is_own = type(self._optimizer).zero_grad is not torch.optim.Optimizer.zero_grad
        if is_own or not set_to_none:
            with self._only_owned():
                self._optimizer.zero_grad(set_to_none=set_to_none)
            return
        for parameters in self._owned:
            for parameter in parameters:
                parameter.grad = None

    def unscale(self, scaler: torch.amp.GradScaler) -> dict[torch.device, torch.Tensor]:
        """Unscale the owned gradients.

        Returns:
            For each device, 1 if an infinite or NaN gradient was found there, else 0; empty if
            there is no gradient.
        """
        self._refresh()
        with self._only_owned():
            scaler.unscale_(self._optimizer)
        return self.checks(scaler)

    def checks(self, scaler: torch.amp.GradScaler) -> dict[torch.device, torch.Tensor]:
        """The scaler's finding in this optimizer's gradients; it decides by this alone."""
        found: dict[torch.device, torch.Tensor]
        found = scaler_findings(scaler)[id(self._optimizer)]["found_inf_per_device"]
        return found

    def _step(self, scaler: torch.amp.GradScaler | None) -> None:
        with self._only_owned(), by_the_model():
            if scaler is None:
                self._optimizer.step()
            else:
                scaler.step(self._optimizer)
        self._order.note(self._optimizer)

    def _judge(self) -> _Judged:
        """The verdict; found anew only where something has changed."""
        code = code_of_step(self._optimizer)
        self._refresh()
        judged = self._judged
        if judged is None or not are_same(judged.code, code):
            members = tuple(tuple(group) for group in self._counted)
            judged = self._judged = self._find(code, members)
        return judged

    def _holds(self, judged: _Judged) -> bool:
        """Whether a verdict is of these groups, and of those who own their parameters now."""
        return (
            len(judged.members) == len(self._counted)
            and all(map(are_same, judged.members, self._counted))
            and judged.owners == self._owners
        )

    def _find(
        self, code: tuple[Any, ...], members: tuple[tuple[torch.Tensor, ...], ...]
    ) -> _Judged:
        owners, residence = self._owners, self._residence
        if is_listed(self._optimizer):
            return _Judged(code, members, owners, is_torchs=True)
        is_alone = residence is None or residence.num_workers == 1
        if residence is None or is_alone or is_said(self._optimizer):
            return _Judged(code, members, owners, is_known=is_alone)
        if owners == (residence.rank,):
            return _Judged(code, members, owners, is_known=False)
        everything = _with_others(residence, members)
        trial = Trial(self._optimizer, everything, self._only_owned)
        reason = trial.difference(TrialPart.OWN)
        if reason is None:
            return _Judged(code, members, owners, is_known=False)
        verdict, has_some = _Verdict.REFUSE, residence.rank in owners
        if not has_some:
            reason = trial.difference(TrialPart.NONE)
            verdict = _Verdict.LEAVE if reason is None else verdict
        return _Judged(code, members, owners, verdict, reason or "", has_some, is_known=False)

    @contextmanager
    def _without_draws(self) -> Iterator[None]:
        """Workers' generators agree after a step, which a draw of one worker would end."""
        before = generator_states()
        yield
        drawn = [name for name, state in generator_states().items() if state != before[name]]
        if drawn:
            raise ConfigurationError(
                f"{_described(self._optimizer)} draws from {drawn[0]} as it steps: in one process "
                f"what is drawn next would be something else than on several workers\n"
                f"  Fix: let it draw from a torch.Generator of its own, one for each parameter."
            )

    def _only_owned(self) -> AbstractContextManager[None]:
        """Leave out what is not here: it has no gradient, but skipping it takes time."""
        is_torchs = self._judged is not None and self._judged.is_torchs
        check = None if is_torchs else self._check_unchanged
        return _Narrowed(self._optimizer.param_groups, self._owned, self._on_devices, check)

    def _check_unchanged(
        self, groups: Sequence[Mapping[str, Any]], given: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        now = self._optimizer.param_groups
        is_given = all(map(is_, (group["params"] for group in groups), given))
        if is_given and are_same(now, groups) and _hold(groups, self._owned):
            return
        raise ConfigurationError(
            f"{_described(self._optimizer)} changes its groups, or their parameters, as it steps; "
            f"each worker sees there only what lives on it\n"
            f"  Fix: change them between steps, for example in a callback's on_step_end."
        )

    def _refresh(self) -> None:
        """Look up the owned parameters of each group anew when groups have changed."""
        groups = self._optimizer.param_groups
        if not _hold(groups, self._counted):
            self._counted = [list(group["params"]) for group in groups]
            self._owned = [[p for p in group if not is_elsewhere(p)] for group in self._counted]
            self._on_devices = (
                [n for n, g in enumerate(self._owned) if not all(p.is_cpu for p in g)]
                if _asks_torch(self._optimizer)
                else []
            )
            self._owners = self._found_owners()
            if self._judged is not None and not self._holds(self._judged):
                self._judged = None

    def _found_owners(self) -> tuple[int, ...]:
        """The workers that have some of the parameters."""
        if self._residence is None:
            return ()
        known = _with_others(self._residence, self._counted).owner_by_id()
        return tuple(sorted({known[id(p)] for group in self._counted for p in group}))


def _with_others(residence: Residence, members: Sequence[Sequence[torch.Tensor]]) -> Residence:
    """Where all parameters of an optimizer live, those of layers too that are no longer there."""
    known, rank = residence.owner_by_id(), residence.rank
    everything = enumerate(p for group in members for p in group)
    others = {f"parameter {n} of the optimizer": p for n, p in everything if id(p) not in known}
    owners = {name: getattr(p, WHOSE)[1] if is_elsewhere(p) else rank for name, p in others.items()}
    return replace(
        residence,
        tensors={**residence.tensors, **others},
        owners={**residence.owners, **owners},
    )


_parameters_of = itemgetter("params")


class _Narrowed:
    """Inside, an optimizer's groups hold these parameters alone.

    At every step: a generator would take as long again. Groups on devices are stepped in the form
    (many tensors in one kernel, or each alone) that torch would choose for all of their parameters.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        parameters: Sequence[Sequence[torch.Tensor]],
        on_devices: Sequence[int],
        check: Callable[[Sequence[dict[str, Any]], Sequence[Sequence[torch.Tensor]]], None] | None,
    ) -> None:
        self._groups = tuple(groups)
        self._formed: list[dict[str, Any]] = []
        self._forms: list[bool] = []
        if on_devices:
            self._formed = list(filter(_chooses_form, map(groups.__getitem__, on_devices)))
            self._forms = list(map(_takes_many, self._formed))
        self._whole = list(map(_parameters_of, groups))
        self._given = parameters if check is None else list(map(list, parameters))
        self._check = check

    def __enter__(self) -> None:
        for group, parameters in zip(self._groups, self._given, strict=True):
            group["params"] = parameters
        if self._forms:
            for group, takes_many in zip(self._formed, self._forms, strict=True):
                group["foreach"] = takes_many

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._check is not None:
                self._check(self._groups, self._given)
        finally:
            for group, whole in zip(self._groups, self._whole, strict=True):
                group["params"] = whole
            for group in self._formed:
                group["foreach"] = None


def _asks_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer lets torch choose how to step a group; Adafactor steps each alone."""
    lines = type(optimizer).__mro__
    modules = {c.__module__ for c in lines[: lines.index(torch.optim.Optimizer)]}
    return any(hasattr(sys.modules.get(name), CHOICE_OF_FORM) for name in modules)


def _chooses_form(group: Mapping[str, Any]) -> bool:
    """Whether torch is left the choice of how to step a group."""
    is_open = "foreach" in group and group["foreach"] is None
    return is_open and not group.get("fused") and not group.get("differentiable")


def _takes_many(group: Mapping[str, Any]) -> bool:
    """Whether torch would step many of a whole group's parameters in one kernel."""
    if isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable", True):
        return False
    kinds = {p.device.type for p in group["params"] if p.requires_grad}
    return kinds <= set(foreach_devices())


def _hold(groups: Sequence[Mapping[str, Any]], parameters: Sequence[Sequence[Any]]) -> bool:
    """Whether groups hold these parameters, and no others."""
    held = map(_parameters_of, groups)
    return len(groups) == len(parameters) and all(map(are_same, held, parameters))


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects, in one order."""
    return len(some) == len(others) and all(map(is_, some, others))


def _refusal(optimizer: torch.optim.Optimizer, judged: _Judged) -> str:
    name, owners = _described(optimizer), ", ".join(map(str, judged.owners))
    is_kept = judged.reason.startswith(KEPT_IN)
    kept = "keep it in optimizer.state[parameter], not in a list; or " if is_kept else ""
    if judged.has_some:
        return (
            f"{name} cannot be stepped worker by worker: {judged.reason}\n"
            f"  expected: what a step does to a parameter depends on that parameter and its "
            f"gradient alone; its parameters live on workers {owners}\n"
            f"  Fix: let all its parameters live on one worker; or {kept}clip by the norm of all "
            f"gradients with Model(..., clip=gs.clip.GlobalNorm(max_norm)); or keep your own loop "
            f"and give it gs.distribute(net), where any optimizer steps whose hooks are there "
            f"before its first step; or, if you know that it treats every parameter by itself, and "
            f"has no list over all of them, use gs.per_parameter(optimizer)."
        )
    return (
        f"{name} has its parameters on other workers ({owners}), and a step changes more than "
        f"what belongs to them: {judged.reason}\n"
        f"  expected: what this worker can see of it stays right without a step here\n"
        f"  Fix: keep it in optimizer.state[parameter], which lives with the parameter; or run "
        f"the job with one worker."
    )


def _described(optimizer: torch.optim.Optimizer) -> str:
    """An optimizer's class, its hooks, and the lines where they are."""
    kind = type(optimizer)
    text = kind.__qualname__
    if not kind.__module__.startswith("torch."):
        text += _where(kind.step)
    own = replaced_step(optimizer)
    if own is not None:
        text += f" with a step of its own{_where(own)}"
    hooks = [
        getattr(hook, "__qualname__", type(hook).__qualname__) + _where(hook)
        for hook in step_hooks(optimizer)
    ]
    return f"{text} with the step hook {', '.join(hooks)}" if hooks else text


def _where(function: Any) -> str:
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    return "" if code is None else f" ({where_defined(code)})"
