"""Compare a save with a network and its optimizers, and bring each worker what it holds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphsplit.capture.graph import LOSS_PATH
from graphsplit.capture.state.kept_names import is_kept_name, register_again
from graphsplit.capture.state.owned_tensors import make_buffers
from graphsplit.checkpoint.contents import (
    GRADIENTS,
    OTHERS,
    NetworkState,
    Ownership,
    module_of_extra,
    optimizers_of,
    parameters_of,
)
from graphsplit.checkpoint.disk.source import Source, TensorRequest
from graphsplit.checkpoint.holder import StateHolder
from graphsplit.checkpoint.own_state_code import own_code_of, own_loading
from graphsplit.encoding.values import decode, tensor_names
from graphsplit.errors import CheckpointError
from graphsplit.optimizers.optimizer import order_of
from graphsplit.optimizers.own_step import by_the_model
from graphsplit.planning.task import Task, named_state, trainable_of
from graphsplit.tensor_meta import plain_meta
from graphsplit.torch_ext.attributes import STATE_VERSIONS

_MAX_SHOWN = 200


@dataclass(frozen=True)
class Wanted:
    """A tensor of the network, and where its value is in the save.

    Attributes:
        target: The parameter or buffer.
        name: The name it is saved under.
        holds: The kind of file it is in.
    """

    target: torch.Tensor
    name: str
    holds: str


class NetworkLoader:
    """Loads the network's tensors.

    Args:
        task: What is trained.
        source: The save.
        holder: Lets the network's own code load a state dictionary, where it has such code: it may
            rename keys, change values, or look at what was loaded.
        options: Those of ``load_state_dict``, as ``strict``.
        with_others: Whether the save holds what a state dictionary leaves out, too.

    Attributes:
        problems: What does not fit, in words.
        told: What ``load_state_dict`` returns; None while the network's own code has yet to load.
    """

    def __init__(
        self,
        task: Task,
        source: Source,
        holder: StateHolder,
        options: Mapping[str, Any] | None = None,
        *,
        with_others: bool,
    ) -> None:
        self._task = task
        self._source = source
        self._options = options or {}
        self.told: Any = None
        self._load_whole: Callable[..., Any] | None = None
        if own_loading(task.network, with_extra=False):
            self._load_whole = holder.load_state_dict
        values = source.values.get("network")
        self._values: dict[str, Any] = dict(values) if isinstance(values, dict) else {}
        self._metadata = self._values.pop(STATE_VERSIONS, None)
        self.problems: list[str] = []
        self._wanted: list[Wanted] = []
        self._with_others = with_others
        if with_others:
            sections = [source.values.get(name) for name in ("python", "attributes")]
            register_again(task.network, sections)
            names = self._source.tensors["training"]
            make_buffers_again(
                task, {n.removeprefix(OTHERS) for n in names if n.startswith(OTHERS)}
            )
        self._state = NetworkState({}, {}, {}, {})
        if with_others or self._load_whole is None:
            self._state = NetworkState.of(task)
        if self._load_whole is None:
            self._match_weights()
        if with_others:
            self._match_others()
            self._match_gradients()

    def _match_weights(self) -> None:
        stored, aliases = self._source.tensors["weights"], self._source.aliases
        known = {**self._state.tensors, **self._state.aliases, **self._state.values}
        missing: list[str] = []
        for key, target in self._state.tensors.items():
            # Where a tied tensor is stored under several of its keys, the last one counts, as in
            # PyTorch.
            keys = [key, *(a for a, first in self._state.aliases.items() if first == key)]
            names = [k for k in (*keys, *(aliases.get(k, k) for k in keys)) if k in stored]
            own = [k for k in keys if k in stored]
            if not names:
                missing.append(key)
                continue
            self._want(target, own[-1] if own else names[-1], "weights")
        missing += [k for k in self._state.values if k not in stored and k not in self._values]
        found = dict.fromkeys((*stored, *aliases, *self._values))
        unknown = [name for name in found if name not in known]
        self.told = told_keys(*_as_loaded(self._task.network, missing, unknown))
        if self._options.get("strict", True):
            self.problems += [f"missing: {key}" for key in missing]
            self.problems += [f"unknown: {name}" for name in unknown]

    def _match_others(self) -> None:
        stored = {n for n in self._source.tensors["training"] if n.startswith(OTHERS)}
        for name, target in self._state.others.items():
            if f"{OTHERS}{name}" not in stored:
                if not is_kept_name(name):  # nothing stands for that one then
                    self.problems.append(f"missing: {name}")
            else:
                self._want(target, f"{OTHERS}{name}", "training")
        for name in sorted(stored - {f"{OTHERS}{n}" for n in self._state.others}):
            self.problems.append(f"unknown: {name.removeprefix(OTHERS)}")

    def _match_gradients(self) -> None:
        named = named_state(self._task.network, self._task.loss_fn)
        for name in self._source.tensors["training"]:
            if name.startswith(GRADIENTS):
                target = named.get(name.removeprefix(GRADIENTS))
                if target is None:
                    self.problems.append(f"unknown: the gradient of {name.removeprefix(GRADIENTS)}")
                else:
                    self._want(target, name, "training")

    def _want(self, target: torch.Tensor, name: str, holds: str) -> None:
        found = self._source.tensors[holds][name].meta
        expected = plain_meta(target)
        if found != expected:
            self.problems.append(f"{name} is {found}; expected {expected}")
        self._wanted.append(Wanted(target, name, holds))

    def requests(self, ownership: Ownership, num_workers: int) -> list[TensorRequest]:
        """The tensors that every worker needs."""
        everybody = range(num_workers)
        stored = self._source.tensors["weights"]
        needed = self._state.values if self._load_whole is None else stored
        extra = [TensorRequest(key, "weights", everybody) for key in needed if key in stored]
        return extra + [
            TensorRequest(w.name, w.holds, ownership.loaders(w.target, num_workers), w.target)
            for w in self._wanted
        ]

    def load(self, ownership: Ownership, num_workers: int) -> None:
        """Load what this worker holds. Collective where not all see all files."""
        whole: dict[str, Any] = {}

        def take(request: TensorRequest, tensor: torch.Tensor) -> None:
            if request.target is None:
                whole[request.name] = tensor
                return
            if request.name.startswith(GRADIENTS) and request.holds == "training":
                request.target.grad = tensor
                return
            with torch.no_grad():
                request.target.copy_(tensor)

        for parameter in trainable_of(self._task) if self._with_others else ():
            parameter.grad = None  # what was not saved was not there
        self._source.deliver(self.requests(ownership, num_workers), take)
        whole.update({key: decode(value, _no_tensor) for key, value in self._values.items()})
        if self._load_whole is None:
            for key, value in whole.items():
                if key in self._state.values:
                    module_of_extra(self._task.network, key).set_extra_state(value)
            return
        aliases = self._source.aliases
        state = OrderedDict({**whole, **{a: whole[k] for a, k in aliases.items() if k in whole}})
        if self._metadata is not None:
            setattr(state, STATE_VERSIONS, decode(self._metadata, _no_tensor))
        self.told = self._load_whole(state, **self._options)


def told_keys(missing: Iterable[str], unexpected: Iterable[str]) -> Any:
    """The answer of ``nn.Module.load_state_dict``, with these keys."""
    told = nn.Module().load_state_dict({})
    told.missing_keys.extend(missing)
    told.unexpected_keys.extend(unexpected)
    return told


def _as_loaded(
    network: nn.Module, missing: list[str], unexpected: list[str]
) -> tuple[list[str], list[str]]:
    """Both kinds of keys in the order of PyTorch, which loads module by module."""
    place = {path: n for n, (path, _) in enumerate(network.named_modules(remove_duplicate=False))}

    def module(key: str) -> int:
        path = key.rpartition(".")[0]
        while path not in place:
            path = path.rpartition(".")[0]
        return place[path]

    return sorted(missing, key=module), sorted(unexpected, key=module)


def make_buffers_again(task: Task, saved: Collection[str]) -> None:
    """Register tensors that are plain attributes still: capture had made them buffers.

    One that is made of a parameter, as a pruned weight, had that parameter's name before.

    Args:
        task: Whose network and loss.
        saved: The names of tensors that were state in another process.
    """
    modules = {"": task.network}
    if isinstance(task.loss_fn, nn.Module):
        modules[LOSS_PATH] = task.loss_fn
    found = [
        (f"{top}.{path}" if path else top, name)
        for top, module in modules.items()
        for path, child in module.named_modules()
        for name, held in vars(child).items()
        if isinstance(held, torch.Tensor) and not held.requires_grad
        if ".".join(filter(None, (top, path, name))) in saved
    ]
    make_buffers(modules, found)


class OptimizerLoader:
    """Loads one optimizer.

    Args:
        name: Its name.
        optimizer: The optimizer.
        saved: What was saved of it, encoded.
        source: The save.
        ownership: Names of parameters.
    """

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        saved: Mapping[str, Any],
        source: Source,
        ownership: Ownership,
    ) -> None:
        self._optimizer = optimizer
        self._saved = saved
        self._source = source
        self._parameters = parameters_of(optimizer)
        kind = type(optimizer).__name__
        self.problems = [
            f"optimizer {name}, {kind}: {problem}" for problem in self._compare(ownership)
        ]

    def _compare(self, ownership: Ownership) -> list[str]:
        saved = self._saved
        names = [ownership.name(p) for p in self._parameters]
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        code = own_code_of(self._optimizer)
        if code:
            return [
                f"{code[0]} would see a part of the state only; load it from memory, by "
                f"load_optimizer_state_dict(state)"
            ]
        own = type(self._optimizer).__qualname__
        if saved.get("class") != own:
            return [f"was saved from {saved.get('class')}; it is {own} now"]
        if saved.get("group_sizes") != sizes:
            return [
                f"has groups of {sizes} parameters; {saved.get('group_sizes')} were saved. Fix: "
                f"add the groups that the saved run had, by add_param_group, before loading"
            ]
        found = saved.get("parameters")
        found = found if isinstance(found, list) else []
        return [
            f"parameter {index} is {mine}; {theirs} was saved"
            for index, (mine, theirs) in enumerate(zip(names, found, strict=False))
            if mine != theirs
        ] + ([] if len(found) == len(names) else [f"{len(found)} parameters were saved"])

    def requests(self, ownership: Ownership, num_workers: int) -> list[TensorRequest]:
        """The sections that every worker needs.

        Raises:
            CheckpointError: The save lacks a tensor that it refers to.
        """
        return self._settings_requests(num_workers) + self._state_requests(ownership, num_workers)

    def _settings_requests(self, num_workers: int) -> list[TensorRequest]:
        names = tensor_names(self._saved.get("settings"))
        return self._checked(
            [TensorRequest(name, "training", range(num_workers)) for name in names]
        )

    def _state_requests(self, ownership: Ownership, num_workers: int) -> list[TensorRequest]:
        names = tensor_names(self._others())
        found = [TensorRequest(name, "training", range(num_workers)) for name in names]
        for index, entry in self._state().items():
            receivers = ownership.loaders(self._parameters[index], num_workers)
            found += [TensorRequest(name, "training", receivers) for name in tensor_names(entry)]
        return self._checked(found)

    def _checked(self, requests: list[TensorRequest]) -> list[TensorRequest]:
        check_present(requests, self._source)
        return requests

    def load_settings(self, num_workers: int) -> None:
        """Load what every worker has: learning rates and the like. Forgets all other state."""
        tensors = self._source.fetch(self._settings_requests(num_workers))
        settings = decode(self._saved.get("settings"), tensors.__getitem__)
        self._optimizer.load_state_dict({**settings, "state": {}})

    def load_state(self, ownership: Ownership, num_workers: int, rank: int) -> None:
        """Load what belongs to the parameters that this worker holds; settings stay as they are."""
        tensors = self._source.fetch(self._state_requests(ownership, num_workers))
        mine = {
            index: decode(entry, tensors.__getitem__)
            for index, entry in self._state().items()
            if rank in ownership.loaders(self._parameters[index], num_workers)
        }
        others = decode(self._others(), tensors.__getitem__)
        with by_the_model():
            settings = self._optimizer.state_dict()
        self._optimizer.load_state_dict({**settings, "state": {**mine, **others}})
        self._undo_conversions(mine)
        order_of(self._optimizer).note_loaded([self._parameters[index] for index in self._state()])

    def _undo_conversions(self, entries: Mapping[int, Any]) -> None:
        """PyTorch converts an entry to its parameter's dtype, and so loses bits of wider ones."""
        for index, entry in entries.items():
            state = self._optimizer.state.get(self._parameters[index])
            if not isinstance(state, dict) or not isinstance(entry, dict):
                continue
            for key, value in entry.items():
                kept = state.get(key)
                dtypes = {t.dtype for t in (kept, value) if isinstance(t, torch.Tensor)}
                if len(dtypes) == 2:
                    state[key] = value

    def _others(self) -> Any:
        return self._saved.get("others") or {}

    def _state(self) -> dict[int, Any]:
        found: dict[int, Any] = {}
        saved = self._saved.get("state")
        for key, entry in (saved if isinstance(saved, dict) else {}).items():
            if not key.isdecimal() or int(key) >= len(self._parameters):
                raise CheckpointError(f"the save has optimizer state of a parameter {key[:20]!r}")
            found[int(key)] = entry
        return found


