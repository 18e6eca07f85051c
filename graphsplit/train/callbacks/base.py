"""The base class of callbacks, and the context that they are given.

Where they run: every callback runs on every worker, at the same points, with the same true loss.
What is shown once for all (a progress bar) shows itself on worker 0 alone. Gradients are seen where
they are: every worker shows its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from graphsplit.checkpoint.position import Position
from graphsplit.checkpoint.states import Loaded, PathLike
from graphsplit.errors import ConfigurationError, OwnershipError
from graphsplit.feeding.data_watch import DrawWatch, generators_near
from graphsplit.frames import warn_users
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.text import meant


class TrainedModel(Protocol):
    """The ``Model`` that is trained, with what callbacks usually ask of it."""

    loss_fn: Callable[..., Any] | None
    optimizer: Any

    @property
    def network(self) -> torch.nn.Module:
        """As ``Model.network``."""

    @property
    def position(self) -> Position:
        """As ``Model.position``."""

    @property
    def last_gradient_norm(self) -> torch.Tensor | None:
        """As ``Model.last_gradient_norm``."""

    def eval(self, loader: Iterable[Any]) -> dict[str, float]:
        """As ``Model.eval``."""

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Model.predict``."""

    def state_dict(self) -> dict[str, Any]:
        """As ``Model.state_dict``."""

    def optimizer_state_dict(self) -> Any:
        """As ``Model.optimizer_state_dict``."""

    def save(
        self, path: PathLike, *, gather: bool = False, extra: Mapping[str, Any] | None = None
    ) -> None:
        """As ``Model.save``."""

    def load(self, path: PathLike, *, extra: Mapping[str, Any] | None = None) -> Loaded:
        """As ``Model.load``."""


