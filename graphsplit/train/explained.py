"""Explanations of a Model without running: its plan, its placement, its last gradient norm."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
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
    placement_rules,
    plan_ahead,
)
from graphsplit.planning.task import Task, named_state
from graphsplit.profiling.links import Links, message_lines, with_links
from graphsplit.profiling.trial_run import (
    NotTriedError,
    bounding_line,
    compute_lines,
    is_tried,
    tried_costs,
)
from graphsplit.program.lower import StepPart, WorkerProgram
from graphsplit.schedule.simulation.simulate import simulate
from graphsplit.settings import FAIL_FAST
from graphsplit.text import no_attribute
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
        self,
        batch: tuple[Any, ...],
        kwargs: dict[str, Any],
        detail: Detail,
        links: Links | None = None,
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
        try:
            first = leaves(division.microbatches[0])
            costs = tried_costs(plan, state, first, self._task.optimizers)
        except NotTriedError as why:
            return plan, [], [], [f"not known: {why}; model.profile() measures a job"]
        if links is not None:
            costs = with_links(costs, links, plan.num_workers)
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
            part=StepPart(len(division.microbatches), is_microbatched=bool(division.weights)),
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


class Shown:
    """How a ``Model`` is shown at the prompt, and in a notebook."""

    _task: Task

    if not TYPE_CHECKING:

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
