"""From a network and a batch's signature to an agreed plan and a runner, once per signature."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from graphsplit.capture.export import CaptureRequest, capture
from graphsplit.capture.graph import LOSS_PATH, CapturedGraph, Mode, NodeKind
from graphsplit.errors import ConfigurationError
from graphsplit.partition.dump import describe_plan
from graphsplit.partition.edges import partition
from graphsplit.partition.in_place import keep_memory_together
from graphsplit.partition.plan import PartitionPlan
from graphsplit.partition.recomputation import with_recomputation
from graphsplit.partition.redrawn import refuse_redrawn
from graphsplit.partition.splitting import with_splits
from graphsplit.partition.tally import with_tally
from graphsplit.partition.verify import verify
from graphsplit.placement.annotations import Annotation, annotations_of, mark_planned
from graphsplit.placement.resolve import PlacedGraph, PlacementRules, UnplacedRule, resolve
from graphsplit.placement.rules import kept_rules
from graphsplit.program.lower import (
    WHOLE_STEP,
    Policy,
    StepPart,
    WorkerProgram,
    describe_programs,
    lower,
)
from graphsplit.runtime.clip import Clip
from graphsplit.runtime.compiled import Compiler
from graphsplit.runtime.deferred_init import is_deferred, materialize, stand_ins
from graphsplit.runtime.job import Job
from graphsplit.runtime.ownership import give_up, is_elsewhere, plain_classes, return_free_memory
from graphsplit.runtime.runner import ProgramRunner, RunnerParts, first_received
from graphsplit.runtime.update import Updater, UpdateRules
from graphsplit.schedule.costs import Costs
from graphsplit.schedule.depths import channel_depths
from graphsplit.schedule.orders import checked
from graphsplit.schedule.policies import policy_of, takes_costs
from graphsplit.schedule.verify import verify_programs
from graphsplit.train import batch as batches
from graphsplit.train.batch import Signature
from graphsplit.train.microbatches import Divider
from graphsplit.train.watched import WatchedAttributes

_MAX_PLANS = 64
_MAX_HELD = 4096


@dataclass(frozen=True)
class Task:
    """What a Model wants to run, apart from the batch.

    Attributes:
        network: The user's network.
        loss_fn: The loss, or None.
        optimizer: The optimizer, several that are stepped one after the other, or None.
        unplaced: The rule for operations that nobody placed.
        with_loss: Whether the eval graph computes the loss.
        dynamic_dims: Dimensions of the batch that may change without a new plan, with the largest
            size of each.
        divider: How batches become microbatches in training.
        clip: How gradients are clipped, or None.
        scaler: Scales the loss, or None.
        set_to_none: Whether gradients become None before a step, or zeros.
        autocast: The lower dtype, if network and loss run under autocast.
        accumulate: Over how many batches gradients are added up before the optimizers step.
        schedule: In which order workers compute microbatches: a name, or a policy.
        compiler: Compiles segments, or None.
        recompute: Whether backward runs forward again instead of keeping what it saves: of
            everything, or of the modules with these paths.
    """

    network: nn.Module
    loss_fn: Callable[..., Any] | None
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
    unplaced: UnplacedRule
    with_loss: bool
    dynamic_dims: Mapping[int, int] = field(default_factory=dict)
    divider: Divider = field(default_factory=Divider)
    clip: Clip | None = None
    scaler: torch.amp.GradScaler | None = None
    set_to_none: bool = True
    autocast: torch.dtype | None = None
    accumulate: int = 1
    schedule: str | Policy = "1f1b"
    compiler: Compiler | None = None
    recompute: bool | tuple[str, ...] = False

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All optimizers, in the order in which they are stepped."""
        if isinstance(self.optimizer, torch.optim.Optimizer):
            return (self.optimizer,)
        return tuple(self.optimizer or ())

    @property
    def update_rules(self) -> UpdateRules:
        """What happens to gradients."""
        return UpdateRules(
            self.optimizers, self.clip, self.scaler, self.set_to_none, self.accumulate
        )


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
    """

    plan: PartitionPlan
    programs: tuple[WorkerProgram, ...]
    runner: ProgramRunner
    consumers: tuple[int, ...]
    woken_by_values: frozenset[int]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    wants_costs: bool = False


class OneByOneError(Exception):
    """Forward leaves attributes with which the next microbatch has another graph.

    Attributes:
        graph: The graph of the first one.
    """

    def __init__(self, graph: CapturedGraph) -> None:
        super().__init__()
        self.graph = graph


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
        _check_trained(task)
        self.owners: dict[str, int] = {}
        self.expected_owners: dict[str, int] = {}
        self.on_settled: Callable[[], None] = _nothing
        self._max_plans = _MAX_PLANS
        self._attributes = WatchedAttributes(task.network, task.loss_fn)
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

    def adopt(self, owners: Mapping[str, int]) -> None:
        """Take the owners that other workers have fixed, as if a plan had told them."""
        self.owners.update(owners)
        self._free_others()

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
            self._attributes.leave(planned.plan.placed.graph)
        return planned

    def runs_one_by_one(self, mode: Mode, signature: Signature) -> bool:
        """Whether the next microbatch has another graph than those after it.

        Known once ``plan_for`` was asked for a plan of several, and refused.
        """
        return (mode, signature.digest, self._look()) in self._one_by_one

    def _look(self) -> tuple[tuple[bool, ...], tuple[str, ...]]:
        """What a network's graphs depend on besides their inputs."""
        return self.requires_grad(), self._attributes.values()

    def _watch(self, graph: CapturedGraph) -> None:
        """Tell plans apart by attributes that were not known to change when they were made."""
        new = tuple(self._attributes.watch(graph).values())
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
                numbers = _numbers_for(planned.plan, signature)
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
        if not self.owners:
            self.owners.update(self.expected_owners)
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
                _describe_optimizer(self._task),
                f"signature {signature.text}",
            ]
        )
        self._job.member.agree(f"plan {number} ({mode.value})", text)
        made = self._open(number, plan, programs, _numbers_for(plan, signature) or {})
        is_measured = takes_costs(self._task.schedule) and part.num_microbatches > 1
        return replace(made, wants_costs=is_measured and mode is Mode.TRAIN)

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
            self._plans[key] = self._open(number, old.plan, programs, old.numbers)
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
        return Planned(plan, programs, runner, _consumers(plan), waiting, numbers)

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
            owners=self.owners,
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
        self.owners.update(_all_owners(plan.placed, self.owners, tensors, self._modules()))
        nodes, workers = plan.placed.graph.nodes, plan.placed.workers
        for position in plan.placed.graph.state_names:
            assert self.owners[nodes[position].target] == workers[position]
        self._free_others()

    def _free_others(self) -> None:
        """Give what is owned here its memory, and free what others own."""
        tensors = self._tensors()
        self.updater.settle([self.owners[n] for n, _ in self._task.network.named_parameters()])
        strides = {name: tensor.stride() for name, tensor in tensors.items()}
        for module in _stateful(self._task):
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


