"""The simulated workers against the plain eager loop, byte by byte."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphsplit.batches.signature import Arguments, split_batch
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.planning.task import named_state
from graphsplit.torch_ext.steering import steers
from simulated.compare import difference
from simulated.reference import EagerLoop
from simulated.simulate import SimulatedCluster, SimulatedWorker


class Comparison:
    """The loop and the workers, each time that both have gone on.

    Args:
        name: What errors call the workers.
        reference: The loop.
        cluster: The workers.
    """

    def __init__(self, name: str, reference: EagerLoop, cluster: SimulatedCluster) -> None:
        self._name = self._when = name
        self._reference = reference
        self._cluster = cluster
        self._has_loss_fn = reference.loss_fn is not None

    def begin(self, when: str) -> None:
        """Say where the loop and the workers are, for errors."""
        self._when = f"{self._name}: {when}" if self._name else when

    def train(self, expected: torch.Tensor, batch: Any, schedulers: Sequence[Any]) -> None:
        """Train on a batch; compare the loss, and the state of everything.

        Args:
            expected: The loss in the loop, which has trained on the batch.
            batch: As a loader yields it.
            schedulers: The learning rate scheduler of each worker, or None.
        """
        arguments = self._arguments(batch)
        losses = self._cluster.train_step(arguments, batch=copy.deepcopy(batch))
        for worker, loss in zip(self._cluster.workers, losses, strict=True):
            self._same(f"loss on worker {worker.rank}", expected, loss)
            scheduler = schedulers[worker.rank]
            if scheduler is not None:
                scheduler.step()
        self.compare_state()

    def evaluate(self, expected: Any, batch: Any) -> None:
        """Compare eval loss and outputs."""
        self._same("eval", expected, self._cluster.evaluate(batch))

    def predict(self, expected: Any, batch: Any) -> None:
        """Compare what predict returns."""
        args, kwargs = self._arguments(batch)
        args = args[:-1] if self._has_loss_fn else args
        for rank, outputs in enumerate(self._cluster.predict((args, kwargs))):
            self._same(f"predict on worker {rank}", expected, outputs)

    def _arguments(self, batch: Any) -> Arguments:
        return split_batch(copy.deepcopy(batch), has_loss_fn=self._has_loss_fn)

    def compare_state(self) -> None:
        """Compare all that training has left."""
        workers = self._cluster.workers
        held = [named_state(worker.task.network, worker.task.loss_fn) for worker in workers]
        for name, tensor in named_state(self._reference.network, self._reference.loss_fn).items():
            owner = self._cluster.owner_of(name)
            self._compare_tensor(name, tensor, owner, held[owner.rank][name])
            for worker in workers:
                here = held[worker.rank][name]
                if steers(here):  # every worker has it
                    self._compare_tensor(name, tensor, worker, here)
                elif worker is not owner and not is_elsewhere(here):
                    raise AssertionError(f"{self._when}: worker {worker.rank} still holds {name!r}")
        for worker in workers:
            self._compare_worker(worker)

    def _compare_tensor(
        self, name: str, tensor: torch.Tensor, owner: SimulatedWorker, actual: torch.Tensor
    ) -> None:
        """A parameter or buffer where it lives, with all that belongs to it."""
        what = f"{name!r} on worker {owner.rank}"
        expected = tensor.grad if tensor.is_leaf else None  # a buffer may be assigned a history
        self._same(f"gradient of {what}", expected, actual.grad, strides=True)
        self._same(f"value of {what}", tensor.detach(), actual.detach())
        self._same(
            f"optimizer state of {what}",
            [dict(o.state.get(tensor) or {}) for o in self._reference.optimizers],
            [dict(o.state.get(actual) or {}) for o in owner.task.optimizers],
        )

    def _compare_worker(self, worker: SimulatedWorker) -> None:
        """The state that each worker has of its own, and all have alike."""
        reference, rank = self._reference, worker.rank
        self._same(f"generator of worker {rank}", reference.generator, worker.generator)
        self._same(
            f"settings of the optimizer of worker {rank}",
            [_settings(optimizer) for optimizer in reference.optimizers],
            [_settings(optimizer) for optimizer in worker.task.optimizers],
        )
        norm = worker.planner.updater.last_norm
        self._same(f"norm on worker {rank}", reference.gradient_norm, norm)
        self._same(f"scaler of worker {rank}", _scale(reference.scaler), _scale(worker.task.scaler))

    def _same(self, what: str, expected: Any, actual: Any, *, strides: bool = False) -> None:
        found = difference(expected, actual, strides=strides)
        if found is not None:
            raise AssertionError(f"{self._when}: {what} is not as in the eager loop: {found}")


def _scale(scaler: torch.amp.GradScaler | None) -> dict[str, Any] | None:
    return None if scaler is None else scaler.state_dict()


def _settings(optimizer: Any) -> list[Mapping[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