@dataclass
class RunContext:
    """Where training stands.

    Attributes:
        model: The model that is trained.
        rank: This worker; 0 in one process.
        num_epochs: Epochs of this call of ``train``.
        num_steps: Steps of an epoch, or None if the loader has no length.
        epoch: Current epoch, from 1.
        step: Step within the epoch, from 1; 0 before the first.
        loss: Loss of the last step, a scalar tensor; None before the first.
        losses: The scalars that network or loss returned beside the loss, by name: the parts of a
            sum. With microbatches they are added up as the loss is.
        outputs: What the network returned in the last step, with ``Model(keep_outputs=True)``; of
            each microbatch, where there are several.
        has_updated: Whether the optimizer stepped in the last step; not so after every batch if
            the Model accumulates gradients.
        metrics: What ``eval`` gave for ``train(..., validation=loader)`` at the end of the last
            epoch; empty before.
    """

    model: TrainedModel
    rank: int
    num_epochs: int
    num_steps: int | None
    epoch: int = 0
    step: int = 0
    loss: torch.Tensor | None = None
    losses: Mapping[str, torch.Tensor] = field(default_factory=dict)
    outputs: Any = field(default=None, repr=False)
    has_updated: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    on_stop: Callable[[], None] | None = field(default=None, repr=False)  # of the running train

    def stop(self) -> None:
        """End training after this step, on all workers, whichever of them asks.

        The callbacks of the step are called as ever, then ``on_stop`` and ``on_train_end``. The
        epoch does not end: no ``on_epoch_end``, no validation. A save in ``on_stop``, as that of
        ``Checkpoint``, stands after the step, in the middle of the epoch; a run that goes on from
        it ends the epoch. Asked for at the end of an epoch, the next one does not begin, and
        ``on_stop`` is not called.

        Raises:
            ConfigurationError: No ``train`` is under way, or the callback's class does not show
                that it may stop: set ``may_stop = True`` on it.
        """
        if self.on_stop is None:
            raise ConfigurationError(
                "context.stop() was called, but no train is under way\n"
                "  Fix: call it inside a method of a callback."
            )
        self.on_stop()

    def owned_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The network's parameters that live on this worker, by name; in one process all.

        Treat each by itself: a norm over them is that of one worker. ``clip_grad_norm_`` raises
        ``OwnershipError``; ``Model(clip=gs.clip.GlobalNorm(...))`` clips by the norm of all.

        Raises:
            OwnershipError: Random numbers were drawn for one of them, and others live elsewhere.
        """
        parameters = dict(self.model.network.named_parameters())
        if not any(map(is_elsewhere, parameters.values())):
            yield from parameters.items()
            return
        watch = DrawWatch(None, generators_near(sys._getframe(1), (self, self.model)))
        for name, parameter in parameters.items():
            if not is_elsewhere(parameter):
                watch.begin()
                yield name, parameter
                if drawn := watch.drawn():
                    raise OwnershipError(
                        f"{drawn} was drawn from for {name!r}, on the worker of the parameter "
                        f"alone; in one process all parameters' numbers are drawn one after the "
                        f"other\n"
                        f"  Fix: draw for all of network.named_parameters() on every worker first, "
                        f"by the parameters' shapes; then go through owned_parameters()."
                    )


# What other libraries call the methods of a callback.
_USUAL = {
    "on_batch_end": "on_step_end",
    "on_train_batch_end": "on_step_end",
    "on_train_start": "on_train_begin",
    "on_train_epoch_start": "on_epoch_begin",
    "on_epoch_start": "on_epoch_begin",
    "on_train_epoch_end": "on_epoch_end",
    "on_validation_end": "on_epoch_end",
    "on_after_backward": "on_gradients",
    "on_exception": "on_failure",
}


class Callback:
    """Base class of callbacks; override what you need.

    Attributes:
        runs_last: Called after all others, whatever the order in which they are passed.
        may_stop: Whether it may call ``context.stop()``; None: if the code of its class names
            ``stop``. Workers ask each other at the end of each step where one may.
    """

    runs_last = False
    may_stop: bool | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Warn of a method that nothing calls, as it is misspelled, or has another library's name.

        Args:
            kwargs: Those of other bases.
        """
        super().__init_subclass__(**kwargs)
        known = [name for name in vars(Callback) if name.startswith("on_")]
        for name, method in vars(cls).items():
            is_new = name.startswith("on_") and callable(method) and name not in known
            if is_new and (hint := meant(name, known, _USUAL)):
                warn_users(f"nothing calls {cls.__qualname__}.{name}{hint}")

    def state_dict(self) -> dict[str, Any]:
        """The state that ``Model.save`` must keep of this callback for a run that goes on.

        Tensors, plain Python values, and lists, tuples, sets or mappings of them.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what ``state_dict`` gave; called after ``on_train_begin`` where training goes on."""

    def on_train_begin(self, context: RunContext) -> None:
        """Before the first epoch."""

    def on_epoch_begin(self, context: RunContext) -> None:
        """Before an epoch's first step; where training goes on, ``context.step`` were before."""

    def on_gradients(self, context: RunContext) -> None:
        """Between backward and clipping: the step's gradients are complete, and unscaled.

        On every worker, with ``context.owned_parameters()``; their ``.grad`` may be changed.
        ``context.step`` is the step that is under way, ``context.loss`` that of the one before.
        """

    def on_step_end(self, context: RunContext) -> None:
        """After every step."""

    def on_epoch_end(self, context: RunContext) -> None:
        """After an epoch's last step."""

    def on_stop(self, context: RunContext) -> None:
        """In place of ``on_epoch_end``, where ``context.stop()`` was called within an epoch."""

    def on_train_end(self, context: RunContext) -> None:
        """After the last epoch; not called after a failure."""

    def on_rollback(self, context: RunContext) -> None:
        """A worker was lost, and training goes on from an earlier step.

        Give back what belongs to the epoch that was under way. Once the worker is back,
        ``load_state_dict`` follows where the callback has a state, then ``on_epoch_begin``, whose
        changes of networks and optimizers are put back in the middle of an epoch; steps after the
        snapshot are run, and seen, again.
        """

    def on_failure(self, context: RunContext) -> None:
        """After a failure ended training: give back what was taken, raise nothing."""
