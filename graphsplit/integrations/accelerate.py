"""A loop of ``accelerate``'s users, over the workers of a job: its ``Accelerator``, with one main.

Two lines of a script change::

    from graphsplit.integrations.accelerate import Accelerator
    gs.apply_placement(model, {"layers.{0..5}": 0, "layers.{6..11}": 1})
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import accelerate
import torch
from accelerate.utils import DynamoBackend
from torch import nn

from graphsplit.collectives.calls import all_reduce, broadcast_object
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
from graphsplit.torch_ext.private import accelerate_states

T = TypeVar("T")
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

    _graphsplit_job: Job | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        job = workers()
        super().__init__(*args, **kwargs)
        take_over(self, job)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As in ``accelerate``; the network's calls run over all workers then."""
        if self._graphsplit_job is not None:
            refuse_other_generators(self._graphsplit_job)
        return super().prepare(*args, **kwargs)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """As in ``accelerate``, and distribute it."""
        prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
        job = self._graphsplit_job
        return prepared if job is None else distributed(prepared, job)

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

    def check_trigger(self) -> bool:
        """As in ``accelerate``: whether any worker has set it; the answer goes to all."""
        if self._graphsplit_job is not None:
            ours: Any = self
            mine = torch.tensor(0) if ours.flag_tensor is None else ours.flag_tensor
            ours.flag_tensor = all_reduce(mine, "max")
        found: bool = super().check_trigger()
        return found

    def save(self, obj: Any, *args: Any, **kwargs: Any) -> None:
        """As in ``accelerate``, on the main process; all workers ask for the values."""
        super().save(told(obj), *args, **kwargs)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As in ``accelerate``; called on all workers, it writes one copy of each file."""
        save = partial(super().save_state, output_dir, *args, **kwargs)
        job = self._graphsplit_job
        if job is None:
            return save()
        found = save_on_main(job, lambda: str(save()), self._models, self._optimizers)
        if job.rank != 0:
            self.project_configuration.iteration += 1
        return _everywhere(found)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """As in ``accelerate``: every worker reads what the main one has written."""
        with _as_if_alone():
            super().load_state(*args, **kwargs)


def take_over(accelerator: accelerate.Accelerator, job: Job | None) -> None:
    """Let an ``Accelerator`` that a library has made be one of these.

    Raises:
        ConfigurationError: It would share out batches, or compile the network.
    """
    ours: Any = accelerator
    ours.__class__, ours._graphsplit_job = Accelerator, job
    if job is None:
        return
    refuse_replicas(job, accelerator.num_processes, "accelerate")
    have_one_main(job)
    if accelerator.dataloader_config.dispatch_batches:
        raise ConfigurationError(
            "dispatch_batches=True reads batches on one process; every worker needs them\n"
            "  Fix: leave it out."
        )
    accelerator.dataloader_config.dispatch_batches = False
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise ConfigurationError(
            "accelerate was told to compile the network, which is run part by part\n"
            "  Fix: leave dynamo_backend out."
        )


def have_one_main(job: Job) -> None:
    """Let worker 0 be the main process, for all of ``accelerate``'s code in this process.

    Its state is one dictionary for all instances, in which what is set comes before methods.
    """
    for state in accelerate_states():
        state.update(dict.fromkeys(_INDICES, job.rank), **_METHODS)


def save_on_main(
    job: Job | None, save: Callable[[], T], networks: Iterable[nn.Module], optimizers: Iterable[Any]
) -> T | None:
    """As ``on_main``; while it saves, ``accelerate``'s state is that of one process."""

    def alone() -> T:
        with _as_if_alone():
            return save()

    return on_main(job, save if job is None else alone, networks, optimizers)


@contextmanager
def _as_if_alone() -> Iterator[None]:
    """Inside, this process is the main one, and waits for nobody."""
    before = [(state, dict(state)) for state in accelerate_states()]
    for state, _ in before:
        state.update(dict.fromkeys(_INDICES, 0))
        for name in _METHODS:
            state.pop(name, None)
    try:
        yield
    finally:
        for state, old in before:
            state.update({name: old[name] for name in (*_INDICES, *_METHODS) if name in old})


def _on_main_process(function: Any = None) -> Any:
    """In the place of several methods, all of which speak of worker 0."""
    if function is None:
        return _on_main_process
    return function if joined.get_rank() == 0 else nothing


def _on_process(
    function: Any = None,
    process_index: int | None = None,
    local_process_index: int | None = None,
) -> Any:
    wanted = process_index if local_process_index is None else local_process_index
    if function is None:
        return partial(_on_process, process_index=wanted)
    return function if joined.get_rank() == wanted else nothing


_METHODS: dict[str, Any] = {
    "wait_for_everyone": joined.barrier,
    "on_main_process": _on_main_process,
    "on_local_main_process": _on_main_process,
    "on_last_process": _on_main_process,  # of the one process that trains
    "on_process": _on_process,
    "on_local_process": _on_process,
}


def _everywhere(found: str | None) -> str:
    """A text of worker 0, on all."""
    text: str = broadcast_object(found)
    return text
