"""``Model``: a network with its loss, optimizer and metrics, trained wherever it is placed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import nn

from graphsplit.batches.microbatches import LossWeight, Split
from graphsplit.checkpoint.position import Position
from graphsplit.checkpoint.states import Loaded, PathLike, States
from graphsplit.errors import ConfigurationError
from graphsplit.job import joined
from graphsplit.job.script import Script
from graphsplit.optimizers.clip import Clip
from graphsplit.optimizers.update import AccumulateBy, GradientOrder
from graphsplit.placement.resolve import UnplacedRule
from graphsplit.planning.task import ReadBy
from graphsplit.program.lower import Policy
from graphsplit.text import called, need
from graphsplit.train.arguments import ModelArguments, check_loader, check_run
from graphsplit.train.callbacks import Callback
from graphsplit.train.callbacks.watching import Validation, check_watched
from graphsplit.train.cluster_engine import ClusterEngine
from graphsplit.train.engine import Engine
from graphsplit.train.explained import Explainer, Shown
from graphsplit.train.metrics import Metric, as_metrics
from graphsplit.train.steps import Calls, Steps, need_metrics, need_optimizer, stop_if_asked
from graphsplit.train.stored import StoredState
from graphsplit.train.survey import one_process_engine
from graphsplit.witness.notes import witness_for

_ASSIGNED = (
    "load_state_dict(assign=True) would put other parameters into the network than those that the "
    "Model's optimizer steps\n"
    "  Fix: leave assign out, which copies the values; or call net.load_state_dict(state, "
    "assign=True) before the optimizer and the Model are made."
)


class Model(Shown, Steps):
    """A network with its loss, optimizer and metrics.

    In a cluster every worker builds the same Model and calls the same methods in the same order;
    each runs its own part. In one process the network runs eagerly.

    Args:
        net: The network. Its train and eval mode is set by the methods below.
        loss_fn: ``loss_fn(outputs, target)`` returns the scalar loss, an object or a mapping with
            ``loss``, or a tuple that begins with it. None: the network does.
        optimizer: Any optimizer of ``torch.optim`` over the network's parameters that needs no
            closure; or several, which are stepped one after the other.
        metrics: Metrics of ``eval``, by name; or functions ``(outputs, target) -> number``, of
            which the mean is given, weighted by the batches' numbers of samples.
        microbatches: Into how many microbatches training splits each batch. The gradients are those
            of a plain loop that accumulates over them; ``docs/how-to/microbatches.md`` prints it.
        split: How to split a batch, where not along dimension 0: ``split(batch, microbatches)``
            gives a sequence of batches.
        loss_weight: What the loss of a microbatch counts, where not its number of rows:
            ``loss_weight(*inputs, target)``, or ``loss_weight(**batch)``, gives a number.
        schedule: In which order workers compute: ``"1f1b"`` (backward as soon as it can run, few
            microbatches under way), ``"gpipe"`` (all forward, then all backward),
            ``"interleaved_1f1b"`` (for workers of several parts), ``"zero_bubble"`` (gradients of
            large weights fill idle time), ``"auto"`` (the fastest of many, by simulation), or a
            function ``(plan, microbatches) -> orders``. Results are the same:
            ``docs/how-to/choose-a-schedule.md``.
        capture: ``"auto"``, the only value; goes with the next version.
        unplaced: Where operations go that nobody placed: ``"affinity"`` or ``"worker0"``.
        dynamic_dims: Dimensions of the batch's tensors whose sizes may change without a new plan,
            each with the largest size it may have: ``{0: 32, 1: 512}``. Other sizes, and sizes
            that the code of the network treats apart, are planned for once each.
        clip: How gradients are clipped before the optimizer steps: ``gs.clip.GlobalNorm(1.0)`` or
            ``gs.clip.Value(0.5)``, over ``net.parameters()``.
        scaler: A ``torch.amp.GradScaler``: scales the loss, unscales the gradients before
            clipping, and skips steps in which one is infinite or NaN, on all workers alike.
        autocast: Run network and loss under ``torch.autocast`` with this dtype, as in
            ``torch.bfloat16``.
        set_to_none: What ``zero_grad`` makes of gradients before a step: None, or zeros.
        accumulate: Over how many batches gradients are added up before the optimizer steps: a
            plain loop's ``(loss / accumulate).backward()``. Batches are counted through all epochs.
        compile: Compile what each worker runs with ``torch.compile``: True, or arguments for it, as
            in ``{"mode": "max-autotune"}``. Results are close to those of eager mode then, not
            equal to the bit: ``docs/how-to/compile-segments.md``.
        recompute: Save memory for time: run forward again in backward instead of keeping what it
            saves. True for all that each worker runs in one go, or a list of modules, or patterns
            of their names, as in ``["layers.*"]``, each by itself. Results are the same:
            ``docs/how-to/choose-a-schedule.md``.
        keep_outputs: Hand out what the network returns in training steps, in ``last_outputs`` and
            to callbacks. Every worker is sent it.
        gradient_order: In which order gradients of microbatches are added: ``"left"``, as a loop of
            ``backward()`` does, or ``"pairs"``, two by two: ``docs/how-to/microbatches.md`` prints
            both loops.
        gradient_dtype: Round each microbatch's gradients, and each sum of two, to this dtype, as
            ``torch.bfloat16``: replicas exchange half the bytes. With ``"pairs"`` only.
        accumulate_by: What ``accumulate`` adds up first: ``"batch"``, the microbatches of each
            batch, or ``"microbatch"``, each microbatch over the batches. Replicas then exchange
            gradients once per step instead of once per batch; one gradient is held for each
            microbatch of a worker's own. ``docs/how-to/microbatches.md`` prints the loop.
        reading: What replicas read of a loader's batches: ``"rows"``, each its own rows where that
            is safe (``docs/how-to/replicate-modules.md``), or ``"batches"``.

    Raises:
        ConfigurationError: An argument is not as above; or this is one process of several
            (``MS_ROLE``, torchrun, srun, ...) and ``gs.init()`` was not called.
    """

    @called("gs.Model")
    def __init__(
        self,
        net: nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        metrics: Mapping[str, Metric | Callable[[Any, Any], Any]] | None = None,
        *,
        microbatches: int = 1,
        split: Split | None = None,
        loss_weight: LossWeight | None = None,
        schedule: str | Policy = "1f1b",
        capture: str = "auto",
        unplaced: UnplacedRule = "affinity",
        dynamic_dims: Mapping[int, int] | None = None,
        clip: Clip | None = None,
        scaler: torch.amp.GradScaler | None = None,
        autocast: torch.dtype | None = None,
        set_to_none: bool = True,
        accumulate: int = 1,
        compile: bool | Mapping[str, Any] = False,
        recompute: bool | Sequence[str | nn.Module] = False,
        keep_outputs: bool = False,
        gradient_order: GradientOrder = "left",
        gradient_dtype: torch.dtype | None = None,
        accumulate_by: AccumulateBy = "batch",
        reading: ReadBy = "rows",
    ) -> None:
        given = ModelArguments(
            net, loss_fn, optimizer, metrics, microbatches=microbatches, split=split,
            loss_weight=loss_weight, schedule=schedule, capture=capture, unplaced=unplaced,
            dynamic_dims=dynamic_dims, clip=clip, scaler=scaler, autocast=autocast,
            set_to_none=set_to_none, accumulate=accumulate, compile=compile, recompute=recompute,
            keep_outputs=keep_outputs, gradient_order=gradient_order, gradient_dtype=gradient_dtype,
            accumulate_by=accumulate_by, reading=reading,
        )  # fmt: skip
        given.check()
        self._given = given
        self._metrics = as_metrics(metrics)
        self._task = given.task()
        job = joined.current()
        self._engine: Engine = (
            one_process_engine(self._task) if job is None else ClusterEngine(self._task, job)
        )
        self._engine.witness = witness_for(self._task)
        self._states = States(self._task, self._engine)
        self._script = script = Script() if job is None else job.script
        script.add_engine(self._task, self._engine, self._states)
        calls = Calls(self._task, self._engine, self._states, self._metrics, script)
        self._calls = script.around(self._engine, calls)
        stored = StoredState(self._task, self._engine, self._states)
        self._stored = script.around(self._engine, stored)
        explainer = Explainer(self._task, self._engine)
        self._explainer = script.around(self._engine, explainer, changes_nothing=True)

    @property
    def network(self) -> nn.Module:
        """The network."""
        return self._task.network

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """The loss; another one may be assigned between two steps, on all workers."""
        return self._task.loss_fn

    @loss_fn.setter
    def loss_fn(self, loss_fn: Callable[..., Any] | None) -> None:
        self._swap(replace(self._given, loss_fn=loss_fn))

    @property
    def optimizer(self) -> torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None:
        """The optimizer; another one may be assigned between two steps, on all workers."""
        return self._task.optimizer

    @optimizer.setter
    def optimizer(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
    ) -> None:
        self._swap(replace(self._given, optimizer=optimizer))

    def _swap(self, given: ModelArguments) -> None:
        """Go on with another loss, or another optimizer; an error as for a new Model."""
        given.check()
        self._given = given
        self._task.loss_fn, self._task.optimizer = given.loss_fn, given.optimizer
        with self._engine.guard():
            self._engine.renew()

    @called("model.train")
    def train(
        self,
        epochs: int,
        loader: Iterable[Any],
        callbacks: Sequence[Callback] = (),
        *,
        steps: int | None = None,
        validation: Iterable[Any] | None = None,
        resume: bool = True,
    ) -> None:
        """Train for some epochs.

        After ``load``, of a state that was saved inside ``train``, this goes on where that stood:
        in the same epoch, after the same step, with the same generators, as if nothing had been in
        between. ``epochs`` is the whole number of them, as in the run that was saved.

        Args:
            epochs: How many times to go through the loader.
            loader: Yields batches: ``(inputs, target)``, a tuple of inputs and a target, or a
                mapping passed as keyword arguments, of which ``loss_fn`` gets the entry named
                ``target`` or ``labels``. Every worker passes its own, equal one; only
                workers that consume an input draw from it. Its sampler, batch sampler and data set
                are told each epoch by ``set_epoch``, counted from 0 through all calls.
            callbacks: Called on every worker.
            steps: After how many steps an epoch ends, for loaders without an end; None: their end.
            validation: A loader for ``eval`` after each epoch; callbacks find what it gave in
                ``context.metrics``.
            resume: Whether to go on where a loaded state stood; if not, epochs count from 1.

        Raises:
            ConfigurationError: The Model has no optimizer, or a batch does not fit; or the loaded
                state cannot go on with these arguments; or the loader gives each process a share.
            CaptureError: The network cannot be captured.
            PlacementError: A placement cannot be honoured.
            PlanMismatchError: Workers made different plans.
            LoaderMismatchError: Workers' loaders disagree.
            JobFailedError: The job failed elsewhere; carries the root cause.
        """
        need_optimizer(self._task, "train")
        has_loss_fn = self._task.loss_fn is not None
        check_run(epochs, loader, callbacks, steps, resume, has_loss_fn=has_loss_fn)
        callbacks = sorted(callbacks, key=lambda callback: callback.runs_last)
        if validation is not None:
            need_metrics(self._metrics)
            check_loader("validation", validation, has_loss_fn=has_loss_fn)
            callbacks.insert(0, Validation(validation))
        check_watched(callbacks, () if validation is None else self._metrics)
        self._calls.train(epochs, loader, callbacks, resume, steps, self)

    @called("model.eval")
    def eval(self, loader: Iterable[Any]) -> dict[str, float]:
        """Compute the metrics over a loader, in eval mode and without gradients.

        Gives every metric by name, the true value on every worker.

        Raises:
            ConfigurationError: The Model has no metrics, a batch does not fit, or there is none.
        """
        need_metrics(self._metrics)
        check_loader("eval", loader, has_loss_fn=self._task.loss_fn is not None)
        found = self._calls.eval(loader)
        stop_if_asked(self._engine, self._script)
        return found

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network in eval mode, without gradients, on inputs every worker passes alike.

        Returns:
            The network's outputs in its own structure, on every worker. For a single ``DataLoader``
            or iterator, of batches as for ``eval`` or of inputs alone: the list of their outputs.
            A list is one input of the network; of a list of batches pass ``iter(batches)``.
        """
        outputs = self._calls.predict(args, kwargs)
        stop_if_asked(self._engine, self._script)
        return outputs

    @overload
    def state_dict(self) -> dict[str, Any]: ...

    @overload
    def state_dict(self, *, to: PathLike) -> None: ...

    @called("model.state_dict")
    def state_dict(self, *, to: PathLike | None = None) -> dict[str, Any] | None:
        """The network's full state with its original keys; in a cluster gathered on every worker.

        Collective. Holds copies in a cluster, references in one process.

        Args:
            to: Stream it into this safetensors file instead, on worker 0's disk; nobody then holds
                more of it than what it owns and one piece.

        Raises:
            CheckpointError: The file cannot be written; the same on every worker.
        """
        return self._stored.state_dict(to)

    @called("model.load_state_dict")
    def load_state_dict(
        self,
        state: Mapping[str, Any] | PathLike,
        strict: bool | None = None,
        assign: bool = False,
    ) -> Any:
        """Load a full state of the network, however it was placed when it was saved.

        Args:
            state: A state dictionary; or a safetensors file, of which each worker reads what it
                owns. Workers that do not see the file are sent what they own.
            strict: Whether the keys must be the network's own; None: as its ``load_state_dict``
                has it, which is True.
            assign: Must be False: values are copied into the parameters that the optimizer has.

        The network's own ``load_state_dict`` runs on every worker, hooks included.

        Returns:
            What that returns: ``missing_keys`` and ``unexpected_keys``. None where code of a
            deferred network's own loads a file: that is when the network is made.

        Raises:
            StateError: It does not fit, or the network's code refuses it; the same on all workers,
                which may catch it (for a dictionary in one process: what PyTorch raises).
            CheckpointError: The file is not there, or damaged.
            ConfigurationError: ``assign`` is true.
        """
        is_flag = strict is None or isinstance(strict, bool)
        need("load_state_dict", "strict", strict, is_flag, "True or False")
        need("load_state_dict", "assign", assign, isinstance(assign, bool), "False")
        if assign:
            raise ConfigurationError(_ASSIGNED)
        return self._stored.load_state_dict(state, {} if strict is None else {"strict": strict})

    @called("model.optimizer_state_dict")
    def optimizer_state_dict(self, *, to: PathLike | None = None) -> Any:
        """The optimizer's full state in PyTorch's form; in a cluster gathered on every worker.

        Args:
            to: Stream it, of all optimizers, into this safetensors file instead.

        Returns:
            The state; a list of states if the Model was given a list of optimizers.
        """
        need_optimizer(self._task, "optimizer_state_dict")
        return self._stored.optimizer_state_dict(to)

    @called("model.load_optimizer_state_dict")
    def load_optimizer_state_dict(self, state: Any) -> None:
        """Load a full state of the optimizer, or a list of them, as ``optimizer_state_dict`` gives.

        Args:
            state: The state, the list of them, or the file that they were streamed to.

        Raises:
            StateError: The states are more or fewer than the optimizers.
        """
        need_optimizer(self._task, "load_optimizer_state_dict")
        self._stored.load_optimizer_state_dict(state)

    @called("model.save")
    def save(
        self, path: PathLike, *, gather: bool = False, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Save the whole training state into a folder, so that a run can go on from it.

        Collective. Network, optimizers, scaler, generators, the position in the epoch and in the
        loader, and the callbacks' states; inside a callback as well as between calls. Each worker
        writes its own part. A save in the same folder is replaced once the new one is complete.

        Args:
            path: The folder.
            gather: Let worker 0 write everything, in one file of weights and one of the rest: for
                workers that do not share a disk.
            extra: What else to save, by name: objects with ``state_dict`` (schedulers, an average
                of the weights), or plain values.

        Raises:
            CheckpointError: It could not be saved; the same on every worker, and a save that was
                there before still is.
        """
        self._stored.save(path, gather, {} if extra is None else extra)

    @called("model.load")
    def load(self, path: PathLike, *, extra: Mapping[str, Any] | None = None) -> Loaded:
        """Load a whole training state, from any number of workers and any placement.

        Collective. The next ``train`` goes on where the state was saved. Workers that do not see
        the files are sent what they need.

        Args:
            path: The folder.
            extra: Objects with ``load_state_dict``, by the names they were saved under.

        Returns:
            How far training had come, and what ``extra`` was saved.

        Raises:
            CheckpointError: There is no complete save there, or it is damaged.
            StateError: It does not fit; lists all that does not. Nothing was loaded.
        """
        return self._stored.load(path, {} if extra is None else extra)

    @property
    def position(self) -> Position:
        """How far training has come, what was before a loaded state included."""
        return self._states.position
