"""One worker's share of a Model's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from graphsplit.capture.graph import Mode, NodeKind
from graphsplit.errors import LoaderMismatchError
from graphsplit.runtime.job import Job
from graphsplit.tensor_meta import TensorMeta
from graphsplit.train.batch import Arguments, Signature, fingerprint, leaves
from graphsplit.train.engine import Engine, update_metrics
from graphsplit.train.feed import Feed, Tickets, likely_first_reader
from graphsplit.train.gather import StateGatherer
from graphsplit.train.metrics import Metric
from graphsplit.train.planner import Planned, Planner, Task, unflatten_outputs


class ClusterEngine(Engine):
    """Runs this worker's programs; every method is called by all workers in the same order."""

    def __init__(self, task: Task, job: Job) -> None:
        self._task = task
        self._job = job
        self.planner = Planner(task, job)
        self._tickets = Tickets(job)
        self._step = 0
        self._has_loss_fn = task.loss_fn is not None

    def train_epoch(self, loader: Iterable[Any]) -> Iterator[torch.Tensor]:
        """Train on every batch; yields each true loss, on every worker."""
        self._task.network.train()
        for planned, arguments, meanwhile in self._feed(Mode.TRAIN, loader):
            values = self._run(planned, arguments, meanwhile)
            loss = planned.plan.placed.graph.loss_node
            assert loss is not None
            yield values[loss]

    def train_step(self, arguments: Arguments) -> torch.Tensor:
        """Train on one batch that all workers hold."""
        self._task.network.train()
        planned = self._announce(Mode.TRAIN, arguments)
        values = self._run(planned, arguments)
        loss = planned.plan.placed.graph.loss_node
        assert loss is not None
        return values[loss]

    def eval_epoch(self, loader: Iterable[Any], metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Evaluate; metrics are computed where the outputs are, their values known everywhere."""
        self._task.network.eval()
        for metric in metrics.values():
            metric.reset()
        home = 0
        for planned, arguments, meanwhile in self._feed(Mode.EVAL, loader):
            home = planned.plan.home
            values = self._run(planned, arguments, meanwhile)
            if self._job.rank == home:
                assert arguments is not None
                self._update_metrics(planned, arguments, values, metrics)
        return self._share_metrics(metrics, home)

    def predict(self, arguments: Arguments) -> Any:
        """The network's outputs, in its own structure, on every worker."""
        self._task.network.eval()
        planned = self._announce(Mode.PREDICT, arguments)
        values = self._run(planned, arguments)
        return unflatten_outputs(planned.plan.placed.graph, values, leaves(arguments))

    def state_dict(self) -> dict[str, Any]:
        """Collective: gather the network's full state on every worker."""
        return self._gatherer().gather_network()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what this worker owns out of a full state."""
        self._gatherer().load_network(state)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Collective: gather the optimizer's full state on every worker."""
        return self._gatherer().gather_optimizer()

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what this worker owns out of a full optimizer state."""
        self._gatherer().load_optimizer(state)

    def guard(self) -> AbstractContextManager[None]:
        """Report errors raised inside, so that all workers end."""
        return self._job.reporting()

    def _gatherer(self) -> StateGatherer:
        return StateGatherer(self._task, self._job, self.planner.owners)

    def _feed(self, mode: Mode, loader: Iterable[Any]) -> Feed:
        return Feed(
            self._job,
            self.planner,
            self._tickets,
            mode=mode,
            leader=self._leader(mode),
            loader=loader,
            has_loss_fn=self._has_loss_fn,
        )

    def _leader(self, mode: Mode) -> int:
        latest = self.planner.latest(mode) or self.planner.latest(Mode.TRAIN)
        if latest is not None:
            return latest.consumers[0]
        return likely_first_reader(self._task.network, self._task.unplaced, self._job.num_workers)

    def _announce(self, mode: Mode, arguments: Arguments) -> Planned:
        """Check that all workers were given the same batch."""
        signature = Signature.of(arguments)
        planned = self.planner.plan_for(mode, signature)
        leader = planned.consumers[0]
        if self._job.rank == leader:
            checksum = fingerprint(arguments)
            self._tickets.send(arguments, signature=signature, generator=None, checksum=checksum)
            return planned
        ticket = self._tickets.receive(leader)
        if (ticket.signature_digest, ticket.fingerprint) != (
            signature.digest,
            fingerprint(arguments),
        ):
            raise LoaderMismatchError(
                f"workers {leader} and {self._job.rank} were given different batches at "
                f"{mode.value} step {self._step}\n"
                f"  Fix: pass the same tensors on every worker."
            )
        return planned

    def _run(
        self,
        planned: Planned,
        arguments: Arguments | None,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[int, torch.Tensor]:
        step, self._step = self._step, self._step + 1
        inputs = self._inputs(planned, arguments)
        return planned.runner.run(step, [inputs], meanwhile=meanwhile).values[0]

    def _inputs(self, planned: Planned, arguments: Arguments | None) -> list[Any]:
        if arguments is not None:
            return leaves(arguments)
        nodes = planned.plan.placed.graph.nodes
        return [None] * sum(node.kind is NodeKind.INPUT for node in nodes)

    def _update_metrics(
        self,
        planned: Planned,
        arguments: Arguments,
        values: dict[int, torch.Tensor],
        metrics: Mapping[str, Metric],
    ) -> None:
        found = unflatten_outputs(planned.plan.placed.graph, values, leaves(arguments))
        loss, outputs = found if self._task.with_loss else (None, found)
        with torch.no_grad():
            update_metrics(metrics, arguments, outputs, loss, has_loss_fn=self._has_loss_fn)

    def _share_metrics(self, metrics: Mapping[str, Metric], home: int) -> dict[str, float]:
        computed = None
        if self._job.rank == home:
            found = [float(metric.compute()) for metric in metrics.values()]
            computed = torch.tensor(found, dtype=torch.float64)
        meta = TensorMeta(torch.float64, (len(metrics),), (1,))
        values = self._job.control.broadcast(computed, meta, source=home)
        return dict(zip(metrics, values.tolist(), strict=True))
