"""The workers of a job, as a trainer sees them: one process that trains, of which one is main.

Every worker runs the trainer whole, and reads every batch; so to the trainer there is one process.
Only files, log lines and progress bars are a matter of one worker, which is *main*: worker 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from graphsplit.distribute.network import behind, distribute, gathered
from graphsplit.distribute.values import LoopValue
from graphsplit.distribute.workers.asking import exchange
from graphsplit.distribute.workers.loop import Loop
from graphsplit.errors import ConfigurationError
from graphsplit.job import joined
from graphsplit.job.job import Job
from graphsplit.job.script import ModelCall
from graphsplit.torch_ext.private import pytree

T = TypeVar("T")
_is_on_main = False
# What compares generators, as errors name it.
_GENERATORS = "prepare(), train(), evaluate() or predict"


def workers() -> Job | None:
    """The job of this process, joined now where the script has not done so; None if it is alone."""
    joined.init_late()
    job = joined.current()
    return None if job is None or job.num_workers == 1 else job


def refuse_replicas(job: Job | None, num_processes: int, library: str) -> None:
    """Refuse a trainer that shares the batches out among processes of its own.

    Raises:
        ConfigurationError: It does.
    """
    if job is not None and num_processes > 1:
        raise ConfigurationError(
            f"{library} sees {num_processes} processes and would give each a part of the batches; "
            f"under graphsplit run every worker needs them all\n"
            f"  Fix: start the script with graphsplit run alone, without the launcher of {library}."
        )


def refuse_other_generators(job: Job) -> None:
    """Refuse workers whose random numbers differ: their loaders would shuffle otherwise.

    Raises:
        ConfigurationError: They do.
        CollectiveMismatchError: Another worker does something else.
    """
    state = bytes(torch.default_generator.get_state().numpy())

    def run() -> None:
        with job.reporting():
            told = exchange(Loop.of(job), _GENERATORS, hashlib.sha256(state).hexdigest())
            if len(set(told)) > 1:
                raise ConfigurationError(
                    "the workers' random generators differ, so each would shuffle otherwise\n"
                    "  Fix: seed all alike, as in set_seed(seed) without device_specific=True."
                )

    job.script.collective(ModelCall(_GENERATORS, run))


def distributed(network: nn.Module, job: Job) -> nn.Module:
    """A network whose calls run over all workers, also one that the script has distributed."""
    found: Any = network if behind(network) is not None else distribute(network)
    if hasattr(found, "save_pretrained") and "save_pretrained" not in vars(found):
        _save_on_main(found, job)
    if hasattr(found, "generate"):
        found.generate = _refuse_generate
    return network


def _save_on_main(network: Any, job: Job) -> None:
    """Let ``save_pretrained`` of a network of ``transformers`` write one copy of each file."""
    # What it notes on the worker that saves is noted on all: forward may read it.
    network.config.dtype = str(network.dtype).removeprefix("torch.")
    network.config.architectures = [type(network).__name__]
    save = network.save_pretrained

    def save_pretrained(*args: Any, **kwargs: Any) -> None:
        on_main(job, partial(save, *args, **kwargs), [network], [])

    network.save_pretrained = save_pretrained


def _refuse_generate(*args: Any, **kwargs: Any) -> None:
    raise ConfigurationError(
        "generate() was called on a network that is distributed over workers: its calls would "
        "pass a cache of keys and values on to each other, of another size each time\n"
        "  Fix: evaluate losses and logits (predict_with_generate=False); to generate, load what "
        "save_pretrained has written in one process."
    )


def on_main(
    job: Job | None,
    save: Callable[[], T],
    networks: Iterable[nn.Module],
    optimizers: Iterable[Any],
) -> T | None:
    """Run the code of a library that saves on worker 0 alone, while all others wait.

    Args:
        job: The workers; None where this process is alone.
        save: Saves; ``state_dict()`` of networks and optimizers gives it the whole state.
        networks: The networks that it saves.
        optimizers: The optimizers that it saves, or what a library puts around them.

    Returns:
        What ``save`` returns, on worker 0.
    """
    global _is_on_main
    if job is None or _is_on_main:
        return save()
    found: T | None = None
    with gathered(networks, [getattr(one, "optimizer", one) for one in optimizers]):
        if job.rank == 0:
            _is_on_main = True
            try:
                with Loop.of(job).taken.aside():
                    found = save()
            finally:
                _is_on_main = False
    joined.barrier()
    return found


def told(value: Any) -> Any:
    """Collective: ordinary tensors in the place of those that live on one worker.

    So one worker alone may look at them, as trainers do that print and log on the main process.
    """

    def ask(leaf: Any) -> Any:
        return leaf.everywhere().detach() if isinstance(leaf, LoopValue) else leaf

    return pytree.tree_map(ask, value)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, on workers that are not main."""
