"""``Model``: a network with its loss, optimizer and metrics, trained wherever it is placed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn

from graphsplit.capture.graph import CapturedGraph, Mode
from graphsplit.errors import (
    CheckpointError,
    ConfigurationError,
    GraphsplitError,
    MembershipChangedError,
    StateError,
    StoppedInOrder,
)
from graphsplit.partition.explain import Detail, explain_plan
from graphsplit.partition.plan import PartitionPlan
from graphsplit.placement.resolve import UnplacedRule, asked_placements
from graphsplit.placement.written import WrittenPlacement, write_placement
from graphsplit.program.lower import Policy, StepPart
from graphsplit.runtime import job as jobs
from graphsplit.runtime.clip import Clip
from graphsplit.runtime.compiled import compiler_of
from graphsplit.runtime.script import Call, Script
from graphsplit.settings import FAIL_FAST
from graphsplit.train.arguments import check_arguments, check_run
from graphsplit.train.batch import Signature
from graphsplit.train.callbacks import Callback, RunContext
from graphsplit.train.checkpoint.position import Position
from graphsplit.train.checkpoint.states import Loaded, PathLike, States
from graphsplit.train.cluster_engine import ClusterEngine
from graphsplit.train.engine import EagerEngine, Engine
from graphsplit.train.epochs import Epochs
from graphsplit.train.metrics import Metric
from graphsplit.train.microbatches import Divider, Division, LossWeight, Split
from graphsplit.train.optimizer_size import copies_kept
from graphsplit.train.passes import capture_graph, make_plan, placement_rules
from graphsplit.train.profile import Profiling
from graphsplit.train.recompute import recomputed_paths
from graphsplit.train.task import Task


class Model:
    """A network with its loss, optimizer and metrics.

    In a cluster every worker builds the same Model and calls the same methods in the same order;
    each runs its own part. In one process the network runs eagerly.

    Args:
        net: The network. Its train and eval mode is set by the methods below.
        loss_fn: ``loss_fn(outputs, target)``, a scalar. None: the network returns the scalar loss,
            or an object with ``.loss``.
        optimizer: Any optimizer of ``torch.optim`` over the network's parameters that needs no
            closure; or several, which are stepped one after the other.
        metrics: Metrics of ``eval``, by name.
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
        capture: ``"auto"``: ``torch.export``.
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

    Raises:
        ConfigurationError: An argument is not as above, or ``MS_ROLE`` is set and ``gs.init()``
            was not called.
    """

    def __init__(
        self,
        net: nn.Module,
        loss_fn: Callable[..., Any] | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        metrics: Mapping[str, Metric] | None = None,
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
    ) -> None:
        check_arguments(
            net,
            loss_fn,
            optimizer,
            metrics,
            microbatches=microbatches,
            split=split,
            loss_weight=loss_weight,
            schedule=schedule,
            capture=capture,
            unplaced=unplaced,
            dynamic_dims=dynamic_dims,
            clip=clip,
            scaler=scaler,
            autocast=autocast,
            accumulate=accumulate,
            compile=compile,
            recompute=recompute,
        )
        self._metrics = dict(metrics or {})
        with_loss = any(metric.needs_loss for metric in self._metrics.values())
        self._task = Task(
            net,
            loss_fn,
            optimizer,
            unplaced,
            with_loss,
            dict(dynamic_dims or {}),
            Divider(microbatches, split, loss_weight),
            clip,
            scaler,
            set_to_none,
            autocast,
            accumulate,
            schedule,
            compiler_of(compile),
            recomputed_paths(net, recompute),
        )
        job = jobs.current()
        self._engine: Engine = (
            EagerEngine(self._task) if job is None else ClusterEngine(self._task, job)
        )
        self._states = States(self._task, self._engine)
        self._script = Script() if job is None else job.script
        self._script.add_subject(self, self._task, self._engine, self._states)

    @property
    def network(self) -> nn.Module:
        """The network."""
        return self._task.network

    def train(
        self,
        epochs: int,
        loader: Iterable[Any],
        callbacks: Sequence[Callback] = (),
        *,
        resume: bool = True,
    ) -> None:
        """Train for some epochs.

        After ``load``, of a state that was saved inside ``train``, this goes on where that stood:
        in the same epoch, after the same step, with the same generators, as if nothing had been in
        between. ``epochs`` is the whole number of them, as in the run that was saved.

        Args:
            epochs: How many times to go through the loader.
            loader: Yields batches: ``(inputs, target)``, a tuple of inputs and a target, or a
                mapping passed as keyword arguments. Every worker passes its own, equal one; only
                workers that consume an input draw from it.
            callbacks: Called on every worker.
            resume: Whether to go on where a loaded state stood; if not, epochs count from 1.

        Raises:
            ConfigurationError: The Model has no optimizer, or a batch does not fit; or the loaded
                state cannot go on with these arguments.
            CaptureError: The network cannot be captured.
            PlacementError: A placement cannot be honoured.
            PlanMismatchError: Workers made different plans.
            LoaderMismatchError: Workers' loaders disagree.
            JobFailedError: The job failed elsewhere; carries the root cause.
        """
        self._need_optimizer("train")
        check_run(epochs, loader, callbacks)
        callbacks = sorted(callbacks, key=lambda callback: callback.runs_last)
        self._script.run(
            Call("train", self._run_train, (epochs, loader, callbacks, resume), subject=self)
        )

    def _run_train(
        self, epochs: int, loader: Iterable[Any], callbacks: Sequence[Callback], resume: bool
    ) -> None:
        length = len(loader) if isinstance(loader, Sized) else None
        context = RunContext(self, jobs.get_rank(), epochs, length)
        try:
            with self._engine.guard():
                self._engine.call_on_gradients(_listener(context, callbacks))
                run = Epochs(self._states, context, loader, callbacks, resume=resume)
                with run:
                    self._train(run, context, loader, callbacks)
        except MembershipChangedError:
            for callback in callbacks:
                callback.on_rollback(context)
            raise
        except BaseException:
            for callback in callbacks:
                callback.on_failure(context)
            raise
        finally:
            self._engine.call_on_gradients(None)

    def _train(
        self,
        run: Epochs,
        context: RunContext,
        loader: Iterable[Any],
        callbacks: Sequence[Callback],
    ) -> None:
        if not run.has_begun:
            for callback in callbacks:
                callback.on_train_begin(context)
        for start in run:
            for callback in callbacks:
                callback.on_epoch_begin(context)
            run.begin(start)
            for loss in self._engine.train_epoch(loader, start):
                run.count(loss)
                context.has_updated = self._engine.progress.opens
                for callback in callbacks:
                    callback.on_step_end(context)
                self._script.step_done()
                self._stop_if_asked()
            run.end()
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
        call = Call("train_step", self._run_train_step, (batch, kwargs), subject=self)
        loss: torch.Tensor = self._script.run(call)
        self._stop_between_calls()
        return loss

    def _run_train_step(self, batch: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        with self._engine.guard():
            return self._engine.train_step(self._division(batch, kwargs))

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
        found: dict[str, float] = self._script.run(
            Call("eval", self._run_eval, (loader,), subject=self)
        )
        self._stop_between_calls()
        return found

    def _stop_if_asked(self) -> None:
        """Leave the script, together with all workers, if the job was asked to end."""
        if self._engine.stops_here:
            self._script.stop()
            raise StoppedInOrder

    def _stop_between_calls(self) -> None:
        # What a callback calls is part of a training step, which has an end of its own.
        if not self._engine.is_inside_call:
            self._stop_if_asked()

    def _run_eval(self, loader: Iterable[Any]) -> dict[str, float]:
        with self._engine.guard():
            self._states.others.begin(loader)
            found = self._engine.eval_epoch(loader, self._metrics)
            self._states.others.end(loader)
            return found

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network in eval mode, without gradients, on inputs every worker passes alike.

        Returns:
            The network's outputs in its own structure, on every worker.
        """
        call = Call("predict", self._run_predict, (args, kwargs), subject=self)
        outputs = self._script.run(call)
        self._stop_between_calls()
        return outputs

    def _run_predict(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._engine.guard():
            return self._engine.predict((args, kwargs))

    def explain(self, *batch: Any, detail: Detail = "modules", **kwargs: Any) -> str:
        """Which worker runs what, why, and the bytes that cross each cut.

        Args:
            batch: One batch, as ``train`` takes it; of several microbatches the first is explained.
                Without one, it is the plan that ran last.
            detail: ``"modules"`` for the modules in a tree, ``"operations"`` for every operation.
            kwargs: One batch, as keyword arguments.

        Raises:
            ConfigurationError: No batch was given, and nothing has run yet; or an unknown detail.
        """
        if detail not in ("modules", "operations"):
            raise ConfigurationError(f"detail={detail!r}; expected 'modules' or 'operations'")
        call = Call("explain", self._run_explain, (batch, kwargs, detail), subject=self)
        text: str = self._script.look(call)
        return text

    def _run_explain(self, batch: tuple[Any, ...], kwargs: dict[str, Any], detail: Detail) -> str:
        plan = self._plan(batch, kwargs, method="explain")
        optimizers = self._task.optimizers
        kept = copies_kept(optimizers[0]) if len(optimizers) == 1 else None
        engine = self._engine
        return explain_plan(
            plan,
            detail=detail,
            optimizer_copies=kept,
            routes=engine.routes(plan) if isinstance(engine, ClusterEngine) else None,
            step_times=engine.step_times() if isinstance(engine, ClusterEngine) else (),
        )

    def profile(self) -> Profiling:
        """Measure the training steps inside a ``with`` block.

        Collective. The steps are ordinary ones: the first two warm up, up to ten are timed. What
        they cost, and the step that follows from it by simulation, is in ``.result`` after the
        block, on every worker::

            with model.profile() as profiling:
                model.train(1, loader)
            print(profiling.result)                  # a table: predicted and measured
            profiling.result.save("profile")         # a trace, a picture

        Raises:
            ConfigurationError: In one process, where ``torch.profiler`` serves, or in a job that
                recovers from lost workers; or, at the end of the block, fewer than four steps of
                one plan were run.
        """
        if not isinstance(self._engine, ClusterEngine):
            raise ConfigurationError(
                "profile measures what several workers do and wait for, and this is one process\n"
                "  Fix: start the script with graphsplit run, or use torch.profiler."
            )
        job = jobs.current()
        if job is not None and job.recovery_policy != FAIL_FAST:
            raise ConfigurationError(
                f"profile measures every worker, and this job runs with {job.recovery_policy}: a "
                f"worker that comes back would have measured nothing\n"
                f"  Fix: start the job with GS_RECOVERY=fail_fast to profile it."
            )
        return Profiling(self._engine.profiler)

    def placement(self, *batch: Any, **kwargs: Any) -> dict[str, Any]:
        """The placement that was resolved, as rules that give the same plan again.

        Args:
            batch: One batch, as for ``explain``.
            kwargs: One batch, as keyword arguments.

        Returns:
            What ``gs.apply_placement`` takes. ``.place`` and ``gs.place`` in the code stay in force
            beside it.
        """

        def run() -> dict[str, Any]:
            return self._written(batch, kwargs, method="placement").as_mapping()

        found: dict[str, Any] = self._script.look(Call("placement", run, subject=self))
        return found

    def save_placement(self, path: str | Path, *batch: Any, **kwargs: Any) -> None:
        """Write the placement that was resolved to a file for ``gs.apply_placement``.

        Args:
            path: A YAML file, with a remark on every rule; JSON where the name ends in ``.json``.
            batch: One batch, as for ``explain``.
            kwargs: One batch, as keyword arguments.
        """

        def run() -> None:
            self._written(batch, kwargs, method="save_placement").save(path)

        self._script.look(Call("save_placement", run, subject=self))

    def _written(
        self, batch: tuple[Any, ...], kwargs: dict[str, Any], *, method: str
    ) -> WrittenPlacement:
        plan, task = self._plan(batch, kwargs, method=method), self._task
        rules = placement_rules(
            task.network,
            task.loss_fn,
            unplaced=task.unplaced,
            num_workers=plan.num_workers,
            owners={},
        )
        return write_placement(plan.placed, rules, task.network)

    def _plan(
        self, batch: tuple[Any, ...], kwargs: dict[str, Any], *, method: str
    ) -> PartitionPlan:
        if not batch and not kwargs:
            return self._latest_plan(method)
        division = self._division(batch, kwargs)
        task = self._task
        mode = (
            Mode.TRAIN if task.loss_fn is not None or task.optimizer is not None else (Mode.PREDICT)
        )
        signature = Signature.of(division.microbatches[0])
        graph = capture_graph(task, mode, signature)
        owners = self._engine.owners()
        plan, _ = make_plan(
            graph,
            network=task.network,
            loss_fn=task.loss_fn,
            unplaced=task.unplaced,
            num_workers=self._num_workers(graph),
            owners=dict(owners),
            part=StepPart(is_microbatched=bool(division.weights)),
        )
        return plan

    def _num_workers(self, graph: CapturedGraph) -> int:
        """In one process, as many workers as the placements ask for."""
        job = jobs.current()
        if job is not None:
            return job.num_workers
        task = self._task
        rules = placement_rules(
            task.network, task.loss_fn, unplaced=task.unplaced, num_workers=1, owners={}
        )
        return max((found.rank for found in asked_placements(graph, rules).values()), default=0) + 1

    def _latest_plan(self, method: str) -> PartitionPlan:
        if isinstance(self._engine, ClusterEngine):
            for mode in Mode:
                planned = self._engine.planner.latest(mode)
                if planned is not None:
                    return planned.plan
        raise ConfigurationError(
            f"nothing has been planned yet\n  Fix: pass a batch, as in model.{method}(inputs, "
            f"target), or call it after the first step."
        )

    @overload
    def state_dict(self) -> dict[str, Any]: ...

    @overload
    def state_dict(self, *, to: PathLike) -> None: ...

    def state_dict(self, *, to: PathLike | None = None) -> dict[str, Any] | None:
        """The network's full state with its original keys; in a cluster gathered on every worker.

        Collective. Holds copies in a cluster, references in one process.

        Args:
            to: Stream it into this safetensors file instead, on worker 0's disk; nobody then holds
                more of it than what it owns and one piece.

        Raises:
            CheckpointError: The file cannot be written; the same on every worker.
        """
        call = Call("state_dict", self._run_state_dict, (to,), subject=self)
        found: dict[str, Any] | None = self._script.run(call)
        return found

    def _run_state_dict(self, to: PathLike | None) -> dict[str, Any] | None:
        if to is not None:
            with self._in_step():
                self._states.save_weights(to)
            return None
        with self._engine.guard():
            return self._engine.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | PathLike) -> None:
        """Load a full state of the network, however it was placed when it was saved.

        Args:
            state: A state dictionary; or a safetensors file, of which each worker reads what it
                owns. Workers that do not see the file are sent what they own.

        Raises:
            StateError: Keys or shapes do not fit (for a dictionary in one process: PyTorch's
                ``RuntimeError``).
            CheckpointError: The file is not there, or damaged.
        """
        self._script.run(Call("load_state_dict", self._run_load, (state,), subject=self))

    def _run_load(self, state: Mapping[str, Any] | PathLike) -> None:
        if isinstance(state, (str, os.PathLike)):
            with self._in_step():
                self._states.load_weights(state)
            return
        with self._engine.guard():
            self._engine.load_state_dict(state)

    def optimizer_state_dict(self, *, to: PathLike | None = None) -> Any:
        """The optimizer's full state in PyTorch's form; in a cluster gathered on every worker.

        Args:
            to: Stream it, of all optimizers, into this safetensors file instead.

        Returns:
            The state; a list of states if the Model was given a list of optimizers.
        """
        self._need_optimizer("optimizer_state_dict")
        call = Call("optimizer_state_dict", self._run_optimizer_state, (to,), subject=self)
        return self._script.run(call)

    def _run_optimizer_state(self, to: PathLike | None) -> Any:
        if to is not None:
            with self._in_step():
                self._states.save_optimizers(to)
            return None
        with self._engine.guard():
            states = self._engine.optimizer_state_dicts()
        return states[0] if isinstance(self._task.optimizer, torch.optim.Optimizer) else states

    def load_optimizer_state_dict(self, state: Any) -> None:
        """Load a full state of the optimizer, or a list of them, as ``optimizer_state_dict`` gives.

        Args:
            state: The state, the list of them, or the file that they were streamed to.

        Raises:
            StateError: The states are more or fewer than the optimizers.
        """
        self._need_optimizer("load_optimizer_state_dict")
        call = Call("load_optimizer_state_dict", self._run_load_optimizer, (state,), subject=self)
        self._script.run(call)

    def _run_load_optimizer(self, state: Any) -> None:
        if isinstance(state, (str, os.PathLike)):
            with self._in_step():
                self._states.load_optimizers(state)
            return
        states = [state] if isinstance(self._task.optimizer, torch.optim.Optimizer) else list(state)
        if len(states) != len(self._task.optimizers):
            raise StateError(
                f"{len(states)} states were given; expected one for each of the "
                f"{len(self._task.optimizers)} optimizers"
            )
        with self._engine.guard():
            self._engine.load_optimizer_state_dicts(states)

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
        self._script.run(Call("save", self._run_save, (path, gather, extra or {}), subject=self))

    def _run_save(self, path: PathLike, gather: bool, extra: Mapping[str, Any]) -> None:
        with self._in_step():
            self._states.save(path, gather=gather, extra=extra)

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
        call = Call("load", self._run_load_folder, (path, extra or {}), subject=self)
        loaded: Loaded = self._script.run(call)
        return loaded

    def _run_load_folder(self, path: PathLike, extra: Mapping[str, Any]) -> Loaded:
        with self._in_step():
            return self._states.load(path, extra=extra)

    @property
    def position(self) -> Position:
        """How far training has come, what was before a loaded state included."""
        return self._states.position

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Let a script catch what all workers raise alike; anything else ends the job."""
        agreed: GraphsplitError | None = None
        with self._engine.guard():
            try:
                yield
            except (CheckpointError, StateError) as error:
                agreed = error
        if agreed is not None:
            raise agreed

    @property
    def last_gradient_norm(self) -> torch.Tensor | None:
        """The norm of all gradients before the last clipping, on every worker.

        None before the first step, and without ``clip=gs.clip.GlobalNorm(...)``.
        """

        def run() -> torch.Tensor | None:
            return self._engine.last_gradient_norm

        norm: torch.Tensor | None = self._script.look(Call("last_gradient_norm", run, subject=self))
        return norm

    def _division(self, batch: tuple[Any, ...], kwargs: dict[str, Any]) -> Division:
        """A batch, divided into microbatches as training does."""
        has_loss_fn, divider = self._task.loss_fn is not None, self._task.divider
        if batch and kwargs:
            if has_loss_fn:
                raise ConfigurationError(
                    "a batch is given both by position and by keyword, and the Model has a loss_fn"
                )
            return divider.divide_arguments((batch, kwargs))
        whole = kwargs or (batch[0] if len(batch) == 1 else batch)
        return divider.divide(whole, has_loss_fn=has_loss_fn)

    def _need_optimizer(self, method: str) -> None:
        if not self._task.optimizers:
            raise ConfigurationError(
                f"{method} needs an optimizer\n  Fix: Model(..., optimizer=torch.optim.SGD("
                f"net.parameters(), lr=0.01))."
            )


def _listener(context: RunContext, callbacks: Sequence[Callback]) -> Callable[[], None] | None:
    """What shows gradients to callbacks; None if none of them looks."""
    looking = [c for c in callbacks if type(c).on_gradients is not Callback.on_gradients]
    if not looking:
        return None

    def show() -> None:
        context.step += 1  # the one under way
        try:
            for callback in looking:
                callback.on_gradients(context)
        finally:
            context.step -= 1

    return show