def _numbers_for(plan: PartitionPlan, signature: Signature) -> Mapping[str, Any] | None:
    """The numbers that a plan's graph computes of a batch's sizes; None if it does not hold."""
    sizes = plan.placed.graph.sizes
    symbols = sizes.bind(batches.leaves(signature.example("meta"))) if sizes is not None else None
    return sizes.compute(symbols) if sizes is not None and symbols is not None else None


def _nothing() -> None:
    """Nobody waits for owners."""


def _stateful(task: Task) -> list[nn.Module]:
    """The modules that may hold parameters: the network, and a loss that is a module."""
    return [m for m in (task.network, task.loss_fn) if isinstance(m, nn.Module)]


def materialize_all(task: Task) -> None:
    """Give everything its memory: what one process does with a network built deferred."""
    for module in _stateful(task):
        if is_deferred(module):
            materialize(module)


def named_state(network: nn.Module, loss_fn: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, those of the loss included; tied ones under each name."""
    found: dict[str, torch.Tensor] = {}
    found.update(network.named_parameters(remove_duplicate=False))
    found.update(network.named_buffers(remove_duplicate=False))
    if isinstance(loss_fn, nn.Module):
        for name, tensor in (
            *loss_fn.named_parameters(remove_duplicate=False),
            *loss_fn.named_buffers(remove_duplicate=False),
        ):
            found[f"{LOSS_PATH}.{name}"] = tensor
    return found


def module_annotations(network: nn.Module, loss_fn: Any) -> dict[str, Annotation]:
    """The placement written on each module, by module path."""
    found = annotations_of(network)
    if isinstance(loss_fn, nn.Module):
        for path, annotation in annotations_of(loss_fn).items():
            found[f"{LOSS_PATH}.{path}" if path else LOSS_PATH] = annotation
    return found


def placement_rules(
    network: nn.Module,
    loss_fn: Any,
    *,
    unplaced: UnplacedRule,
    num_workers: int,
    owners: Mapping[str, int],
) -> PlacementRules:
    """All that decides where the parts of a network go, apart from its graph."""
    kept = kept_rules(network)
    return PlacementRules(
        num_workers,
        module_annotations(network, loss_fn),
        unplaced,
        dict(owners),
        kept.operations,
        kept.parameters,
    )


def capture_graph(task: Task, mode: Mode, signature: Signature) -> CapturedGraph:
    """Capture the step of a mode, for arguments of a signature."""
    run: Callable[..., Any] = batches.run_predict
    loss: int | None = None
    if mode is Mode.TRAIN:
        run, loss = batches.run_train, 0
    elif mode is Mode.EVAL:
        run = batches.run_eval_with_loss if task.with_loss else batches.run_eval
        loss = 0 if task.with_loss else None
    args, kwargs = signature.example()
    modes = [(module, module.training) for module in task.network.modules()]
    task.network.train(mode is Mode.TRAIN)
    try:
        with ExitStack() as stack:
            for module in _stateful(task):
                stack.enter_context(plain_classes(module))
                if is_deferred(module):
                    stack.enter_context(stand_ins(module))
            run = batches.casting_to(task.autocast, run)
            return capture(
                CaptureRequest(
                    task.network, task.loss_fn, run, mode, loss, args, kwargs, task.dynamic_dims
                )
            )
    finally:
        for module, training in modes:
            module.training = training


def make_plan(
    graph: CapturedGraph,
    *,
    network: nn.Module,
    loss_fn: Any,
    unplaced: UnplacedRule,
    num_workers: int,
    owners: dict[str, int],
    part: StepPart = WHOLE_STEP,
    schedule: str | Policy = "1f1b",
    update: UpdateRules | None = None,
    is_compiled: bool = False,
    recompute: bool | Collection[str] = False,
) -> tuple[PartitionPlan, tuple[WorkerProgram, ...]]:
    """All pure passes in a row: resolve, partition, lower; each result is verified.

    Raises:
        OneByOneError: The plan is for several microbatches, which have several graphs.
    """
    if graph.is_other_after and part.num_microbatches > 1:
        raise OneByOneError(graph)
    rules = placement_rules(
        network, loss_fn, unplaced=unplaced, num_workers=num_workers, owners=owners
    )
    placed = keep_memory_together(resolve(graph, rules))
    refuse_redrawn(placed, is_microbatched=part.is_microbatched)
    if graph.mode is Mode.TRAIN and not placed.graph.has_gradients:
        raise ConfigurationError(
            "the loss depends on no parameter that requires a gradient, so there is nothing to "
            "train\n  Fix: leave requires_grad on for some parameter, and do not detach the loss."
        )
    plan = partition(placed, is_microbatched=part.is_microbatched)
    if not is_compiled:  # the compiler decides what to keep, and makes backward one piece
        plan = with_splits(with_recomputation(plan, recompute))
    if update is not None and part.last and graph.mode is Mode.TRAIN:
        names = [name for name, _ in network.named_parameters()]
        owned = _all_owners(placed, owners, names, rules.modules)
        sizes = update.tally_sizes([owned[name] for name in names], num_workers)
        plan = with_tally(plan, sizes) if sizes is not None else plan
    verify(plan)
    return plan, lower_plan(plan, part, schedule)


def lower_plan(
    plan: PartitionPlan, part: StepPart, schedule: str | Policy, costs: Costs | None = None
) -> tuple[WorkerProgram, ...]:
    """The programs of a plan, verified.

    Args:
        plan: The plan.
        part: Which part of a step they run.
        schedule: The name of the policy, or the policy.
        costs: What its steps were found to cost, for a policy that looks at it.
    """
    number = part.num_microbatches
    is_training = plan.placed.graph.mode is Mode.TRAIN
    policy: Any = policy_of(schedule if is_training else "gpipe", number)
    if costs is not None:
        policy = partial(policy, costs=costs)
    policy = checked(policy)
    programs = lower(plan, policy, num_microbatches=number, first=part.first, last=part.last)
    verify_programs(plan, programs, depths=channel_depths(programs))
    return programs


def _check_trained(task: Task) -> None:
    """Refuse parameters that the captured graph will not know: nobody would train them."""
    known = {id(tensor) for tensor in named_state(task.network, task.loss_fn).values()}
    for optimizer in task.optimizers:
        groups = optimizer.param_groups
        unknown = [p for group in groups for p in group["params"] if id(p) not in known]
        if unknown:
            raise ConfigurationError(
                f"{type(optimizer).__name__} has {len(unknown)} parameter(s) that are neither in "
                f"net nor in loss_fn, the first of shape {list(unknown[0].shape)}\n"
                f"  Fix: make the optimizer from net.parameters(), after the last change to net; "
                f"pass the module that has them as loss_fn, not a function around it."
            )


def _all_owners(
    placed: PlacedGraph,
    owners: Mapping[str, int],
    names: Iterable[str],
    modules: Mapping[str, Annotation],
) -> dict[str, int]:
    """The owner of every parameter and buffer; what no operation uses is with its module, or 0."""
    found = dict(owners)
    for position, its_names in placed.graph.state_names.items():
        for name in its_names:
            found.setdefault(name, placed.workers[position])
    for name in names:
        found.setdefault(name, _owner_of_unused(name, modules))
    return found


def _owner_of_unused(name: str, modules: Mapping[str, Annotation]) -> int:
    from graphsplit.placement.whole import nearest

    placed = nearest(modules, name.rpartition(".")[0])
    return placed[1].rank if placed is not None else 0


def _consumers(plan: PartitionPlan) -> tuple[int, ...]:
    """Workers that read the loader: those whose segments read an input, and the metrics' one."""
    nodes = plan.placed.graph.nodes
    found: dict[int, None] = {}
    for segment, io in zip(plan.segments, plan.io, strict=True):
        if any(nodes[v].kind is NodeKind.INPUT for v in io.values):
            found[segment.worker] = None
    if plan.placed.graph.mode is Mode.EVAL or not found:
        found[plan.home] = None
    return tuple(found)


def _describe_optimizer(task: Task) -> str:
    """The optimizer's class and settings: workers whose scripts differ only there must notice."""
    names = {id(t): n for n, t in named_state(task.network, task.loss_fn).items()}
    lines = [task.update_rules.describe()]
    for optimizer in task.optimizers:
        lines.append(f"optimizer {type(optimizer).__name__}")
        for group in optimizer.param_groups:
            settings = {k: v for k, v in group.items() if k != "params"}
            members = [names.get(id(p), "a parameter of no module") for p in group["params"]]
            lines.append(f"  group {settings!r}: {', '.join(members)}")
    return "\n".join(lines)


def unflatten_outputs(
    graph: CapturedGraph,
    values: dict[int, torch.Tensor],
    inputs: list[Any],
    numbers: Mapping[str, Any] | None = None,
) -> Any:
    """The outputs of a step in the network's own structure."""
    leaves: list[Any] = []
    for output in graph.outputs:
        if output.node is None:
            leaves.append(output.constant)
            continue
        node = graph.nodes[output.node]
        if node.kind is NodeKind.INPUT:
            leaves.append(inputs[int(node.target)])
        elif node.kind is NodeKind.CONSTANT:
            leaves.append(graph.constants[node.name])
        elif node.kind is NodeKind.NUMBER:
            leaves.append((numbers or {})[node.name])
        else:
            leaves.append(values[output.node])
    return graph.output_spec.rebuild(leaves)
