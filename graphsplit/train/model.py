"""``Model``: a network with its loss, optimizer and metrics, trained wherever it is placed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import nn

from graphsplit.capture.graph import CapturedGraph, Mode
from graphsplit.errors import ConfigurationError
from graphsplit.partition.explain import explain_plan
from graphsplit.placement.resolve import UnplacedRule
from graphsplit.runtime import job as jobs
from graphsplit.train.batch import Signature, split_batch
from graphsplit.train.callbacks import Callback, RunContext
from graphsplit.train.cluster_engine import ClusterEngine
from graphsplit.train.engine import EagerEngine, Engine
from graphsplit.train.metrics import Metric
from graphsplit.train.planner import Task, capture_graph, make_plan, module_annotations

_SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "auto")


class Model:
    """A network with its loss, optimizer and metrics.

    In a cluster every worker builds the same Model and calls the same methods in the same order;
    each runs its own part. In one process the network runs eagerly.

    Args:
        net: The network. Its train and eval mode is set by the methods below.
        loss_fn: ``loss_fn(outputs, target)``, a scalar. None: the network returns the scalar loss,
            or an object with ``.loss``.
        optimizer: Any optimizer of ``torch.optim`` over the network's parameters that needs no
            closure.
        metrics: Metrics of ``eval``, by name.
        microbatches: Number of microbatches of a step; 1 for now.
        schedule: Order of microbatches; with one microbatch all are the same.
        capture: ``"auto"``: ``torch.export``.
        unplaced: Where operations go that nobody placed: ``"affinity"`` or ``"worker0"``.

    Raises:
        ConfigurationError: An argument is not as above, or ``MS_ROLE`` is set and ``gs.init()``
            was not called.
    """

    def __init__(
        self,
        net: nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        metrics: Mapping[str, Metric] | None = None,
        *,
        microbatches: int = 1,
        schedule: str = "1f1b",
        capture: str = "auto",
        unplaced: UnplacedRule = "affinity",
    ) -> None:
        self._metrics = dict(metrics or {})
        _check_arguments(
            net,
            optimizer,
            self._metrics,
            microbatches=microbatches,
            schedule=schedule,
            capture=capture,
            unplaced=unplaced,
        )
        with_loss = any(metric.needs_loss for metric in self._metrics.values())
        self._task = Task(net, loss_fn, optimizer, unplaced, with_loss)
        job = jobs.current()
        self._engine: Engine = (
            EagerEngine(self._task) if job is None else ClusterEngine(self._task, job)
        )

    def train(self, epochs: int, loader: Iterable[Any], callbacks: Sequence[Callback] = ()) -> None:
        """Train for some epochs.

        Args:
            epochs: How many times to go through the loader.
            loader: Yields batches: ``(inputs, target)``, a tuple of inputs and a target, or a
                mapping passed as keyword arguments. Every worker passes its own, equal one; only
                workers that consume an input draw from it.
            callbacks: Called on every worker.

        Raises:
            ConfigurationError: The Model has no optimizer, or a batch does not fit.
            CaptureError: The network cannot be captured.
            PlacementError: A placement cannot be honoured.
            PlanMismatchError: Workers made different plans.
            LoaderMismatchError: Workers' loaders disagree.
            JobFailedError: The job failed elsewhere; carries the root cause.
        """
        self._need_optimizer("train")
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 0:
            raise ConfigurationError(f"epochs is {epochs!r}; expected an int of 0 or more")
        length = len(loader) if isinstance(loader, Sized) else None
        context = RunContext(self, jobs.get_rank(), epochs, length)
        with self._engine.guard():
            try:
                self._train(context, loader, callbacks)
            except BaseException:
                for callback in callbacks:
                    callback.on_failure(context)
                raise

    def _train(
        self, context: RunContext, loader: Iterable[Any], callbacks: Sequence[Callback]
    ) -> None:
        for callback in callbacks:
            callback.on_train_begin(context)
        for epoch in range(1, context.num_epochs + 1):
            context.epoch, context.step = epoch, 0
            for callback in callbacks:
                callback.on_epoch_begin(context)
            for loss in self._engine.train_epoch(loader):
                context.step += 1
                context.loss = loss
                for callback in callbacks:
                    callback.on_step_end(context)
            for callback in callbacks:
                callback.on_epoch_end(context)
        for callback in callbacks:
            callback.on_train_end(context)

    def train_step(self, *batch: Any, **kwargs: Any) -> torch.Tensor:
        """Train on one batch, which every worker passes alike.

        Returns:
            The loss, a scalar tensor, the true one on every worker.

        Raises:
            LoaderMismatchError: Workers passed different batches.
            ConfigurationError, CaptureError, PlacementError, PlanMismatchError, JobFailedError:
                as ``train``.
        """
        self._need_optimizer("train_step")
        with self._engine.guard():
            return self._engine.train_step(self._arguments(batch, kwargs))

    def eval(self, loader: Iterable[Any]) -> dict[str, float]:
        """Compute the metrics over a loader, in eval mode and without gradients.

        Returns:
            Every metric by name, the true value on every worker.

        Raises:
            ConfigurationError: The Model has no metrics, or a batch does not fit.
        """
        if not self._metrics:
            raise ConfigurationError(
                "eval needs metrics\n  Fix: Model(..., metrics={'Accuracy': "
                "gs.metrics.Accuracy()})."
            )
        with self._engine.guard():
            return self._engine.eval_epoch(loader, self._metrics)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network in eval mode, without gradients, on inputs every worker passes alike.

        Returns:
            The network's outputs in its own structure, on every worker.
        """
        with self._engine.guard():
            return self._engine.predict((args, kwargs))

    def explain(self, *batch: Any, **kwargs: Any) -> str:
        """Which worker runs each operation, why, and the bytes that cross each cut.

        Args:
            batch: One batch, as ``train`` takes it. Without one, the plan that ran last is
                explained.
            kwargs: One batch, as keyword arguments.

        Raises:
            ConfigurationError: No batch was given, and nothing has run yet.
        """
        if not batch and not kwargs:
            return self._explain_latest()
        arguments = self._arguments(batch, kwargs)
        task = self._task
        mode = (
            Mode.TRAIN if task.loss_fn is not None or task.optimizer is not None else (Mode.PREDICT)
        )
        graph = capture_graph(task, mode, Signature.of(arguments))
        owners = self._engine.planner.owners if isinstance(self._engine, ClusterEngine) else {}
        plan, _ = make_plan(
            graph,
            network=task.network,
            loss_fn=task.loss_fn,
            unplaced=task.unplaced,
            num_workers=self._num_workers(graph),
            owners=dict(owners),
        )
        return explain_plan(plan)

    def _num_workers(self, graph: CapturedGraph) -> int:
        """In one process, as many workers as the placements ask for."""
        job = jobs.current()
        if job is not None:
            return job.num_workers
        modules = module_annotations(self._task.network, self._task.loss_fn).values()
        operations = [n.annotation for n in graph.nodes if n.annotation is not None]
        return max((a.rank for a in (*modules, *operations)), default=0) + 1

    def _explain_latest(self) -> str:
        if isinstance(self._engine, ClusterEngine):
            for mode in Mode:
                planned = self._engine.planner.latest(mode)
                if planned is not None:
                    return explain_plan(planned.plan)
        raise ConfigurationError(
            "nothing has been planned yet\n  Fix: pass a batch, as in model.explain(inputs, "
            "target), or call it after the first step."
        )

    def state_dict(self) -> dict[str, Any]:
        """The network's full state with its original keys; in a cluster gathered on every worker.

        Collective. Holds copies in a cluster, references in one process.
        """
        with self._engine.guard():
            return self._engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a full state of the network, however it was placed when it was saved.

        Raises:
            StateError: Keys or shapes do not fit (in one process: PyTorch's ``RuntimeError``).
        """
        with self._engine.guard():
            self._engine.load_state_dict(state)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's full state in PyTorch's form; in a cluster gathered on every worker."""
        self._need_optimizer("optimizer_state_dict")
        with self._engine.guard():
            return self._engine.optimizer_state_dict()

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a full state of the optimizer."""
        self._need_optimizer("load_optimizer_state_dict")
        with self._engine.guard():
            self._engine.load_optimizer_state_dict(state)

    def _arguments(self, batch: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        has_loss_fn = self._task.loss_fn is not None
        if kwargs:
            if batch and has_loss_fn:
                raise ConfigurationError(
                    "a batch is given both by position and by keyword, and the Model has a loss_fn"
                )
            return (batch, kwargs) if batch else split_batch(kwargs, has_loss_fn=has_loss_fn)
        if len(batch) == 1:
            return split_batch(batch[0], has_loss_fn=has_loss_fn)
        return split_batch(batch, has_loss_fn=has_loss_fn)

    def _need_optimizer(self, method: str) -> None:
        if self._task.optimizer is None:
            raise ConfigurationError(
                f"{method} needs an optimizer\n  Fix: Model(..., optimizer=torch.optim.SGD("
                f"net.parameters(), lr=0.01))."
            )


def _check_arguments(
    net: Any,
    optimizer: Any,
    metrics: Mapping[str, Any],
    *,
    microbatches: int,
    schedule: str,
    capture: str,
    unplaced: str,
) -> None:
    problems = []
    if not isinstance(net, nn.Module):
        problems.append(f"net is a {type(net).__name__}; expected a torch.nn.Module")
    if isinstance(optimizer, torch.optim.LBFGS):
        problems.append("LBFGS needs a closure, which several workers cannot run together yet")
    elif optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        problems.append(
            f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer"
        )
    problems += [
        f"metric {name!r} is a {type(metric).__name__}; expected a graphsplit.metrics.Metric"
        for name, metric in metrics.items()
        if not isinstance(metric, Metric)
    ]
    if microbatches != 1:
        problems.append(f"microbatches={microbatches!r}; only 1 is supported for now")
    if schedule not in _SCHEDULES:
        problems.append(f"schedule={schedule!r}; expected one of {', '.join(_SCHEDULES)}")
    if capture != "auto":
        problems.append(f"capture={capture!r}; expected 'auto'")
    if unplaced not in ("affinity", "worker0"):
        problems.append(f"unplaced={unplaced!r}; expected 'affinity' or 'worker0'")
    if problems:
        raise ConfigurationError("Model(...): " + "\n  ".join(problems))
