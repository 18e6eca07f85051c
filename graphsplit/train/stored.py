"""The calls of a Model that save and load, each as one step of all workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from graphsplit.checkpoint.disk.series import check_path
from graphsplit.checkpoint.states import Loaded, PathLike, States
from graphsplit.errors import CheckpointError, ConfigurationError, GraphsplitError, StateError
from graphsplit.planning.task import Task
from graphsplit.text import described, need
from graphsplit.train.engine import Engine


class StoredState:
    """The state of a Model in memory, in single files, and in folders; see the calls of ``Model``.

    Args:
        task: What is trained.
        engine: Where its state is.
        states: Saves and loads it.
    """

    def __init__(self, task: Task, engine: Engine, states: States) -> None:
        self._task = task
        self._engine = engine
        self._states = states

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Let a script catch what all workers raise alike; anything else ends the job."""
        agreed: GraphsplitError | None = None
        with self._engine.guard():
            try:
                yield
            except (CheckpointError, StateError) as error:
                agreed = error
        if agreed is not None:
            raise agreed

    def state_dict(self, to: PathLike | None) -> dict[str, Any] | None:
        """The network's full state, or None where it was streamed to a file."""
        states, engine = self._states, self._engine
        found: dict[str, Any] | None = self._given(to, states.save_weights, engine.state_dict)
        return found

    def _given(
        self, to: PathLike | None, save: Callable[[PathLike], None], gather: Callable[[], Any]
    ) -> Any:
        if to is None:
            with self._engine.guard():
                self._engine.check_alike()
                return gather()
        with self._in_step():
            check_path("to", to)
            self._engine.check_alike()
            save(to)
        return None

    def load_state_dict(
        self, state: Mapping[str, Any] | PathLike, options: Mapping[str, Any]
    ) -> Any:
        """Load a full state of the network, from memory or a file."""
        with self._in_step():
            if isinstance(state, (str, os.PathLike)):
                self._engine.check_alike(os.fspath(state), loads=True)
                return self._states.load_weights(state, **options)
            _check_mapping("load_state_dict: state", state)
            return self._engine.load_state_dict(state, **options)

    def optimizer_state_dict(self, to: PathLike | None) -> Any:
        """The full state of the optimizer, or of each; None where it was streamed to a file."""
        gather = self._engine.optimizer_state_dicts
        states = self._given(to, self._states.save_optimizers, gather)
        return states[0] if states and self._has_one_optimizer else states

    def load_optimizer_state_dict(self, state: Any) -> None:
        """Load a full state of the optimizer, or of each, from memory or a file."""
        if isinstance(state, (str, os.PathLike)):
            with self._in_step():
                self._engine.check_alike(os.fspath(state), loads=True)
                self._states.load_optimizers(state)
            return
        if not isinstance(state, Mapping | list | tuple):
            with self._in_step():
                _check_mapping("load_optimizer_state_dict: state", state)
        states = [state] if self._has_one_optimizer else list(state)
        if len(states) != len(self._task.optimizers):
            raise StateError(
                f"{len(states)} states were given; expected one for each of the "
                f"{len(self._task.optimizers)} optimizers"
            )
        with self._in_step():
            for one in states:
                has_all = isinstance(one, Mapping) and {"state", "param_groups"} <= one.keys()
                need("load_optimizer_state_dict", "state", one, has_all, _OF_OPTIMIZER)
            self._engine.load_optimizer_state_dicts(states)

    @property
    def _has_one_optimizer(self) -> bool:
        """Whether the Model was given an optimizer, and not a list, which may be one of one."""
        return isinstance(self._task.optimizer, torch.optim.Optimizer)

    def save(self, path: PathLike, gather: bool, extra: Mapping[str, Any]) -> None:
        """Save the whole training state into a folder."""
        with self._in_step():
            check_path("save: path", path)
            need("save", "gather", gather, isinstance(gather, bool), "True or False")
            _check_mapping("save: extra", extra)
            self._engine.check_alike(None if gather else os.fspath(path))
            self._states.save(path, gather=gather, extra=extra)

    def load(self, path: PathLike, extra: Mapping[str, Any]) -> Loaded:
        """Load a whole training state from a folder."""
        with self._in_step():
            check_path("load: path", path)
            _check_mapping("load: extra", extra)
            self._engine.check_alike(os.fspath(path), loads=True)
            return self._states.load(path, extra=extra)


_OF_OPTIMIZER = "what optimizer_state_dict() gave, with 'state' and 'param_groups'"


def _check_mapping(what: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        shown = repr(value) if isinstance(value, (int, float, str, list)) else described(value)
        raise ConfigurationError(f"{what} is {shown:.80}; expected a dictionary\n  Fix: pass one.")
