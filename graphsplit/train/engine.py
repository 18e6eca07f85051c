"""Where a Model's steps run: in this process alone, or as one worker of a cluster."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from graphsplit.batches import step_functions
from graphsplit.batches.microbatches import Division
from graphsplit.batches.signature import (
    Arguments,
    inputs_of,
    num_samples,
    split_batch,
    targets_of,
)
from graphsplit.checkpoint.holder import StateHolder
from graphsplit.checkpoint.position import FROM_THE_START, EpochStart
from graphsplit.marks.annotations import check_blocks
from graphsplit.optimizers.own_step import by_the_model, note_used
from graphsplit.planning.modes import begin_training, ensure_training, evaluating
from graphsplit.planning.step_plan import TrainingProgress, total_loss
from graphsplit.planning.task import Task, materialize_all, trainable_of
from graphsplit.planning.trainable import check_value
from graphsplit.runtime.segments.part_sums import PartSums
from graphsplit.train.metrics import Metric, computed, need_batches
from graphsplit.train.outputs import NOTHING, Beside
from graphsplit.witness.notes import Witness


class Engine(StateHolder):
    """Runs the steps of a Model.

    Attributes:
        witness: Sees what is computed; None where nobody asks.
        beside: What the last training step gave beside its loss.
    """

    witness: Witness | None = None
    beside = NOTHING

    @property
    def stops_here(self) -> bool:
        """Whether the step that is done was the last one: the job was asked to end."""
        return False

    @property
    def is_inside_call(self) -> bool:
        """Whether a call of a Model is under way."""
        return False

    def show_training(self, words: Callable[[], str]) -> None:
        """Let ``graphsplit status`` say how training goes; asked about once a second."""

    def guard(self) -> AbstractContextManager[None]:
        """A context for all that a Model does with this engine, user code included."""
        return nullcontext()

    def check_alike(self, path: str | None = None, *, loads: bool = False) -> None:
        """Refuse that workers are at different Models, or at different saves."""

    def pass_milestone(self) -> None:
        """Code of the user's inside a call is over: what other workers wait for comes later."""

    @abstractmethod
    def train_epoch(
        self,
        loader: Iterable[Any],
        start: EpochStart = FROM_THE_START,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[torch.Tensor]:
        """Train on every batch of a loader, or on those that are left; yields each step's loss.

        Ends where ``is_stopped``, which is asked before each batch, on all workers alike.
        """

    @abstractmethod
    def train_step(self, division: Division) -> torch.Tensor:
        """Train on one batch; returns its loss."""

    @abstractmethod
    def forward_backward(self, division: Division, scale: float) -> torch.Tensor:
        """Add the gradients of one batch, of its loss times a number; returns the loss alone.

        Gradients are not reset before, nor used afterwards: ``train_step`` is ``zero_gradients``,
        this and ``step``.
        """

    @abstractmethod
    def zero_gradients(self) -> None:
        """Reset the gradients, as before a training step."""

    @abstractmethod
    def step(self) -> None:
        """Use the gradients: unscale, clip, and step the optimizers."""

    @abstractmethod
    def eval_epoch(self, loader: Iterable[Any], metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Evaluate every batch of a loader."""

    @abstractmethod
    def predict(self, arguments: Arguments) -> Any:
        """The network's outputs."""

    @abstractmethod
    def predict_loader(self, loader: Iterable[Any]) -> list[Any]:
        """The network's outputs for each batch of a loader, in their order."""

    @abstractmethod
    def optimizer_state_dicts(self) -> list[dict[str, Any]]:
        """The optimizers' full states."""

    @abstractmethod
    def load_optimizer_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the optimizers' full states."""

    @property
    @abstractmethod
    def last_gradient_norm(self) -> torch.Tensor | None:
        """The norm of all gradients at the last clipping; None before, and without it."""

    @abstractmethod
    def renew(self) -> None:
        """The task has another loss, or other optimizers."""

    @abstractmethod
    def call_on_gradients(self, function: Callable[[], None] | None) -> None:
        """Note a function to call when a step's gradients are complete, before they are clipped."""


class EagerEngine(Engine):
    """Ordinary PyTorch in one process: the reference for all others."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.progress = TrainingProgress(accumulate=task.accumulate)
        self._last_norm: torch.Tensor | None = None
        self._has_trained = False
        self._on_gradients: Callable[[], None] | None = None
        materialize_all(task)
        self.sums = task.part_sums or PartSums()
        self._network = task.network if task.compiler is None else task.compiler(task.network)

    def train_epoch(
        self,
        loader: Iterable[Any],
        start: EpochStart = FROM_THE_START,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[torch.Tensor]:
        """Train on every batch; yields each loss."""
        self._begin_training()
        self.progress.begin()
        has_loss_fn = self._task.loss_fn is not None
        drawn = iter(start.batches(loader))
        while not is_stopped():
            try:
                batch = next(drawn)
            except StopIteration:
                return
            yield self.train_step(self._task.divider.divide(batch, has_loss_fn=has_loss_fn))

    def train_step(self, division: Division) -> torch.Tensor:
        """One step of the plain loop."""
        with nullcontext() if self.witness is None else self.witness.watch():
            if self.progress.opens:
                self.zero_gradients()
            closes = self.progress.closes
            loss = self._add_gradients(division, 1.0)
            if closes:
                self.step()
            return loss

    def forward_backward(self, division: Division, scale: float) -> torch.Tensor:
        """Forward and backward of the plain loop."""
        with nullcontext() if self.witness is None else self.witness.watch():
            loss = self._add_gradients(division, scale)
        for optimizer in self._task.optimizers:
            note_used(optimizer)
        self.progress.adds_up = True
        return loss

    def zero_gradients(self) -> None:
        """Reset the gradients, as the Model was told to."""
        self.progress.adds_up = False
        self.sums.begin_step()
        for optimizer in self._task.optimizers:
            optimizer.zero_grad(set_to_none=self._task.set_to_none)

    def _begin_training(self) -> None:
        self._has_trained = True
        begin_training(self._task.network)

    def _add_gradients(self, division: Division, scale: float) -> torch.Tensor:
        self.progress.begin()
        if self._has_trained:
            ensure_training(self._task.network)
        else:
            self._begin_training()
        found: list[dict[str, Any]] = []
        if division.weights:
            loss = self._accumulate(division, found, scale)
        else:
            loss = self._loss(division.arguments, found)
            torch.autograd.backward(self._scaled(loss, scale))
        self.beside = Beside.of(found, division.weights)
        self.progress.num_steps += 1
        return loss.detach()

    def _accumulate(
        self, division: Division, found: list[dict[str, Any]], scale: float
    ) -> torch.Tensor:
        """The gradients of all microbatches, one after the other."""
        before, losses = torch.default_generator.get_state(), []
        pairs = zip(division.microbatches, division.weights, strict=True)
        sums, kept_apart = self.sums, self._kept_apart()
        sums.begin_batch()
        for index, (microbatch, weight) in enumerate(pairs):
            torch.default_generator.set_state(self.progress.rng_state(index))
            loss = self._loss(microbatch, found)
            with sums.apart(kept_apart, index):
                torch.autograd.backward(self._scaled(loss * weight, scale))
            losses.append(loss.detach())
        if self.progress.closes or not self._task.num_kept:
            sums.end_batch()
        torch.default_generator.set_state(before)
        return total_loss(losses, division.weights)

    def _kept_apart(self) -> tuple[torch.Tensor, ...]:
        """The parameters whose gradients are not added in ``.grad``, each once."""
        is_apart = self._task.part_sums is not None
        return tuple(dict.fromkeys(trainable_of(self._task))) if is_apart else ()

    def _scaled(self, loss: torch.Tensor, scale: float) -> torch.Tensor:
        task = self._task
        loss = loss if scale == 1.0 else loss * scale
        loss = loss if task.accumulate == 1 else loss / task.accumulate
        return loss if task.scaler is None else task.scaler.scale(loss)

    def step(self) -> None:
        """Unscale, clip and step: between the gradients and the next step."""
        task = self._task
        if task.scaler is not None:
            for optimizer in task.optimizers:
                task.scaler.unscale_(optimizer)
        if self._on_gradients is not None:
            self._on_gradients()
        if task.clip is not None:
            self._last_norm = task.clip.in_one_process(task.network.parameters())
        for optimizer in task.optimizers:
            with by_the_model():
                if task.scaler is None:
                    optimizer.step()
                else:
                    task.scaler.step(optimizer)
            note_used(optimizer)
        if task.scaler is not None:
            task.scaler.update()

    def _loss(self, arguments: Arguments, found: list[dict[str, Any]]) -> torch.Tensor:
        """The loss; what is beside it is added to what was found."""
        (args, kwargs), task = arguments, self._task
        run = (
            step_functions.run_train_with_outputs if task.keep_outputs else step_functions.run_train
        )
        loss, beside = step_functions.casting_to(task.autocast, run)(
            self._network, task.loss_fn, *args, **kwargs
        )
        assert isinstance(loss, torch.Tensor)
        check_value(loss)
        check_blocks()
        found.append(beside)
        return loss

    def eval_epoch(self, loader: Iterable[Any], metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Evaluate in eval mode, without gradients."""
        task = self._task
        for metric in metrics.values():
            metric.reset()
        has_loss_fn = task.loss_fn is not None
        run = step_functions.casting_to(task.autocast, step_functions.run_eval)
        run_with_loss = step_functions.casting_to(task.autocast, step_functions.run_eval_with_loss)
        num_batches = 0
        with evaluating(task.network), torch.no_grad():
            for num_batches, batch in enumerate(loader, 1):  # noqa: B007  their number
                arguments = split_batch(batch, has_loss_fn=has_loss_fn)
                args, kwargs = arguments
                run_batch = run_with_loss if task.with_loss else run
                found = run_batch(self._network, task.loss_fn, *args, **kwargs)
                update_metrics(task, metrics, arguments, found)
        need_batches(num_batches)
        return computed(metrics)

    def predict(self, arguments: Arguments) -> Any:
        """Run the network in eval mode, without gradients."""
        args, kwargs = arguments
        run = step_functions.casting_to(self._task.autocast, step_functions.run_predict)
        with evaluating(self._task.network), torch.no_grad():
            return run(self._network, None, *args, **kwargs)

    def predict_loader(self, loader: Iterable[Any]) -> list[Any]:
        """Predict each batch, as it is read."""
        has_loss_fn = self._task.loss_fn is not None
        return [self.predict(inputs_of(batch, has_loss_fn=has_loss_fn)) for batch in loader]

    def settle_now(self) -> None:
        """Nothing waits."""

    def state_dict(self) -> dict[str, Any]:
        """The network's own state dictionary."""
        found: dict[str, Any] = self._task.network.state_dict()
        return found

    def load_state_dict(self, state: Mapping[str, Any], **options: Any) -> Any:
        """Load into the network."""
        return self._task.network.load_state_dict(state, **options)

    def note_put(self, names: Sequence[str]) -> None:
        """Nobody takes snapshots."""

    def optimizer_state_dicts(self) -> list[dict[str, Any]]:
        """The optimizers' own state dictionaries."""
        return [optimizer.state_dict() for optimizer in self._task.optimizers]

    def load_optimizer_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load into the optimizers."""
        for optimizer, state in zip(self._task.optimizers, states, strict=True):
            optimizer.load_state_dict(dict(state))

    @property
    def last_gradient_norm(self) -> torch.Tensor | None:
        """The norm that ``clip_grad_norm_`` returned last."""
        return self._last_norm

    def renew(self) -> None:
        """Whatever the task has now is what runs."""
        materialize_all(self._task)

    def call_on_gradients(self, function: Callable[[], None] | None) -> None:
        """Note what to call between backward and clipping."""
        self._on_gradients = function


def update_metrics(
    task: Task, metrics: Mapping[str, Metric], arguments: Arguments, found: Any
) -> None:
    """Show one batch to all metrics.

    Args:
        task: What was run.
        metrics: The metrics.
        arguments: The batch.
        found: The outputs; with the loss and those beside it, if the task asks for them.
    """
    loss, outputs, losses = found if task.with_loss else (None, found, {})
    targets = targets_of(arguments, has_loss_fn=task.loss_fn is not None)
    target, count = next(iter(targets), None), num_samples(arguments)
    for metric in metrics.values():
        metric.losses = losses
        metric.update(outputs=outputs, target=target, loss=loss, num_samples=count)
