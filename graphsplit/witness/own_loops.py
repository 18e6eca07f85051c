"""Writes down what loops of a script's own compute, step after step, for ``graphsplit check``.

A step is a call of ``optimizer.step()``, of any optimizer with parameters of a network that was
given to ``gs.distribute``. What it leaves in such networks is noted, and in the optimizer.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from graphsplit.check.record import NotedValue, What
from graphsplit.check.request import requested_file
from graphsplit.errors import EnoughSteps
from graphsplit.optimizers.own_step import OWN_HOOKS
from graphsplit.planning.task import Task
from graphsplit.torch_ext.private import DisableTorchFunctionSubclass
from graphsplit.witness.notes import Notebook, notebook
from graphsplit.witness.values import ModelValues


def watch_loop(network: nn.Module) -> None:
    """Note what optimizers make of a network, from now on, where somebody asks for it."""
    file = requested_file(os.environ)
    if file is not None:
        _witness_of(notebook(file)).networks.append(weakref.ref(network))


@lru_cache(maxsize=1)
def _witness_of(book: Notebook) -> _LoopWitness:
    """The one of this process."""
    witness = _LoopWitness(book)
    OWN_HOOKS.append(witness.stepped)
    register_optimizer_step_post_hook(witness.stepped)
    return witness


class _LoopWitness:
    """Notes the steps of a process.

    Attributes:
        networks: The networks, in the order in which they were distributed.
    """

    def __init__(self, book: Notebook) -> None:
        self._book = book
        self.networks: list[weakref.ref[nn.Module]] = []

    def stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The hook behind a step.

        Raises:
            EnoughSteps: The check that runs the script has seen what it needs.
        """
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        networks = [
            (number, network)
            for number, reference in enumerate(self.networks, 1)
            if (network := reference()) and any(id(p) in own for p in network.parameters())
        ]
        if networks:
            number = self._book.begin(What.LOOP_STEP)
            values = self._values(optimizer, networks)
            with DisableTorchFunctionSubclass():  # to the script they are values of all workers
                self._book.note(What.LOOP_STEP, networks[0][0], number, values)
        if self._book.has_enough:
            raise EnoughSteps

    def _values(
        self, optimizer: torch.optim.Optimizer, networks: Sequence[tuple[int, nn.Module]]
    ) -> Iterator[NotedValue]:
        # What LBFGS keeps is on no worker whole.
        kept = None if isinstance(optimizer, torch.optim.LBFGS) else optimizer
        for number, network in networks:
            task = Task(network, None, kept, "affinity", False)
            prefix = f"network {number}: " if len(self.networks) > 1 else ""
            yield from ModelValues(task, self._book.request.whole, prefix).state()
