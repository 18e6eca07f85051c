"""The workers of a job, as a trainer sees them: one process that trains, of which one is main.

Every worker runs the trainer whole, and reads every batch; so to the trainer there is one process.
Only files, log lines and progress bars are a matter of one worker, which is *main*: worker 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from graphsplit.distribute.gathered import gathered
from graphsplit.distribute.network import behind, distribute
from graphsplit.distribute.values import LoopValue
from graphsplit.errors import ConfigurationError
from graphsplit.job import joined
from graphsplit.job.job import Job
from graphsplit.job.script import ModelCall
from graphsplit.torch_ext.private import pytree

T = TypeVar("T")


def workers() -> Job | None:
    """The job of this process, joined now where the script has not done so; None if it is alone."""
    if os.environ.get("MS_ROLE") and not joined.is_initialized():
        joined.init()
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
    """
    mine = bytes(torch.default_generator.get_state().numpy()).hex()

    def run() -> None:
        with job.reporting():
            if len(set(job.control.exchange(mine))) > 1:
                raise ConfigurationError(
                    "the workers' random generators differ, so each would shuffle otherwise\n"
                    "  Fix: seed all alike, as in set_seed(seed) without device_specific=True."
                )

    job.script.collective(ModelCall("a comparison of generators", run))


def distributed(network: nn.Module) -> nn.Module:
    """A network whose calls run over all workers; one that does so already stays as it is."""
    return network if behind(network) is not None else distribute(network)


def on_main(
    job: Job,
    save: Callable[[], T],
    networks: Iterable[nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
) -> T | None:
    """Run the code of a library that saves on worker 0 alone, while all others wait.

    Args:
        job: The workers.
        save: Saves; ``state_dict()`` of networks and optimizers gives it the whole state.
        networks: The networks that it saves.
        optimizers: The optimizers that it saves.

    Returns:
        What ``save`` returns, on worker 0.
    """
    found: T | None = None
    with gathered(networks, optimizers):
        if job.rank == 0:
            found = save()
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
