"""A loop of ``accelerate``'s users, over the workers of a job: its ``Accelerator``, with one main.

Two lines of a script change::

    from graphsplit.integrations.accelerate import Accelerator
    gs.apply_placement(model, {"layers.{0..5}": 0, "layers.{6..11}": 1})
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState, PartialState
from torch import nn

from graphsplit.collectives.calls import broadcast_object
from graphsplit.errors import ConfigurationError
from graphsplit.integrations.workers import (
    distributed,
    nothing,
    on_main,
    refuse_other_generators,
    refuse_replicas,
    told,
    workers,
)
from graphsplit.job import joined
from graphsplit.job.job import Job

_INDICES = ("process_index", "local_process_index")


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator``, whose ``prepare`` distributes the network over the workers.

    Every worker runs the script whole and sees every batch, so ``num_processes`` is 1. Worker 0 is
    the main process: it prints, logs and writes files. Without ``graphsplit run`` it is
    ``accelerate.Accelerator``.

    Args:
        args: As for ``accelerate.Accelerator``.
        kwargs: As for ``accelerate.Accelerator``.

    Raises:
        ConfigurationError: It would share out batches, or compile the network.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._graphsplit_job = job = workers()
        super().__init__(*args, **kwargs)
        refuse_replicas(job, self.num_processes, "accelerate")
        if job is None:
            return
        have_one_main(job)
        if self.dataloader_config.dispatch_batches:
            raise ConfigurationError(
                "dispatch_batches=True reads batches on one process; every worker needs them\n"
                "  Fix: leave it out."
            )
        self.dataloader_config.dispatch_batches = False
        if str(self.state.dynamo_plugin.backend) not in ("DynamoBackend.NO", "NO"):
            raise ConfigurationError(
                "accelerate was told to compile the network, which is run part by part\n"
                "  Fix: leave dynamo_backend out."
            )

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``accelerate``; the network's calls run over all workers then."""
        if self._graphsplit_job is not None:
            refuse_other_generators(self._graphsplit_job)
        return super().prepare(*args, **kwargs)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """As in ``accelerate``, and distribute it."""
        prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
        return prepared if self._graphsplit_job is None else distributed(prepared)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """As in ``accelerate``, on the main process; all workers ask for the values."""
        super().print(*told(args), **kwargs)

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As in ``accelerate``, on the main process; all workers ask for the values."""
        super().log(told(values), *args, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """As in ``accelerate``: every worker has the values then."""
        return told(super().gather(tensor))

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As in ``accelerate``: every worker has the values then."""
        return told(super().reduce(tensor, *args, **kwargs))

    def save(self, obj: Any, *args: Any, **kwargs: Any) -> None:
        """As in ``accelerate``, on the main process; all workers ask for the values."""
        super().save(told(obj), *args, **kwargs)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in ``accelerate``; called on all workers, it writes one copy of each file."""
        save = partial(super().save_state, output_dir, *args, **kwargs)
        job = self._graphsplit_job
        if job is None:
            return save()

        def alone() -> str:
            with _as_if_alone():
                return str(save())

        found = on_main(job, alone, self._models, _inner(self._optimizers))
        if job.rank != 0:
            self.project_configuration.iteration += 1
        return _everywhere(found)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """As in ``accelerate``: every worker reads what the main one has written."""
        with _as_if_alone():
            super().load_state(*args, **kwargs)


def have_one_main(job: Job) -> None:
    """Let worker 0 be the main process, for all of ``accelerate``'s code in this process.

    Its state is one dictionary for all instances, in which what is set comes before methods.
    """

    def only(is_chosen: bool) -> Callable[..., Any]:
        def decorator(function: Any = None, *args: Any, **kwargs: Any) -> Any:
            if function is None:
                return partial(decorator, *args, **kwargs)
            return function if is_chosen else nothing

        return decorator

    def only_on(function: Any = None, process_index: int | None = None, **local: Any) -> Any:
        if function is None:
            return partial(only_on, process_index=process_index, **local)
        wanted = local.get("local_process_index", process_index)
        return function if wanted == job.rank else nothing

    changed = dict.fromkeys(_INDICES, job.rank) | {
        "wait_for_everyone": joined.barrier,
        "on_main_process": only(job.rank == 0),
        "on_local_main_process": only(job.rank == 0),
        "on_last_process": only(job.rank == 0),  # of the one process that trains
        "on_process": only_on,
        "on_local_process": only_on,
    }
    for kind in (PartialState, AcceleratorState):
        if kind._shared_state:
            kind._shared_state.update(changed)


@contextmanager
def _as_if_alone() -> Iterator[None]:
    """Inside, this process is the main one, and waits for nobody."""
    states = [kind._shared_state for kind in (PartialState, AcceleratorState)]
    before = [dict(state) for state in states]
    for state in states:
        state.update(dict.fromkeys(_INDICES, 0), wait_for_everyone=nothing)
    try:
        yield
    finally:
        for state, old in zip(states, before, strict=True):
            state.update({name: old[name] for name in (*_INDICES, "wait_for_everyone")})


def _inner(optimizers: list[Any]) -> list[torch.optim.Optimizer]:
    """Optimizers without what ``accelerate`` puts around them."""
    return [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]


def _everywhere(found: str | None) -> str:
    """A text of worker 0, on all."""
    text: str = broadcast_object(found)
    return text
