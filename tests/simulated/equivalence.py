"""Train a network in the plain eager loop and over simulated workers, and compare every byte.

```
assert_same_bits(
    LeNet, batches, num_workers=3, loss_fn=nn.CrossEntropyLoss(),
    place=lambda net: net.fc1.place("MS_WORKER", 2),
)
```
"""

from __future__ import annotations

import copy
import functools
import os
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from graphsplit.batches.microbatches import Divider, LossWeight, Split
from graphsplit.optimizers.clip import Clip, GlobalNorm, Value
from graphsplit.optimizers.update import AccumulateBy, GradientOrder
from graphsplit.placement.resolve import UnplacedRule
from graphsplit.planning.task import Task
from graphsplit.program.lower import Policy
from simulated.against_loop import Comparison
from simulated.reference import EagerLoop, Extras
from simulated.simulate import Captures, SimulatedCluster

Place = Callable[[nn.Module], object]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
MakeScheduler = Callable[[Any], Any]


def sgd_with_momentum(network: nn.Module) -> torch.optim.Optimizer:
    """The optimizer where a test asks for none: SGD that remembers, so that errors add up."""
    return torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a network is trained, in the loop and on the workers.

    Attributes:
        num_workers: Size of the simulated cluster.
        place: Places the network's modules.
        loss_fn: The loss; None if the network returns it. An object is copied for the loop and
            for every worker.
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
        gradient_order: In which order gradients of microbatches are added.
        gradient_dtype: To what these and their sums are rounded.
        accumulate_by: Whether each batch is added up by itself, or each microbatch over batches.
        schedule: In which order workers compute.
        recompute: What backward runs again: everything, or the modules with these paths.
        before_step: ``before_step(step, network, loss_fn)``: what the script changes before a step,
            in the loop and on every worker.
        name: What errors call this cluster.
    """

    num_workers: int
    place: Place | None = None
    loss_fn: Callable[..., Any] | None = None
    make_optimizer: MakeOptimizer = sgd_with_momentum
    make_scheduler: MakeScheduler | None = None
    unplaced: UnplacedRule = "affinity"
    steps: int | None = None
    evaluate_after: Collection[int] | None = None
    seed: int = 0
    captures: Captures | None = None
    plan_everywhere: bool = False
    dynamic_dims: Mapping[int, int] | None = None
    microbatches: int = 1
    split: Split | None = None
    loss_weight: LossWeight | None = None
    clip: Clip | None = None
    make_scaler: Callable[[], torch.amp.GradScaler] | None = None
    autocast: torch.dtype | None = None
    set_to_none: bool = True
    on_gradients: Callable[[nn.Module], None] | None = None
    accumulate: int = 1
    gradient_order: GradientOrder = "left"
    gradient_dtype: torch.dtype | None = None
    accumulate_by: AccumulateBy = "batch"
    schedule: str | Policy = "1f1b"
    recompute: bool | tuple[str, ...] = False
    before_step: Callable[[int, nn.Module, Any], None] | None = None
    name: str = ""

    def loop(self, start: _Start) -> EagerLoop:
        """The plain loop."""
        return EagerLoop(
            start.make,
            microbatches=self.microbatches,
            split=self.split,
            loss_weight=self.loss_weight,
            extras=Extras(
                _plain(self.clip),
                self.make_scaler,
                self.autocast,
                self.set_to_none,
                self.on_gradients,
                self.accumulate,
                self.gradient_order == "pairs",
                self.accumulate_by == "microbatch" and self.accumulate > 1,
                self.gradient_dtype,
            ),
        )

    def workers(self, start: _Start) -> _Workers:
        """The maker of the workers' tasks."""
        make_task = functools.partial(
            Task,
            unplaced=self.unplaced,
            with_loss=True,
            dynamic_dims=self.dynamic_dims or {},
            divider=Divider(self.microbatches, self.split, self.loss_weight),
            clip=self.clip,
            set_to_none=self.set_to_none,
            autocast=self.autocast,
            accumulate=self.accumulate,
            gradient_order=self.gradient_order,
            gradient_dtype=self.gradient_dtype,
            accumulate_by=self.accumulate_by,
            schedule=self.schedule,
            recompute=self.recompute,
        )
        return _Workers(start, self.place, self.make_scaler, make_task)

    def cluster(self, workers: _Workers) -> SimulatedCluster:
        """The simulated workers."""
        shared = None if self.plan_everywhere else self.captures or Captures()
        cluster = SimulatedCluster(workers.next_task, self.num_workers, captures=shared)
        if self.on_gradients is not None:
            _show_gradients(cluster, self.on_gradients)
        return cluster


