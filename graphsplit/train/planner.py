"""From a network and a batch's signature to an agreed plan and a runner, once per signature."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from graphsplit.capture.graph import LOSS_PATH, CapturedGraph, Mode, NodeKind
from graphsplit.partition.dump import describe_plan
from graphsplit.partition.plan import PartitionPlan
from graphsplit.placement.annotations import Annotation, mark_planned
from graphsplit.program.lower import (
    WHOLE_STEP,
    StepPart,
    WorkerProgram,
    describe_programs,
)
from graphsplit.runtime.deferred_init import is_deferred, materialize
from graphsplit.runtime.job import Job
from graphsplit.runtime.ownership import give_up, is_elsewhere, return_free_memory
from graphsplit.runtime.runner import ProgramRunner, RunnerParts, first_received
from graphsplit.runtime.update import Updater
from graphsplit.schedule.costs import Costs
from graphsplit.schedule.depths import channel_depths
from graphsplit.schedule.policies import takes_costs
from graphsplit.train.batch import Signature
from graphsplit.train.overlap import check_overlapping, overlapping
from graphsplit.train.passes import (
    OneByOneError,
    all_owners,
    capture_graph,
    consumers_of,
    lower_plan,
    make_plan,
    numbers_for,
)
from graphsplit.train.task import (
    Task,
    check_trained,
    describe_optimizers,
    module_annotations,
    named_state,
    stateful_modules,
)
from graphsplit.train.watched import WatchedAttributes
from graphsplit.train.written_inputs import written_inputs

_MAX_PLANS = 64
_MAX_HELD = 4096


@dataclass(frozen=True)
class Planned:
    """An agreed plan, ready to run on this worker.

    Attributes:
        plan: The plan, equal on all workers.
        programs: All workers' programs.
        runner: Runs this worker's program.
        consumers: Workers that read the loader's batches, the earliest in the pipeline first.
        woken_by_values: Workers that can do nothing in a step before a value has come.
        numbers: Numbers made of the batch's sizes, where the plan holds for several.
        wants_costs: Whether it would be lowered otherwise if costs were measured.
        part: Which part of a step it runs.
        written_inputs: Flattened inputs that it writes to, each with the workers that have the
            outcome.
    """

    plan: PartitionPlan
    programs: tuple[WorkerProgram, ...]
    runner: ProgramRunner
    consumers: tuple[int, ...]
    woken_by_values: frozenset[int]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    wants_costs: bool = False
    part: StepPart = WHOLE_STEP
    written_inputs: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @cached_property
    def no_inputs(self) -> tuple[None, ...]:
        """The graph's inputs where they are not here."""
        nodes = self.plan.placed.graph.nodes
        return (None,) * sum(node.kind is NodeKind.INPUT for node in nodes)


