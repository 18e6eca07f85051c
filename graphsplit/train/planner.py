"""From a network and a batch's signature to an agreed plan and a runner, once per signature."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphsplit.capture.export import CaptureRequest, capture
from graphsplit.capture.graph import LOSS_PATH, CapturedGraph, Mode, NodeKind
from graphsplit.errors import ConfigurationError
from graphsplit.partition.dump import describe_plan
from graphsplit.partition.edges import partition
from graphsplit.partition.plan import PartitionPlan
from graphsplit.partition.verify import verify
from graphsplit.placement.annotations import Annotation, mark_planned, module_annotation
from graphsplit.placement.resolve import PlacementRules, UnplacedRule, resolve
from graphsplit.program.lower import WorkerProgram, describe_programs, lower
from graphsplit.runtime.deferred_init import is_deferred, materialize, stand_ins
from graphsplit.runtime.job import Job
from graphsplit.runtime.optimizer import OwnedOptimizer
from graphsplit.runtime.ownership import give_up, is_elsewhere, plain_classes, return_free_memory
from graphsplit.runtime.runner import ProgramRunner, RunnerParts, first_received
from graphsplit.schedule.gpipe import gpipe
from graphsplit.schedule.verify import verify_programs
from graphsplit.train import batch as batches
from graphsplit.train.batch import Signature

_MAX_PLANS = 64


@dataclass(frozen=True)
class Task:
    """What a Model wants to run, apart from the batch.

    Attributes:
        network: The user's network.
        loss_fn: The loss, or None.
        optimizer: The optimizer, or None.
        unplaced: The rule for operations that nobody placed.
        with_loss: Whether the eval graph computes the loss.
    """

    network: nn.Module
    loss_fn: Callable[..., Any] | None
    optimizer: torch.optim.Optimizer | None
    unplaced: UnplacedRule
    with_loss: bool


@dataclass(frozen=True)
class Planned:
    """An agreed plan, ready to run on this worker.

    Attributes:
        plan: The plan, equal on all workers.
        programs: All workers' programs.
        runner: Runs this worker's program.
        consumers: Workers that read the loader's batches, the earliest in the pipeline first.
        woken_by_values: Workers that can do nothing in a step before a value has come.
    """

    plan: PartitionPlan
    programs: tuple[WorkerProgram, ...]
    runner: ProgramRunner
    consumers: tuple[int, ...]
    woken_by_values: frozenset[int]


class Planner:
    """Makes plans, and keeps the latest ones. All workers ask for the same ones in one order."""

    def __init__(self, task: Task, job: Job) -> None:
        self._task = task
        self._job = job
        self._plans: OrderedDict[tuple[Any, ...], Planned] = OrderedDict()
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._parameters = tuple(task.network.parameters())
        self._optimizer = OwnedOptimizer(task.optimizer)
        self.owners: dict[str, int] = {}

    def plan_for(self, mode: Mode, signature: Signature) -> Planned:
        """The plan for a mode and a signature; made now if it is new.

        Collective where it is new. The 64 plans used last are kept.

        Raises:
            CaptureError: The network cannot be captured.
            PlacementError: A placement cannot be honoured.
            PlanMismatchError: Workers made different plans.
        """
        key = (mode, signature.digest, self._requires_grad())
        planned = self._plans.get(key)
        if planned is None:
            planned = self._make(key, mode, signature)
            self._plans[key] = planned
            if len(self._plans) > _MAX_PLANS:
                oldest, _ = self._plans.popitem(last=False)
                self._job.transport.close_plan(self._numbers.pop(oldest))
        elif len(self._plans) > 1:
            self._plans.move_to_end(key)
        return planned

    def latest(self, mode: Mode) -> Planned | None:
        """The plan of a mode that was used last, if there is any."""
        for key in reversed(self._plans):
            if key[0] is mode:
                return self._plans[key]
        return None

    def _requires_grad(self) -> tuple[bool, ...]:
        with torch._C.DisableTorchFunctionSubclass():  # stand-ins would answer slowly
            return tuple([p.requires_grad for p in self._parameters])

    def _make(self, key: tuple[Any, ...], mode: Mode, signature: Signature) -> Planned:
        number = self._job.next_plan_number()
        self._numbers[key] = number
        plan, programs = self._pure_passes(mode, signature)
        text = "\n".join(
            [
                describe_plan(plan),
                describe_programs(programs),
                _describe_optimizer(self._task),
                f"signature {signature.text}",
            ]
        )
        self._job.member.agree(f"plan {number} ({mode.value})", text)
        mark_planned(self._task.network)
        self._settle_ownership(plan)
        runner = ProgramRunner(
            RunnerParts(
                plan=plan,
                plan_number=number,
                program=programs[self._job.rank],
                state=self._state_of(plan),
                transport=self._job.transport,
                optimizer=self._optimizer.step,
                zero_gradients=self._optimizer.zero_gradients,
                position=self._job.member.position,
            )
        )
        waiting = frozenset(p.worker for p in programs if first_received(p) is not None)
        return Planned(plan, programs, runner, _consumers(plan), waiting)

    def _pure_passes(
        self, mode: Mode, signature: Signature
    ) -> tuple[PartitionPlan, tuple[WorkerProgram, ...]]:
        """What every worker computes alike; a simulation of many workers does it once."""
        return make_plan(
            capture_graph(self._task, mode, signature),
            network=self._task.network,
            loss_fn=self._task.loss_fn,
            unplaced=self._task.unplaced,
            num_workers=self._job.num_workers,
            owners=self.owners,
        )

    def _tensors(self) -> dict[str, torch.Tensor]:
        return named_state(self._task.network, self._task.loss_fn)

    def _settle_ownership(self, plan: PartitionPlan) -> None:
        """Fix the owner of every parameter and buffer seen first; free what others own."""
        tensors = self._tensors()
        nodes, workers = plan.placed.graph.nodes, plan.placed.workers
        for position, names in plan.placed.graph.state_names.items():
            for name in names:
                self.owners.setdefault(name, workers[position])
            assert self.owners[nodes[position].target] == workers[position]
        for name in tensors:  # what no operation uses: with its module, or 0
            self.owners.setdefault(name, _owner_of_unused(name, self._modules()))
        strides = {name: tensor.stride() for name, tensor in tensors.items()}
        for module in _stateful(self._task):
            if is_deferred(module):
                materialize(module, self._owned_names(module))
        for name, tensor in tensors.items():
            if self.owners[name] != self._job.rank and not is_elsewhere(tensor):
                give_up(tensor, name=name, owner=self.owners[name], strides=strides[name])
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
    found = {}
    for path, module in network.named_modules(remove_duplicate=False):
        annotation = module_annotation(module)
        if annotation is not None:
            found[path] = annotation
    if isinstance(loss_fn, nn.Module):
        for path, module in loss_fn.named_modules(remove_duplicate=False):
            annotation = module_annotation(module)
            if annotation is not None:
                found[f"{LOSS_PATH}.{path}" if path else LOSS_PATH] = annotation
    return found


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
            return capture(
                CaptureRequest(task.network, task.loss_fn, run, mode, loss, args, kwargs)
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
) -> tuple[PartitionPlan, tuple[WorkerProgram, ...]]:
    """All pure passes in a row: resolve, partition, lower; each result is verified."""
    rules = PlacementRules(
        num_workers, module_annotations(network, loss_fn), unplaced, dict(owners)
    )
    if graph.mode is Mode.TRAIN and not graph.has_gradients:
        raise ConfigurationError(
            "the loss depends on no parameter that requires a gradient, so there is nothing to "
            "train\n  Fix: leave requires_grad on for some parameter, and do not detach the loss."
        )
    plan = partition(resolve(graph, rules))
    verify(plan)
    programs = lower(plan, gpipe)
    verify_programs(plan, programs)
    return plan, programs


def _owner_of_unused(name: str, modules: dict[str, Annotation]) -> int:
    from graphsplit.placement.resolve import nearest

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
    if task.optimizer is None:
        return "no optimizer"
    names = {id(t): n for n, t in named_state(task.network, task.loss_fn).items()}
    lines = [f"optimizer {type(task.optimizer).__name__}"]
    for group in task.optimizer.param_groups:
        settings = {k: v for k, v in group.items() if k != "params"}
        members = [names.get(id(p), "a parameter of no module") for p in group["params"]]
        lines.append(f"  group {settings!r}: {', '.join(members)}")
    return "\n".join(lines)


def unflatten_outputs(
    graph: CapturedGraph, values: dict[int, torch.Tensor], inputs: list[Any]
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
        else:
            leaves.append(values[output.node])
    return pytree.tree_unflatten(leaves, graph.output_spec)