def assert_same_bits(
    make_network: Callable[[], nn.Module],
    batches: Sequence[Any],
    *,
    beside: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> SimulatedCluster:
    """Check that training over workers gives the bytes of the plain eager loop.

    Compared after every step: the loss on every worker; every parameter, gradient, buffer and
    optimizer state where it lives; the state of every worker's generator. After some steps: eval
    loss and outputs, and in every second test what predict returns on every worker.

    Args:
        make_network: Makes the network; called once for the loop and once per worker, each time
            from the same seed.
        batches: Batches as a loader yields them, used in turn.
        beside: Of each further cluster, the options in which it differs; the loop is the same, and
            runs once for all of them.
        options: The attributes of ``Training``; ``num_workers`` has no default.

    Returns:
        The simulated cluster after the last step; of several, the first.

    Raises:
        AssertionError: Something differs; names the first difference.
    """
    training = Training(**options)
    start = _Start(
        make_network,
        training.loss_fn,
        training.make_optimizer,
        training.make_scheduler,
        training.seed,
    )
    reference = training.loop(start)
    tried = [_Tried.of(replace(training, **own), start, reference) for own in ({}, *beside)]
    num_steps = len(batches) if training.steps is None else training.steps
    evaluated = training.evaluate_after
    for step in range(num_steps):
        batch = batches[step % len(batches)]
        if training.before_step is not None:
            _change(step, training.before_step, reference, [one.cluster for one in tried])
        loss = reference.train_step(copy.deepcopy(batch))
        for one in tried:
            one.comparison.begin(f"step {step}")
            one.comparison.train(loss, batch, one.workers.schedulers)
        if step in ((num_steps - 1,) if evaluated is None else evaluated):
            _evaluate(reference, batch, tried, training.plan_everywhere or _predicts())
    return tried[0].cluster


def _evaluate(reference: EagerLoop, batch: Any, tried: Sequence[_Tried], predicts: bool) -> None:
    """Compare eval loss and outputs, what predict returns, and that they left no trace."""
    expected = reference.evaluate(copy.deepcopy(batch))
    predicted = reference.predict(copy.deepcopy(batch)) if predicts else None
    for one in tried:
        one.comparison.evaluate(expected, batch)
        if predicts:
            one.comparison.predict(predicted, batch)
        one.comparison.compare_state()


def _predicts() -> bool:
    """Whether this test predicts, too: a capture more, of what evaluation captures with the loss.

    Every second one does, the same in every run; with ``ALL_PLACEMENTS`` all do.
    """
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]  # without its phase
    return not test or "ALL_PLACEMENTS" in os.environ or zlib.crc32(test.encode()) % 2 == 0


def _change(
    step: int,
    change: Callable[[int, nn.Module, Any], None],
    reference: EagerLoop,
    clusters: Sequence[SimulatedCluster],
) -> None:
    """Let the script change what it likes before a step, in the loop and on every worker."""
    with reference.own_generator():
        change(step, reference.network, reference.loss_fn)
    for worker in (worker for cluster in clusters for worker in cluster.workers):
        with worker.active():
            change(step, worker.task.network, worker.task.loss_fn)


@dataclass(frozen=True)
class _Start:
    """The start of the loop and of every worker: each has its own, and all are equal."""

    make_network: Callable[[], nn.Module]
    loss_fn: Callable[..., Any] | None
    make_optimizer: MakeOptimizer
    make_scheduler: MakeScheduler | None
    seed: int

    def make(self) -> tuple[nn.Module, Any, Any, Any]:
        """Network, loss, optimizer and scheduler."""
        torch.manual_seed(self.seed)
        network = self.make_network()
        own_loss = copy.deepcopy(self.loss_fn)  # functions stay what they are
        optimizer = self.make_optimizer(network)
        scheduler = self.make_scheduler(optimizer) if self.make_scheduler else None
        return network, own_loss, optimizer, scheduler


@dataclass
class _Workers:
    """Makes the workers' tasks, and keeps their schedulers, by rank."""

    start: _Start
    place: Place | None
    make_scaler: Callable[[], torch.amp.GradScaler] | None
    make_task: Callable[..., Task]
    schedulers: list[Any] = field(default_factory=list)

    def next_task(self) -> Task:
        """The task of the next rank."""
        network, loss_fn, optimizer, scheduler = self.start.make()
        if self.place is not None:
            self.place(network)
        self.schedulers.append(scheduler)
        scaler = self.make_scaler() if self.make_scaler is not None else None
        return self.make_task(network, loss_fn, optimizer, scaler=scaler)


@dataclass(frozen=True)
class _Tried:
    """One of the clusters that are compared with the loop."""

    cluster: SimulatedCluster
    workers: _Workers
    comparison: Comparison

    @classmethod
    def of(cls, training: Training, start: _Start, reference: EagerLoop) -> _Tried:
        """The cluster of some options, as it begins."""
        workers = training.workers(start)
        cluster = training.cluster(workers)
        return cls(cluster, workers, Comparison(training.name, reference, cluster))


def _show_gradients(cluster: SimulatedCluster, show: Callable[[nn.Module], None]) -> None:
    """Let every worker show its network before gradients are clipped."""
    for worker in cluster.workers:
        call = functools.partial(show, worker.task.network)
        worker.planner.updater.on_gradients = call


def _plain(clip: Clip | None) -> Callable[[list[torch.Tensor]], Any] | None:
    """The loss that the plain loop calls."""
    if isinstance(clip, GlobalNorm):
        return lambda parameters: torch.nn.utils.clip_grad_norm_(
            parameters, clip.max_norm, clip.norm_type, clip.error_if_nonfinite
        )
    if isinstance(clip, Value):
        return lambda parameters: torch.nn.utils.clip_grad_value_(parameters, clip.value)
    return None
