"""Explanations of a Model without running: its plan, its placement, its last gradient norm."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from graphsplit.batches.microbatches import Division
from graphsplit.batches.signature import Signature, leaves
from graphsplit.capture.graph import CapturedGraph, Mode
from graphsplit.capture.python.answers import Answers
from graphsplit.capture.state.kept_names import give_back
from graphsplit.checkpoint.disk.series import check_path
from graphsplit.errors import ConfigurationError
from graphsplit.job import joined
from graphsplit.partition.explain.plan import Detail, explain_plan
from graphsplit.partition.plan import PartitionPlan
from graphsplit.placement.resolve import asked_placements
from graphsplit.placement.written import WrittenPlacement, write_placement
from graphsplit.planning.modes import as_in
from graphsplit.planning.passes import (
    capture_graph,
    consumers_of,
    lower_plan,
    placement_rules,
    plan_ahead,
)
from graphsplit.planning.task import Task, named_state
from graphsplit.profiling.links import Links, message_lines, with_links
from graphsplit.profiling.profile import Profiling
from graphsplit.profiling.trial_run import (
    NotTriedError,
    bounding_line,
    compute_lines,
    is_tried,
    tried_costs,
)
from graphsplit.program.lower import StepPart, WorkerProgram
from graphsplit.schedule.auto import takes_costs
from graphsplit.schedule.estimates import estimated_costs
from graphsplit.schedule.simulation.simulate import simulate
from graphsplit.settings import FAIL_FAST
from graphsplit.text import called, meant, no_attribute
from graphsplit.train.arguments import ModelArguments
from graphsplit.train.cluster_engine import ClusterEngine
from graphsplit.train.engine import Engine
from graphsplit.viz.report import seconds_in_words


class Explanation(str):
    """A text that a prompt shows as it is, not as one long literal."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Explainer:
    """Explains the plan of a batch; without one, that of training used last.

    Args:
        task: What is run.
        engine: Runs it.
    """

    def __init__(self, task: Task, engine: Engine) -> None:
        self._task = task
        self._engine = engine

    def explain(
        self, batch: tuple[Any, ...], kwargs: dict[str, Any], detail: Detail, links: Links | None
    ) -> str:
        """See ``Model.explain``."""
        if detail not in ("modules", "operations", "state"):
            raise ConfigurationError(
                f"detail={detail!r}; expected 'modules', 'operations' or 'state'"
            )
        compute: list[str] = []
        messages: list[str] = []
        step_times: list[str] = []
        if links is not None and not batch and not kwargs:
            raise ConfigurationError(
                "links= is about a batch that is tried here\n  Fix: pass one, as in "
                "model.explain(inputs, target, links='links.json')."
            )
        if not batch and not kwargs:
            plan = self._latest_plan("explain")
        else:
            plan, compute, messages, step_times = self._tried(batch, kwargs, links)
        optimizers, engine = self._task.optimizers, self._engine
        routes = None
        if isinstance(engine, ClusterEngine):
            routes, profile = engine.routes(plan), engine.profiler.latest
            if profile is not None and links is None:
                compute, step_times = profile.compute(), profile.step_times()
        text = explain_plan(
            plan,
            detail=detail,
            optimizer_copies=copies_kept(optimizers[0]) if len(optimizers) == 1 else None,
            routes=routes,
            compute=compute,
            messages=messages,
            step_times=step_times,
            reading=engine.reading if isinstance(engine, ClusterEngine) else "",
        )
        return Explanation(text)

    def _tried(
        self, batch: tuple[Any, ...], kwargs: dict[str, Any], links: Links | None
    ) -> tuple[PartitionPlan, list[str], list[str], list[str]]:
        """The plan of a batch; what it computes, sends, and how long a step takes, tried here."""
        division = self._divided(batch, kwargs)
        plan, programs = self._planned(division, "explain")
        state = named_state(self._task.network, self._task.loss_fn)
        number = len(division.microbatches)
        if division.weights and not plan.is_microbatched:
            why = "its microbatches run one after the other"
            return plan, [], [], [f"not known: {why}; model.profile() measures a job"]
        known = estimated_costs(plan)
        if links is not None:
            known = with_links(known, links, plan.num_workers)
        try:
            first = leaves(division.microbatches[0])
            costs = tried_costs(plan, state, first, self._task.optimizers, known)
        except NotTriedError as why:
            return plan, [], [], [f"not known: {why}; model.profile() measures a job"]
        if takes_costs(self._task.schedule):  # as a job does once it knows what its steps cost
            programs = lower_plan(plan, _part_of(division), self._task.schedule, costs)
        own = [type(one).__name__ for one in self._task.optimizers if not is_tried(one)]
        untried = f", {own[0]} not counted" if own else ""
        predicted = simulate(plan, programs, costs, num_steps=2, leader=consumers_of(plan)[0])
        return (
            plan,
            compute_lines(plan, costs, number),
            message_lines(plan, programs, costs, predicted.step_s) if links is not None else [],
            [
                f"predicted {seconds_in_words(predicted.step_s)}; computing measured on this batch "
                f"in one process, messages {'estimated' if links is None else 'by these links'}"
                f"{untried}",
                bounding_line(predicted),
            ],
        )

    def _written(
        self, batch: tuple[Any, ...], kwargs: dict[str, Any], *, method: str
    ) -> WrittenPlacement:
        """The placement of the plan, as rules.

        Args:
            batch: Arguments by position, none or those of one batch.
            kwargs: Arguments by name, likewise.
            method: What the user called, for the error.
        """
        plan, task = self._plan(batch, kwargs, method=method), self._task
        rules = placement_rules(task, num_workers=plan.num_workers, owners={})
        return write_placement(plan.placed, rules, task.network)

    def placement(self, batch: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """See ``Model.placement``."""
        return self._written(batch, kwargs, method="placement").as_mapping()

    def save_placement(
        self, path: str | Path, batch: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """See ``Model.save_placement``."""
        check_path("save_placement: path", path)
        self._written(batch, kwargs, method="save_placement").save(path)

    def last_losses(self) -> dict[str, torch.Tensor]:
        """See ``Model.last_losses``."""
        return dict(self._engine.beside.losses)

    def last_outputs(self) -> Any:
        """See ``Model.last_outputs``."""
        return self._engine.beside.outputs

    def last_gradient_norm(self) -> torch.Tensor | None:
        """See ``Model.last_gradient_norm``."""
        return self._engine.last_gradient_norm

    def _plan(
        self, batch: tuple[Any, ...], kwargs: dict[str, Any], *, method: str
    ) -> PartitionPlan:
        if not batch and not kwargs:
            return self._latest_plan(method)
        return self._planned(self._divided(batch, kwargs), method)[0]

    def _divided(self, batch: tuple[Any, ...], kwargs: dict[str, Any]) -> Division:
        task = self._task
        return task.divider.divide_call(batch, kwargs, has_loss_fn=task.loss_fn is not None)

    def _planned(
        self, division: Division, method: str
    ) -> tuple[PartitionPlan, tuple[WorkerProgram, ...]]:
        task = self._task
        mode = (
            Mode.TRAIN if task.loss_fn is not None or task.optimizer is not None else Mode.PREDICT
        )
        signature = Signature.of(division.microbatches[0])
        try:
            with as_in(mode, task.network):
                graph = capture_graph(task, mode, signature, answers=Answers())
        finally:
            if not isinstance(self._engine, ClusterEngine):
                give_back(task.network)
        if graph.ending is not None:
            raise graph.ending.error
        if graph.asks:
            (question,) = graph.outputs
            assert question.node is not None
            raise ConfigurationError(
                f"what runs behind a value that forward asks a tensor for is known only where a "
                f"step runs\n  {graph.nodes[question.node].source}\n"
                f"  Fix: run a step of a cluster, then call model.{method} without a batch: it is "
                f"about the step that ran last."
            )
        return plan_ahead(
            graph,
            task,
            num_workers=self._num_workers(graph),
            owners=self._engine.owners(),
            part=_part_of(division),
        )

    def _num_workers(self, graph: CapturedGraph) -> int:
        """In one process, as many workers as the placements ask for."""
        job = joined.current()
        if job is not None:
            return job.num_workers
        rules = placement_rules(self._task, num_workers=1, owners={})
        asked = asked_placements(graph, rules).values()
        return max((found.highest for found in asked), default=0) + 1

    def _latest_plan(self, method: str) -> PartitionPlan:
        if isinstance(self._engine, ClusterEngine):
            for mode in Mode:
                planned = self._engine.planner.latest(mode)
                if planned is not None:
                    return planned.plan
        else:
            raise ConfigurationError(
                f"{method} without a batch shows the plan that a cluster runs; one process runs "
                f"the plain loop, without a plan\n  Fix: pass a batch, as in "
                f"model.{method}(inputs, target)."
            )
        raise ConfigurationError(
            f"nothing has been planned yet\n  Fix: pass a batch, as in model.{method}(inputs, "
            f"target), or call it after the first step."
        )


def _part_of(division: Division) -> StepPart:
    return StepPart(len(division.microbatches), is_microbatched=bool(division.weights))


# What other libraries call the methods of a Model.
_USUAL = {
    "fit": "train",
    "evaluate": "eval",
    "test": "eval",
    "validate": "eval",
    "forward": "predict",
    "train_on_batch": "train_step",
    "save_weights": "save",
    "save_checkpoint": "save",
    "load_weights": "load",
    "load_checkpoint": "load",
    "summary": "explain",
    "net": "network",
    "module": "network",
    "parameters": "network",
    "named_parameters": "network",
    "to": "network",
}

_USUAL_SETTABLE = {"criterion": "loss_fn", "optim": "optimizer"}


class Shown:
    """A ``Model`` shown: at the prompt, in a notebook, by its plan and by its last step."""

    _task: Task
    _engine: Engine
    _explainer: Explainer

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            if not (name.startswith("_") or hasattr(type(self), name) or name in vars(self)):
                _check_new(type(self), name)
            object.__setattr__(self, name, value)

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(f"{type(self).__name__!r} object", name, dir(type(self)), _USUAL)

    def __repr__(self) -> str:
        task = self._task
        num_parameters = sum(parameter.numel() for parameter in task.network.parameters())
        optimizers = ", ".join(type(one).__name__ for one in task.optimizers) or "none"
        loss = task.loss_fn
        name = "the network's own" if loss is None else getattr(loss, "__name__", None)
        return (
            f"Model(\n  network: {type(task.network).__name__}, {num_parameters:,} parameters\n"
            f"  loss: {name or type(loss).__name__}, optimizer: {optimizers}\n)"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def explain(
        self,
        *batch: Any,
        detail: Detail = "modules",
        links: Links | None = None,
        **kwargs: Any,
    ) -> str:
        """Which worker runs what, why, and the bytes that cross each cut.

        Args:
            batch: One batch, as ``train`` takes it; of several microbatches the first is explained.
                Without one, in a cluster, it is the plan of training used last, if any.
            detail: ``"modules"`` for the modules in a tree, ``"operations"`` for every operation,
                ``"state"`` for every Python value that the step depends on.
            links: The links between workers, for the seconds that each edge and a step would take:
                the file of ``graphsplit doctor -H a:2,b:3 --save-links FILE``; or by two ranks, the
                seconds that a message takes, and the bytes that follow in a second:
                ``{(0, 1): (50e-6, 125e6), (1, 0): (50e-6, 125e6)}``.
            kwargs: One batch, as keyword arguments.

        Raises:
            ConfigurationError: No batch was given, and nothing has run yet; or one of which forward
                asks tensors for values; or an unknown detail; or links that cannot be read, or are
                not those of so many workers.
        """
        return self._explainer.explain(batch, kwargs, detail, links)

    @called("model.profile")
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
        return Profiling(need_cluster(self._engine).profiler)

    def placement(self, *batch: Any, **kwargs: Any) -> dict[str, Any]:
        """The placement that was resolved, as rules that give the same plan again.

        Args:
            batch: One batch, as for ``explain``.
            kwargs: One batch, as keyword arguments.

        Returns:
            What ``gs.apply_placement`` takes. ``.place`` and ``gs.place`` in the code stay in force
            beside it.
        """
        return self._explainer.placement(batch, kwargs)

    @called("model.save_placement")
    def save_placement(self, path: str | Path, *batch: Any, **kwargs: Any) -> None:
        """Write the placement that was resolved to a file for ``gs.apply_placement``.

        Args:
            path: A YAML file, with a remark on every rule; JSON where the name ends in ``.json``.
            batch: One batch, as for ``explain``.
            kwargs: One batch, as keyword arguments.
        """
        self._explainer.save_placement(path, batch, kwargs)

    @property
    def last_losses(self) -> dict[str, torch.Tensor]:
        """The scalars beside the loss of the last training step, by name, on every worker.

        What network or ``loss_fn`` return beside the loss: entries of a mapping, attributes of an
        object, or members of a tuple, by their position. With microbatches they are added up as the
        loss is.
        """
        return self._explainer.last_losses()

    @property
    def last_outputs(self) -> Any:
        """The network's results in the last training step, on every worker.

        None without ``keep_outputs=True``. With microbatches, a list of what it returned for each.
        """
        return self._explainer.last_outputs()

    @property
    def last_gradient_norm(self) -> torch.Tensor | None:
        """The norm of all gradients before the last clipping, on every worker.

        None before the first step, and without ``clip=gs.clip.GlobalNorm(...)``.
        """
        return self._explainer.last_gradient_norm()


def _check_new(owner: type, name: str) -> None:
    """Let a script keep attributes of its own on a Model, unless another one is likely meant.

    Raises:
        AttributeError: It is like the name of one that may be set, or an argument of a new Model.
    """
    settable = [one for one in dir(owner) if getattr(getattr(owner, one), "fset", None)]
    hint = meant(name, settable, _USUAL_SETTABLE, cutoff=0.8)
    is_argument = any(one.name == name for one in fields(ModelArguments))
    if is_argument and not hint and Shown in owner.__bases__:
        hint = f"; it is an argument of a new one: gs.Model(..., {name}=...)"
    if hint:
        told = f"{owner.__name__!r} object has no attribute {name!r} that can be set{hint}"
        raise AttributeError(told, name=name, obj=None)


# How much an optimizer keeps for what it trains: an estimate, before it has kept anything.

_Settings = Mapping[str, Any]


def _adam(group: _Settings) -> int:
    return 3 if group.get("amsgrad") else 2


def _momentum(group: _Settings) -> int:
    return 1 if group.get("momentum") else 0


def _rmsprop(group: _Settings) -> int:
    return 1 + _momentum(group) + bool(group.get("centered"))


_KEPT: dict[type[torch.optim.Optimizer], Callable[[_Settings], int]] = {
    torch.optim.SGD: _momentum,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.NAdam: _adam,
    torch.optim.RAdam: _adam,
    torch.optim.Adamax: _adam,
    torch.optim.SparseAdam: _adam,
    torch.optim.Adagrad: lambda group: 1,
    torch.optim.ASGD: lambda group: 1,
    torch.optim.Muon: lambda group: 1,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adadelta: lambda group: 2,
    torch.optim.Rprop: lambda group: 2,
    torch.optim.Adafactor: lambda group: 0,  # a row and a column of each matrix
}


def copies_kept(optimizer: torch.optim.Optimizer | None) -> float | None:
    """How many numbers an optimizer keeps for each number that it trains, in its largest group.

    Returns:
        None without an optimizer, and for one that ``torch.optim`` does not have.
    """
    kept = None if optimizer is None else _KEPT.get(type(optimizer))
    if optimizer is None or kept is None:
        return None
    return float(max(kept(group) for group in optimizer.param_groups))


def need_cluster(engine: Engine) -> ClusterEngine:
    """The engine of a job that can be profiled.

    Raises:
        ConfigurationError: It is that of one process, or the job recovers from lost workers.
    """
    if not isinstance(engine, ClusterEngine):
        raise ConfigurationError(
            "profile measures what several workers do and wait for, and this is one process\n"
            "  Fix: start the script with graphsplit run, or use torch.profiler."
        )
    job = joined.current()
    if job is not None and job.recovery_policy != FAIL_FAST:
        raise ConfigurationError(
            f"profile measures every worker, and this job runs with {job.recovery_policy}: a "
            f"worker that comes back would have measured nothing\n"
            f"  Fix: start the job with GS_RECOVERY=fail_fast to profile it."
        )
    return engine
