"""Train a network in the plain eager loop and over simulated workers, and compare every byte.

assert_same_bits(
LeNet, batches, num_workers=3, loss_fn=nn.CrossEntropyLoss(),
place=lambda net: net.fc1.place("MS_WORKER", 2),
)
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphsplit.placement.resolve import UnplacedRule
from graphsplit.program.lower import Policy
from graphsplit.runtime.clip import Clip, GlobalNorm, Value
from graphsplit.runtime.ownership import is_elsewhere
from graphsplit.testing.compare import difference
from graphsplit.testing.reference import EagerLoop, Extras
from graphsplit.testing.simulate import Captures, SimulatedCluster
from graphsplit.train.batch import Arguments, split_batch
from graphsplit.train.microbatches import Divider, LossWeight, Split
from graphsplit.train.task import Task, named_state

Place = Callable[[nn.Module], object]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
MakeScheduler = Callable[[Any], Any]


def sgd_with_momentum(network: nn.Module) -> torch.optim.Optimizer:
    """The optimizer where a test asks for none: SGD that remembers, so that errors add up."""
    return torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)


def assert_same_bits(
    make_network: Callable[[], nn.Module],
    batches: Sequence[Any],
    *,
    num_workers: int,
    place: Place | None = None,
    loss_fn: Callable[..., Any] | None = None,
    make_optimizer: MakeOptimizer = sgd_with_momentum,
    make_scheduler: MakeScheduler | None = None,
    unplaced: UnplacedRule = "affinity",
    steps: int | None = None,
    evaluate_after: Collection[int] | None = None,
    seed: int = 0,
    captures: Captures | None = None,
    plan_everywhere: bool = False,
    dynamic_dims: Mapping[int, int] | None = None,
    microbatches: int = 1,
    split: Split | None = None,
    loss_weight: LossWeight | None = None,
    clip: Clip | None = None,
    make_scaler: Callable[[], torch.amp.GradScaler] | None = None,
    autocast: torch.dtype | None = None,
    set_to_none: bool = True,
    on_gradients: Callable[[nn.Module], None] | None = None,
    accumulate: int = 1,
    schedule: str | Policy = "1f1b",
    recompute: bool | tuple[str, ...] = False,
) -> SimulatedCluster:
    """Check that training over workers gives the bytes of the plain eager loop.

    Compared after every step: the loss on every worker; every parameter, gradient, buffer and
    optimizer state where it lives; the state of every worker's generator. After some steps: eval
    loss and outputs, and what predict returns on every worker.

    Args:
        make_network: Makes the network; called once for the loop and once per worker, each time
            from the same seed.
        batches: Batches as a loader yields them, used in turn.
        num_workers: Size of the simulated cluster.
        place: Places the network's modules.
        loss_fn: The loss; None if the network returns it. A module is copied for every worker.
        make_optimizer: Makes the optimizer of a network, or several.
        make_scheduler: Makes the learning rate scheduler of an optimizer, stepped every step.
        unplaced: The rule for operations that nobody placed.
        steps: How many steps; once through the batches if None.
        evaluate_after: Steps, counted from 0, after which to compare eval and predict; the last
            one if None.
        seed: The seed from which the loop and every worker start.
        captures: Graphs to share with other calls for the same network; see ``Captures``.
        plan_everywhere: Let every worker capture and plan by itself, as in a real job.
        dynamic_dims: Dimensions of the batches that may change without a new plan, with the
            largest size of each.
        microbatches: Into how many microbatches training splits each batch.
        split: Another way to split a batch than along dimension 0.
        loss_weight: What the loss of a microbatch counts, where not its number of rows.
        clip: How gradients are clipped.
        make_scaler: Makes the ``GradScaler``, one for the loop and one per worker.
        autocast: The dtype of a ``torch.autocast`` block around network and loss.
        set_to_none: Whether gradients become None before a step, or zeros.
        on_gradients: ``on_gradients(network)``: called before clipping, on every worker.
        accumulate: Over how many batches gradients are added up before the optimizer steps.
        schedule: In which order workers compute.
        recompute: What backward runs again: everything, or the modules with these paths.

    Returns:
        The simulated cluster after the last step.

    Raises:
        AssertionError: Something differs; names the first difference.
    """
    num_steps = len(batches) if steps is None else steps
    evaluated = {num_steps - 1} if evaluate_after is None else set(evaluate_after)

    def make() -> tuple[nn.Module, Any, Any, Any]:
        torch.manual_seed(seed)
        network = make_network()
        own_loss = copy.deepcopy(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
        optimizer = make_optimizer(network)
        return network, own_loss, optimizer, make_scheduler(optimizer) if make_scheduler else None

    schedulers: list[Any] = []

    def make_task() -> Task:
        network, own_loss, optimizer, scheduler = make()
        if place is not None:
            place(network)
        schedulers.append(scheduler)
        return Task(
            network,
            own_loss,
            optimizer,
            unplaced,
            with_loss=True,
            dynamic_dims=dynamic_dims or {},
            divider=Divider(microbatches, split, loss_weight),
            clip=clip,
            scaler=make_scaler() if make_scaler is not None else None,
            set_to_none=set_to_none,
            autocast=autocast,
            accumulate=accumulate,
            schedule=schedule,
            recompute=recompute,
        )

    reference = EagerLoop(
        make,
        microbatches=microbatches,
        split=split,
        loss_weight=loss_weight,
        extras=Extras(_plain(clip), make_scaler, autocast, set_to_none, on_gradients, accumulate),
    )
    shared = None if plan_everywhere else captures or Captures()
    cluster = SimulatedCluster(make_task, num_workers, captures=shared)
    if on_gradients is not None:
        for worker in cluster.workers:
            call = functools.partial(on_gradients, worker.task.network)
            worker.planner.updater.on_gradients = call
    for step in range(num_steps):
        batch = batches[step % len(batches)]
        comparison = _Comparison(f"step {step}", reference, cluster)
        comparison.train(batch, schedulers)
        if step in evaluated:
            comparison.evaluate(batch)
    return cluster


class _Comparison:
    """One step of the loop and of the workers, compared."""

    def __init__(self, when: str, reference: EagerLoop, cluster: SimulatedCluster) -> None:
        self._when = when
        self._reference = reference
        self._cluster = cluster
        self._has_loss_fn = reference.loss_fn is not None

    def train(self, batch: Any, schedulers: Sequence[Any]) -> None:
        expected = self._reference.train_step(copy.deepcopy(batch))
        arguments = self._arguments(batch)
        losses = self._cluster.train_step(arguments, batch=copy.deepcopy(batch))
        for worker, loss in zip(self._cluster.workers, losses, strict=True):
            self._same(f"loss on worker {worker.rank}", expected, loss)
            scheduler = schedulers[worker.rank]
            if scheduler is not None:
                scheduler.step()
        self._compare_state()

    def evaluate(self, batch: Any) -> None:
        expected = self._reference.evaluate(copy.deepcopy(batch))
        self._same("eval", expected, self._cluster.evaluate(self._arguments(batch)))
        predicted = self._reference.predict(copy.deepcopy(batch))
        args, kwargs = self._arguments(batch)
        args = args[:-1] if self._has_loss_fn else args
        for rank, outputs in enumerate(self._cluster.predict((args, kwargs))):
            self._same(f"predict on worker {rank}", predicted, outputs)
        self._compare_state()

    def _arguments(self, batch: Any) -> Arguments:
        return split_batch(copy.deepcopy(batch), has_loss_fn=self._has_loss_fn)

    def _compare_state(self) -> None:
        expected = named_state(self._reference.network, self._reference.loss_fn)
        expected_scaler = self._reference.scaler
        for name, tensor in expected.items():
            owner = self._cluster.owner_of(name)
            actual = named_state(owner.task.network, owner.task.loss_fn)[name]
            what = f"{name!r} on worker {owner.rank}"
            self._same(f"gradient of {what}", tensor.grad, actual.grad, strides=True)
            self._same(f"value of {what}", tensor.detach(), actual.detach())
            self._same(
                f"optimizer state of {what}",
                [dict(o.state.get(tensor) or {}) for o in self._reference.optimizers],
                [dict(o.state.get(actual) or {}) for o in owner.task.optimizers],
            )
            self._check_given_up(name)
        for worker in self._cluster.workers:
            what = f"generator of worker {worker.rank}"
            self._same(what, self._reference.generator, worker.generator)
            self._same(
                f"settings of the optimizer of worker {worker.rank}",
                [_settings(optimizer) for optimizer in self._reference.optimizers],
                [_settings(optimizer) for optimizer in worker.task.optimizers],
            )
            norm = worker.planner.updater.last_norm
            self._same(f"norm on worker {worker.rank}", self._reference.gradient_norm, norm)
            scaler = worker.task.scaler
            self._same(f"scaler of worker {worker.rank}", *map(_scale, (expected_scaler, scaler)))

    def _check_given_up(self, name: str) -> None:
        owner = self._cluster.owner_of(name)
        for worker in self._cluster.workers:
            tensor = named_state(worker.task.network, worker.task.loss_fn)[name]
            if worker is not owner and not is_elsewhere(tensor):
                raise AssertionError(f"{self._when}: worker {worker.rank} still holds {name!r}")

    def _same(self, what: str, expected: Any, actual: Any, *, strides: bool = False) -> None:
        found = difference(expected, actual, strides=strides)
        if found is not None:
            raise AssertionError(f"{self._when}: {what} is not as in the eager loop: {found}")


def _plain(clip: Clip | None) -> Callable[[list[torch.Tensor]], Any] | None:
    """What the plain loop calls."""
    if isinstance(clip, GlobalNorm):
        return lambda parameters: torch.nn.utils.clip_grad_norm_(
            parameters, clip.max_norm, clip.norm_type, clip.error_if_nonfinite
        )
    if isinstance(clip, Value):
        return lambda parameters: torch.nn.utils.clip_grad_value_(parameters, clip.value)
    return None


def _scale(scaler: torch.amp.GradScaler | None) -> dict[str, Any] | None:
    return None if scaler is None else scaler.state_dict()


def _settings(optimizer: Any) -> list[Mapping[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