class Planner:
    """Makes plans, and keeps the latest ones. All workers ask for the same ones in one order."""

    def __init__(self, task: Task, job: Job) -> None:
        self._task = task
        self._job = job
        self._plans: OrderedDict[tuple[Any, ...], Planned] = OrderedDict()
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._structures: dict[tuple[Any, ...], str] = {}
        # Signatures for which a plan made for other sizes holds.
        self._held: OrderedDict[tuple[Any, ...], tuple[tuple[Any, ...], Planned]] = OrderedDict()
        self.parameters = tuple(task.network.parameters())
        self.updater = Updater(task.update_rules, self.parameters)
        check_trained(task)
        self._overlapping = overlapping(self._tensors())
        self.owners: dict[str, int] = {}
        self.expected_owners: dict[str, int] = {}
        self.on_settled: Callable[[], None] = _nothing
        self._max_plans = _MAX_PLANS
        self.attributes = WatchedAttributes(task.network, task.loss_fn)
        self._one_by_one: set[tuple[Any, ...]] = set()
        self._due: dict[tuple[Any, ...], Costs] = {}  # plans to lower again, with what they cost
        self._graphs: dict[tuple[Any, ...], CapturedGraph] | None = None

    def keep_graphs(self) -> None:
        """Keep captured graphs: a job that recovers makes its plans anew."""
        self._graphs = {} if self._graphs is None else self._graphs

    def start_over(self) -> None:
        """Forget all plans; owners stay. All workers do so at the same point."""
        self._plans.clear()
        self._numbers.clear()
        self._structures.clear()
        self._held.clear()
        self._due.clear()
        # Somebody may be new, and know nothing of what was seen before.
        self._one_by_one.clear()
        if self.attributes.start_over() and self._graphs is not None:
            self._graphs.clear()

    def adopt(self, owners: Mapping[str, int]) -> None:
        """Take the owners that other workers have fixed, as if a plan had told them."""
        self.owners.update(owners)
        self._free_others()

    def known_owners(self) -> dict[str, int]:
        """The owners of all tensors that have one: a Model of the same modules may have fixed it.

        Of the whole network if this Model has a plan, or another worker has had one.
        """
        if self.owners:
            return {**self._job.owners.known(self._tensors()), **self.owners}
        return {**self.expected_owners, **self._job.owners.known(self._tensors())}

    def keep_at_least(self, num_plans: int) -> None:
        """Keep more plans than usual: all that one step needs, and as many again."""
        self._max_plans = max(self._max_plans, num_plans)

    def plan_for(
        self, mode: Mode, signature: Signature, part: StepPart = WHOLE_STEP, *, note: str = ""
    ) -> Planned:
        """The plan for a mode and a signature; made now if it is new.

        Collective where it is new. The 64 plans used last are kept.

        Args:
            mode: Train, eval or predict.
            signature: Of the batch, or of each microbatch.
            part: Which part of a step the plan is for.
            note: What workers must agree on besides.

        Raises:
            CaptureError: The network cannot be captured.
            PlacementError: A placement cannot be honoured.
            PlanMismatchError: Workers made different plans.
        """
        key = (mode, signature.digest, self._look(), part)
        if self._due:
            self._lower_again(note)
        planned = self._plans.get(key)
        if planned is None and self._task.dynamic_dims:
            planned = self._holding(key, signature)
        if planned is None:
            planned = self._make(key, signature, note)
            key = (*key[:2], self._look(), part)
            self._numbers[key] = planned.runner.plan_number
            self._structures[key] = signature.structure()
            self._plans[key] = planned
            if len(self._plans) > self._max_plans:
                oldest, _ = self._plans.popitem(last=False)
                self._job.transport.close_plan(self._numbers.pop(oldest))
        elif len(self._plans) > 1 and key in self._plans:
            self._plans.move_to_end(key)
        if planned.plan.placed.graph.changes:
            self.attributes.leave(planned.plan.placed.graph)
        return planned

    def runs_one_by_one(self, mode: Mode, signature: Signature) -> bool:
        """Whether the next microbatch has another graph than those after it.

        Known once ``plan_for`` was asked for a plan of several, and refused.
        """
        return (mode, signature.digest, self._look()) in self._one_by_one

    def _look(self) -> tuple[tuple[bool, ...], tuple[str, ...]]:
        """What a network's graphs depend on besides their inputs."""
        return self.requires_grad(), self.attributes.values()

    def _watch(self, graph: CapturedGraph) -> None:
        """Tell plans apart by attributes that were not known to change when they were made."""
        new = tuple(self.attributes.watch(graph).values())
        if not new:
            return

        def longer(key: tuple[Any, ...]) -> tuple[Any, ...]:
            return (*key[:2], (key[2][0], key[2][1] + new), *key[3:])

        self._plans = OrderedDict((longer(key), plan) for key, plan in self._plans.items())
        self._numbers = {longer(key): number for key, number in self._numbers.items()}
        self._structures = {longer(key): text for key, text in self._structures.items()}
        self._due = {longer(key): costs for key, costs in self._due.items()}
        if self._graphs is not None:
            self._graphs = {longer(key): kept for key, kept in self._graphs.items()}
        self._one_by_one = {longer(key) for key in self._one_by_one}
        self._held.clear()

    def _holding(self, key: tuple[Any, ...], signature: Signature) -> Planned | None:
        """An earlier plan for other sizes that holds for these too, with the numbers they give."""
        found = self._held.get(key)
        if found is None or found[0] not in self._plans:
            found = self._find_holding(key, signature)
            if found is None:
                return None
            self._held[key] = found
            if len(self._held) > _MAX_HELD:
                self._held.popitem(last=False)
        base, planned = found
        self._plans.move_to_end(base)
        return planned

    def _find_holding(
        self, key: tuple[Any, ...], signature: Signature
    ) -> tuple[tuple[Any, ...], Planned] | None:
        structure = signature.structure()
        for base, planned in self._plans.items():
            if (base[0], *base[2:]) == (key[0], *key[2:]) and self._structures[base] == structure:
                numbers = numbers_for(planned.plan, signature)
                if numbers is not None:
                    return base, replace(planned, numbers=numbers)
        return None

    def latest(self, mode: Mode) -> Planned | None:
        """The plan of a mode that was used last, if there is any."""
        for key in reversed(self._plans):
            if key[0] is mode:
                return self._plans[key]
        return None

    def requires_grad(self) -> tuple[bool, ...]:
        """Of every parameter of the network, whether it is trained."""
        with torch._C.DisableTorchFunctionSubclass():  # stand-ins would answer slowly
            return tuple([p.requires_grad for p in self.parameters])

    def _make(self, key: tuple[Any, ...], signature: Signature, note: str) -> Planned:
        mode, part = key[0], key[-1]
        number = self._job.next_plan_number()
        try:
            plan, programs = self._pure_passes(mode, signature, part)
        except OneByOneError as error:
            self._watch(error.graph)
            self._one_by_one.add((mode, signature.digest, self._look()))
            raise
        self._watch(plan.placed.graph)
        text = "\n".join(
            [
                note,
                describe_plan(plan),
                describe_programs(programs),
                describe_optimizers(self._task),
                f"signature {signature.text}",
            ]
        )
        self._job.member.agree(f"plan {number} ({mode.value})", text)
        made = self._open(number, plan, programs, numbers_for(plan, signature) or {})
        is_measured = takes_costs(self._task.schedule) and part.num_microbatches > 1
        return replace(made, wants_costs=is_measured and mode is Mode.TRAIN, part=part)

    @property
    def lowers_again(self) -> bool:
        """Whether the next ``plan_for`` lowers a plan again: its channels will be new ones."""
        return bool(self._due)

    def use_costs(self, planned: Planned, costs: Costs) -> None:
        """Lower a plan again before it runs next, with what its steps were found to cost.

        All workers call it with equal costs, after the same step.
        """
        for key, number in self._numbers.items():
            if number == planned.runner.plan_number:
                self._due[key] = costs

    def _lower_again(self, note: str) -> None:
        """Collective. The values stay the same: only the order of the computations changes."""
        due, self._due = self._due, {}
        for key, costs in due.items():
            old = self._plans.get(key)
            if old is None:  # not among the plans used last any more
                continue
            programs = lower_plan(old.plan, key[-1], self._task.schedule, costs)
            text = "\n".join([note, *(describe_programs((program,)) for program in programs)])
            number = self._job.next_plan_number()
            self._job.member.agree(f"plan {number}, with measured costs", text)
            if programs == old.programs:
                self._plans[key] = replace(old, wants_costs=False)
                self._held.clear()
                continue
            made = self._open(number, old.plan, programs, old.numbers)
            self._plans[key] = replace(made, part=old.part)
            self._job.transport.close_plan(self._numbers[key])
            self._numbers[key] = number
            self._held.clear()

    def _open(
        self,
        number: int,
        plan: PartitionPlan,
        programs: tuple[WorkerProgram, ...],
        numbers: Mapping[str, Any],
    ) -> Planned:
        """Make an agreed plan ready to run."""
        mark_planned(self._task.network)
        self._settle_ownership(plan)
        runner = ProgramRunner(
            RunnerParts(
                plan=plan,
                plan_number=number,
                program=programs[self._job.rank],
                depths=channel_depths(programs),
                state=self._state_of(plan),
                transport=self._job.transport,
                updater=self.updater,
                position=self._job.member.position,
                compiler=self._task.compiler,
            )
        )
        waiting = frozenset(p.worker for p in programs if first_received(p) is not None)
        return Planned(
            plan,
            programs,
            runner,
            consumers_of(plan),
            waiting,
            numbers,
            written_inputs=written_inputs(plan),
        )

    def _pure_passes(
        self, mode: Mode, signature: Signature, part: StepPart
    ) -> tuple[PartitionPlan, tuple[WorkerProgram, ...]]:
        """What every worker computes alike; a simulation of many workers does it once."""
        return make_plan(
            self.graph_of(mode, signature),
            network=self._task.network,
            loss_fn=self._task.loss_fn,
            unplaced=self._task.unplaced,
            num_workers=self._job.num_workers,
            owners=self.known_owners(),
            part=part,
            schedule=self._task.schedule,
            update=self._task.update_rules,
            is_compiled=self._task.compiler is not None,
            recompute=self._task.recompute,
        )

    def graph_of(self, mode: Mode, signature: Signature) -> CapturedGraph:
        """The graph of a mode, captured now unless it was kept."""
        key = (mode, signature.text, self._look())
        graph = None if self._graphs is None else self._graphs.get(key)
        if graph is None:
            graph = capture_graph(self._task, mode, signature)
            if self._graphs is not None:
                self._graphs[key] = graph
                if len(self._graphs) > self._max_plans:
                    del self._graphs[next(iter(self._graphs))]
        return graph

    def _tensors(self) -> dict[str, torch.Tensor]:
        return named_state(self._task.network, self._task.loss_fn)

    def _settle_ownership(self, plan: PartitionPlan) -> None:
        """Fix the owner of every parameter and buffer seen first; free what others own."""
        tensors = self._tensors()
        known = self.known_owners()
        owners = all_owners(plan.placed, known, tensors, self._modules())
        check_overlapping(self._overlapping, owners)
        self.owners.update(owners)
        nodes, workers = plan.placed.graph.nodes, plan.placed.workers
        for position in plan.placed.graph.state_names:
            assert self.owners[nodes[position].target] == workers[position]
        self._free_others()

    def _free_others(self) -> None:
        """Give what is owned here its memory, and free what others own."""
        tensors = self._tensors()
        self._job.owners.fix(tensors, self.owners)
        self.updater.settle([self.owners[n] for n, _ in self._task.network.named_parameters()])
        strides = {name: tensor.stride() for name, tensor in tensors.items()}
        for module in stateful_modules(self._task):
            if is_deferred(module):
                materialize(module, self._owned_names(module))
        for name, tensor in tensors.items():
            if self.owners[name] != self._job.rank and not is_elsewhere(tensor):
                give_up(tensor, name=name, owner=self.owners[name], strides=strides[name])
        self.on_settled()
        return_free_memory()

    def _owned_names(self, module: nn.Module) -> list[str]:
        prefix = "" if module is self._task.network else f"{LOSS_PATH}."
        return [
            name.removeprefix(prefix)
            for name, owner in self.owners.items()
            if owner == self._job.rank
            and name.startswith(prefix)
            and name.startswith(LOSS_PATH) == bool(prefix)
        ]

    def _modules(self) -> dict[str, Annotation]:
        return module_annotations(self._task.network, self._task.loss_fn)

    def _state_of(self, plan: PartitionPlan) -> dict[int, torch.Tensor]:
        tensors = self._tensors()
        return {
            p: tensors[plan.placed.graph.nodes[p].target] for p in plan.owned_state(self._job.rank)
        }


def _nothing() -> None:
    """Nobody waits for owners."""
