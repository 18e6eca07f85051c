"""One worker's share of a Model's state: gathered for all, or loaded out of a whole."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from graphsplit.batches import records
from graphsplit.batches.signature import Arguments
from graphsplit.capture.graph import Mode
from graphsplit.checkpoint.gather import StateGatherer
from graphsplit.checkpoint.whole_values import install as install_whole_values
from graphsplit.errors import CollectiveMismatchError
from graphsplit.job.group import WorkerGroup
from graphsplit.job.job import Job
from graphsplit.optimizers.ownership import is_elsewhere
from graphsplit.partition.checks.one_state import reached_on
from graphsplit.partition.plan import PartitionPlan
from graphsplit.planning.compared.moved import settle_moved
from graphsplit.planning.planner import Planner
from graphsplit.planning.task import Task, named_state
from graphsplit.runtime.segments.part_sums import PartSums
from graphsplit.tensor_meta import TensorMeta
from graphsplit.train.engine import Engine, update_metrics
from graphsplit.train.metrics import Metric, computed
from graphsplit.transport.hub import Router


class ClusterState(Engine):
    """The state of a Model over all workers; every method is called by all in the same order."""

    def __init__(self, task: Task, job: Job, planner: Planner | None = None) -> None:
        self._task = task
        self._job = job
        install_whole_values()
        records.trust_network(task.network, task.loss_fn)
        self.planner = planner or Planner(task, job)
        self.sums = self.planner.sums or PartSums()
        self._waiting: dict[str, Callable[[], None]] = {}
        self._once_planned: Callable[[], None] | None = None
        self.planner.on_settled = self._settle
        self.on_first_settled: Callable[[], None] | None = None
        self._number = 0  # by the plan that settled it first: on all workers alike

    def group(self) -> WorkerGroup:
        """All workers of the job."""
        return self._job.control

    def owners(self) -> Mapping[str, int]:
        """The owners that are fixed: those of all tensors once this Model has a plan."""
        return self.planner.known_owners()

    def when_settled(self, what: str, action: Callable[[], None]) -> None:
        """Do it as soon as there is a plan."""
        if self.planner.owners:
            action()
        else:
            self._waiting[what] = action

    def when_planned(self, action: Callable[[], None]) -> None:
        """Do it as soon as there is a plan, and not before."""
        self._once_planned = action
        if self.planner.owners:
            self._do_once_planned()

    def _do_once_planned(self) -> None:
        action, self._once_planned = self._once_planned, None
        if action is not None:
            action()

    def settle_now(self) -> None:
        """Do what waits for a plan without one."""
        waiting, self._waiting = self._waiting, {}
        for action in waiting.values():
            action()

    def _settle(self) -> None:
        """Owners are fixed: forget the optimizer state of others, and load what waits."""
        self._number = self._number or self._job.num_plans + 1
        for optimizer in self._task.optimizers:
            for key in list(optimizer.state):
                if isinstance(key, torch.Tensor) and is_elsewhere(key):
                    del optimizer.state[key]
        self.settle_now()
        self._do_once_planned()
        first, self.on_first_settled = self.on_first_settled, None
        if first is not None:
            first()

    def state_dict(self) -> dict[str, Any]:
        """Collective: gather the network's full state on every worker."""
        return self._gatherer().gather_network()

    def load_state_dict(self, state: Mapping[str, Any], **options: Any) -> Any:
        """Load what this worker owns out of a full state."""
        return self._gatherer().load_network(state, **options)

    def optimizer_state_dicts(self) -> list[dict[str, Any]]:
        """Collective: gather the optimizers' full states on every worker."""
        gatherer = self._gatherer()
        return [gatherer.gather_optimizer(optimizer) for optimizer in self._task.optimizers]

    def load_optimizer_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load what this worker owns out of the optimizers' full states."""
        gatherer = self._gatherer()
        for optimizer, state in zip(self._task.optimizers, states, strict=True):
            gatherer.load_optimizer(optimizer, state)

    def show_training(self, words: Callable[[], str]) -> None:
        """See :class:`Engine`."""
        self._job.member.position.training_source = words

    def _update_metrics(
        self, metrics: Mapping[str, Metric], arguments: Arguments, found: Any
    ) -> None:
        with torch.no_grad(), self._job.member.position.calls.inside_metric():
            update_metrics(self._task, metrics, arguments, found)

    def _share_metrics(self, metrics: Mapping[str, Metric], home: int) -> dict[str, float]:
        numbers = None
        if self._job.rank == home:
            with self._job.member.position.calls.inside_metric():
                found = computed(metrics)
            numbers = torch.tensor(list(found.values()), dtype=torch.float64)
        self._job.member.position.calls.pass_milestone()  # what is waited for comes behind compute
        meta = TensorMeta(torch.float64, (len(metrics),), (1,))
        values = self._job.control.broadcast(numbers, meta, source=home)
        return dict(zip(metrics, values.tolist(), strict=True))

    @property
    def last_gradient_norm(self) -> torch.Tensor | None:
        """The norm of all workers' gradients at the last clipping."""
        return self.planner.updater.last_norm

    def renew(self) -> None:
        """The task has another loss, or other optimizers."""
        records.trust_network(self._task.network, self._task.loss_fn)
        self.planner.renew()

    def routes(self, plan: PartitionPlan) -> dict[tuple[int, int], tuple[str, str]]:
        """The transport between each pair of workers that a plan connects, and why."""
        transport = self._job.transport
        if not isinstance(transport, Router):
            return {}
        pairs = {(min(e.source, e.destination), max(e.source, e.destination)) for e in plan.edges}
        return {pair: transport.route(*pair) for pair in pairs}

    def check_alike(self, path: str | None = None, *, loads: bool = False) -> None:
        """Refuse that workers are at different Models, or at different saves. Collective.

        One without a plan gathers nothing, so that nobody is asked: all values are here.

        Args:
            path: Where each worker saves its part, or loads from. Hosts may have their own disks.
            loads: Whether it loads a state, and gathers or saves none.

        Raises:
            CollectiveMismatchError: They do: what they make together would be a mixture.
        """
        job, number = self._job, self._job.script.number_of(self)
        if number is None and not (self._number or path):
            return
        model = str(self._number if number is None else number)
        host = socket.gethostname()
        # Where a worker does not see what it loads, it takes what others have read.
        seen = path if not loads or os.path.exists(path or "") else ""
        here = f"{host} {seen}"
        its_model, _, there = job.control.share(f"{model} {here}").partition(" ")
        if its_model != model:
            name = type(self._task.network).__name__
            raise CollectiveMismatchError(
                f"worker 0 {'loads' if loads else 'gathers'} the state of another gs.Model than "
                f"worker {job.rank}, which has that of {name}\n"
                f"  Fix: every worker makes the calls of several Models in the same order."
            )
        if seen != "" and there not in (here, f"{host} ") and there.startswith(f"{host} "):
            its_path = there.partition(" ")[2]
            told = (
                f"worker 0 loads {its_path!r}, worker {job.rank} {path!r}: all take one state"
                if loads
                else f"worker 0 saves to {its_path!r}, worker {job.rank} to {path!r}: neither "
                f"would be complete"
            )
            raise CollectiveMismatchError(
                f"{told}\n"
                f"  Fix: every worker passes the same path; one with a time or a rank in it is not."
            )

    def reached_here(self) -> Collection[int]:
        """See :class:`StateHolder`."""
        plans = (one.plan for mode in Mode if (one := self.planner.latest(mode)) is not None)
        return {key for plan in plans for key in reached_on(plan, self._job.rank)}

    def note_put(self, names: Sequence[str]) -> None:
        """See :class:`StateHolder`."""
        self.planner.python_values.note_put(names)

    def _gatherer(self) -> StateGatherer:
        self.settle_now()
        tensors = named_state(self._task.network, self._task.loss_fn)
        settle_moved(tensors, self.owners(), self._job)
        return StateGatherer(self._task, self._job, self.owners())
