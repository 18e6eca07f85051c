"""The arguments of ``Model`` and ``Model.train``, checked, and made into a task."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from graphsplit.batches.microbatches import Divider
from graphsplit.errors import ConfigurationError
from graphsplit.job import joined
from graphsplit.logs import say
from graphsplit.marks.pattern import PatternError, read_pattern
from graphsplit.marks.wire import WIRE_DTYPES
from graphsplit.optimizers.update import rules_problems
from graphsplit.planning.task import Task
from graphsplit.runtime.segments.compiled import compiler_of, problems_of_compile
from graphsplit.schedule.auto import POLICIES
from graphsplit.settings import FAIL_FAST
from graphsplit.text import described
from graphsplit.train.callbacks import Callback
from graphsplit.train.metrics import as_metrics, can_count

_KNOWN = {
    "gradient_order": ("left", "pairs"),
    "accumulate_by": ("batch", "microbatch"),
    "reading": ("rows", "batches"),
    "capture": ("auto",),
    "unplaced": ("affinity", "worker0"),
}


def _problems_of_microbatches(microbatches: Any, split: Any, loss_weight: Any) -> list[str]:
    if not _is_count(microbatches, 1):
        return [f"microbatches={microbatches!r}; expected an int of 1 or more"]
    given = {"split": split, "loss_weight": loss_weight}
    problems = [
        f"{name} is {described(value)}; expected a function"
        for name, value in given.items()
        if value is not None and not callable(value)
    ]
    if microbatches == 1:
        problems += [
            f"{name} is given, but microbatches=1: a batch is not split"
            for name, value in given.items()
            if value is not None
        ]
    return problems


def _problems_of_schedule(schedule: Any) -> list[str]:
    is_known = isinstance(schedule, str) and schedule in POLICIES
    if is_known:
        return []
    if callable(schedule) and not isinstance(schedule, type):
        return _problems_of_policy(schedule)
    shown = repr(schedule) if isinstance(schedule, str) else described(schedule)
    return [
        f"schedule is {shown}; expected one of {', '.join(POLICIES)}, or a function "
        f"(plan, microbatches) -> orders"
    ]


def _problems_of_policy(policy: Any) -> list[str]:
    """Whether a function can be called as schedules are."""
    try:
        inspect.signature(policy).bind(None, 1)
    except (TypeError, ValueError) as error:
        return [f"schedule cannot be called as schedule(plan, microbatches): {error}"]
    return []


def _is_batch(loader: Any, *, has_loss_fn: bool) -> bool:
    """Whether what should yield batches is one."""
    if isinstance(loader, (torch.Tensor, Mapping)):
        return True
    is_sequence = has_loss_fn and isinstance(loader, (list, tuple))
    return is_sequence and any(isinstance(part, torch.Tensor) for part in loader)


def problems_of_loader(loader: Any, *, has_loss_fn: bool) -> list[str]:
    """The error for something that should yield batches."""
    if _is_batch(loader, has_loss_fn=has_loss_fn):
        return [
            f"loader is {described(loader)} of tensors; did you pass a batch? expected something "
            f"that yields batches, as in [batch]"
        ]
    if isinstance(loader, Iterable) and not isinstance(loader, (str, bytes)):
        return []
    is_data = isinstance(loader, torch.utils.data.Dataset)
    hint = "; did you mean DataLoader(...) of it?" if is_data else ""
    return [f"loader is {described(loader)}{hint}; expected something that yields batches"]


def check_loader(method: str, loader: Any, *, has_loss_fn: bool) -> None:
    """Raise ``ConfigurationError`` if something does not yield batches."""
    problems = problems_of_loader(loader, has_loss_fn=has_loss_fn)
    if problems:
        raise ConfigurationError(f"{method}(...): {problems[0]}")


def check_run(
    epochs: Any, loader: Any, callbacks: Any, steps: Any, resume: Any, *, has_loss_fn: bool
) -> None:
    """Refuse arguments of ``train`` that are of a wrong kind.

    Raises:
        ConfigurationError: Some are; all of them are listed together.
    """
    problems = []
    if not _is_count(epochs, 0):
        shown = repr(epochs) if isinstance(epochs, int) else described(epochs)
        is_swapped = isinstance(epochs, Iterable) and _is_count(loader, 0)
        hint = f"; did you mean train({loader}, loader)?" if is_swapped else ""
        problems.append(f"epochs is {shown}; expected an int of 0 or more{hint}")
    if steps is not None and not _is_count(steps, 1):
        problems.append(f"steps={steps!r}; expected an int of 1 or more, or None")
    if not isinstance(resume, bool):
        problems.append(f"resume={resume!r}; expected True or False")
    problems += problems_of_loader(loader, has_loss_fn=has_loss_fn)
    if not isinstance(callbacks, (list, tuple)):
        problems.append(f"callbacks is {described(callbacks)}; expected a list of callbacks")
    else:
        problems += [
            f"a callback is {described(callback)}; expected a graphsplit.callbacks.Callback"
            for callback in callbacks
            if not isinstance(callback, Callback)
        ]
    if problems:
        raise ConfigurationError("train(...): " + "\n  ".join(problems))


def problems_of_dynamic_dims(dynamic_dims: Any) -> list[str]:
    """Problems of ``dynamic_dims``, in words."""
    if dynamic_dims is None:
        return []
    if not isinstance(dynamic_dims, Mapping):
        return [
            f"dynamic_dims is {described(dynamic_dims)}; expected a dictionary of dimensions, each "
            f"with the largest size it may have, as in {{0: 32}}"
        ]
    return [
        f"dynamic_dims has {dimension!r}: {largest!r}; expected a dimension of 0 or more, and the "
        f"largest size it may have, 2 or more"
        for dimension, largest in dynamic_dims.items()
        if not (_is_count(dimension, 0) and _is_count(largest, 2))
    ]


def _problems_of_metrics(metrics: Any) -> list[str]:
    if metrics is None:
        return []
    if not isinstance(metrics, Mapping):
        return [
            f"metrics is {described(metrics)}; expected a dictionary, as in "
            f"{{'Accuracy': gs.metrics.Accuracy()}}"
        ]
    return [
        f"metrics has the name {name!r}; expected a string"
        for name in metrics
        if not isinstance(name, str)
    ] + [
        f"metric {name!r} is {described(metric)}; expected a graphsplit.metrics.Metric, an object "
        f"with reset, update and compute, or a function (outputs, target) -> number"
        for name, metric in metrics.items()
        if isinstance(metric, type) or not (callable(metric) or can_count(metric))
    ]


@dataclass(frozen=True)
class ModelArguments:
    """The arguments of ``Model``, by name. Any may be of a wrong kind."""

    net: Any
    loss_fn: Any
    optimizer: Any
    metrics: Any
    microbatches: Any
    split: Any
    loss_weight: Any
    schedule: Any
    capture: Any
    unplaced: Any
    dynamic_dims: Any
    clip: Any
    scaler: Any
    autocast: Any
    set_to_none: Any
    accumulate: Any
    compile: Any
    recompute: Any
    keep_outputs: Any
    gradient_order: Any
    gradient_dtype: Any
    accumulate_by: Any
    reading: Any

    def check(self) -> None:
        """Refuse arguments that are not as ``Model`` says; all of them are listed together.

        Raises:
            ConfigurationError: Some are not.
        """
        problems = [*self._problems_of_what_runs(), *self._problems_of_how_it_runs()]
        if problems:
            raise ConfigurationError("Model(...): " + "\n  ".join(problems))

    def task(self) -> Task:
        """The task that they ask for, once they were checked."""
        if self.compile and joined.get_rank() == 0:
            say(
                "torch.compile compiles what each worker runs when it first runs, which takes from "
                "seconds to minutes",
                event="compiling",
                level="warning",  # seen in one process, too
            )
        metrics, given = as_metrics(self.metrics), vars(self)
        as_given = {one.name: given[one.name] for one in fields(Task) if one.name in given}
        as_given["dynamic_dims"] = dict(self.dynamic_dims or {})
        as_given["recompute"] = recomputed_paths(self.net, self.recompute)
        return Task(
            network=self.net,
            with_loss=any(metric.needs_loss for metric in metrics.values()),
            divider=Divider(self.microbatches, self.split, self.loss_weight),
            compiler=compiler_of(self.compile),
            **as_given,
        )

    def _problems_of_what_runs(self) -> list[str]:
        net, loss_fn, autocast = self.net, self.loss_fn, self.autocast
        problems = problems_of_dynamic_dims(self.dynamic_dims)
        if not isinstance(net, nn.Module):
            problems.append(f"net is {described(net)}; expected a torch.nn.Module")
        elif type(net).__module__ == nn.modules.loss.__name__ and isinstance(loss_fn, nn.Module):
            problems.append(
                f"net is the loss {type(net).__name__}, and loss_fn a module; did you mean "
                f"Model(net, loss_fn, optimizer)?"
            )
        if loss_fn is not None and (isinstance(loss_fn, type) or not callable(loss_fn)):
            problems.append(f"loss_fn is {described(loss_fn)}; expected a function or a module")
        problems += rules_problems(self.optimizer, self.clip, self.scaler)
        if not _is_count(self.accumulate, 1):
            problems.append(f"accumulate={self.accumulate!r}; expected an int of 1 or more")
        if autocast is not None and not (
            isinstance(autocast, torch.dtype) and autocast.is_floating_point
        ):
            problems.append(f"autocast={autocast!r}; expected a dtype, as in torch.bfloat16")
        return problems

    def _problems_of_how_it_runs(self) -> list[str]:
        problems = problems_of_compile(self.compile)
        problems += problems_of_recompute(self.net, self.recompute, self.compile)
        problems += _problems_of_metrics(self.metrics)
        problems += _problems_of_microbatches(self.microbatches, self.split, self.loss_weight)
        problems += _problems_of_schedule(self.schedule)
        problems += [
            f"{name}={value!r}; expected True or False"
            for name, value in (
                ("keep_outputs", self.keep_outputs),
                ("set_to_none", self.set_to_none),
            )
            if not isinstance(value, bool)
        ]
        job = joined.current()
        recovers = job is not None and job.recovery_policy != FAIL_FAST
        if self.keep_outputs is True and job is not None and recovers:
            problems.append(
                f"keep_outputs=True in a job that runs with {job.recovery_policy}: a worker that "
                f"comes back would not know the outputs of the steps before"
            )
        problems += self._problems_of_gradient_dtype()
        return problems + [
            f"{name}={value!r}; expected {' or '.join(map(repr, known))}"
            for name, known in _KNOWN.items()
            if (value := getattr(self, name)) not in known
        ]

    def _problems_of_gradient_dtype(self) -> list[str]:
        dtype = self.gradient_dtype
        if dtype is None:
            return []
        if dtype not in WIRE_DTYPES:
            names = ", ".join(map(str, WIRE_DTYPES))
            return [f"gradient_dtype={dtype!r}; expected one of {names}"]
        needed = []
        if self.gradient_order != "pairs":
            needed.append("gradient_order='pairs': to the left each sum has all bits of its parts")
        if self.microbatches == 1:
            needed.append("microbatches of 2 or more: gradients of microbatches are rounded")
        return [f"gradient_dtype={dtype} without {one}" for one in needed]


def _is_count(number: Any, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


# ``Model(recompute=...)``: what users say, as paths of modules.


def recomputed_paths(net: nn.Module, recompute: Any) -> bool | tuple[str, ...]:
    """The paths of the modules that are asked for; True for the whole network."""
    if isinstance(recompute, bool):
        return recompute
    found: dict[str, None] = {}
    for wanted in recompute:
        found.update(dict.fromkeys(_paths(net, wanted)))
    return True if "" in found else tuple(found)


def problems_of_recompute(net: Any, recompute: Any, compile: Any) -> list[str]:
    """Problems of ``Model(recompute=...)``, in words."""
    if recompute is False or not isinstance(net, nn.Module):
        return []
    problems = []
    if compile is not False:
        problems.append(
            "recompute is given, and compile: the compiler decides by itself what to keep; leave "
            "one of them out"
        )
    if isinstance(recompute, bool):
        return problems
    if not isinstance(recompute, (list, tuple)):
        return [
            *problems,
            f"recompute={recompute!r}; expected True, False, or a list of modules or patterns of "
            f"their names, as in ['layers.*']",
        ]
    return problems + [problem for wanted in recompute for problem in _problems(net, wanted)]


def _problems(net: nn.Module, wanted: Any) -> list[str]:
    if isinstance(wanted, nn.Module):
        if not _paths(net, wanted):
            return [f"recompute has a {type(wanted).__name__} that is not in net"]
        return []
    if not isinstance(wanted, str):
        return [f"recompute has {wanted!r}; expected modules, or patterns of their names"]
    try:
        pattern = read_pattern(wanted)
    except PatternError as error:
        return [f"recompute has {wanted!r}: {error}"]
    if not pattern.select(net):
        return [f"recompute has {wanted!r}: {pattern.miss(net)}"]
    return []


def _paths(net: nn.Module, wanted: Any) -> list[str]:
    """The paths of a module, or of those that a pattern matches."""
    if isinstance(wanted, str):
        return list(read_pattern(wanted).select(net))
    named = net.named_modules(remove_duplicate=False)
    return [path for path, module in named if module is wanted]