def optimizer_loaders(
    task: Task, source: Source, ownership: Ownership, *, problems: list[str]
) -> list[OptimizerLoader]:
    """A loader for every optimizer of a task; what does not fit is added to ``problems``.

    A task without any optimizer (it only evaluates) leaves those of the save alone.
    """
    own = optimizers_of(task)
    saved = source.values.get("optimizers")
    saved = saved if isinstance(saved, dict) else {}
    if not own:
        return []
    problems += [f"missing: the state of {name}" for name in own if name not in saved]
    problems += [f"unknown: the state of {name}" for name in saved if name not in own]
    loaders = [
        OptimizerLoader(name, optimizer, saved[name], source, ownership)
        for name, optimizer in own.items()
        if isinstance(saved.get(name), dict)
    ]
    for loader in loaders:
        problems += loader.problems
    return loaders


def check_present(requests: list[TensorRequest], source: Source) -> None:
    """Refuse a save that refers to tensors it does not have.

    Raises:
        CheckpointError: Names the first one.
    """
    for request in requests:
        if request.name not in source.tensors[request.holds]:
            raise CheckpointError(f"the save refers to a tensor {request.name!r} that it lacks")


def shown(problems: list[str]) -> str:
    """Problems as lines; not thousands of them."""
    more = len(problems) - _MAX_SHOWN
    rest = [f"and {more} more"] if more > 0 else []
    return "\n  ".join([*problems[:_MAX_SHOWN], *rest])


def _no_tensor(name: str) -> torch.Tensor:
    raise CheckpointError(f"{name!r} is a tensor where none can be")
