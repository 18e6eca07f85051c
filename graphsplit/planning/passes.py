"""The pure passes in a row: capture, resolve, partition, lower; equal on all workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from graphsplit.batches import step_functions
from graphsplit.batches.signature import Signature
from graphsplit.capture.graph import CapturedGraph, Mode, NodeKind
from graphsplit.capture.python.answers import Answers
from graphsplit.errors import InvariantError, PlacementError
from graphsplit.guards.places import Place
from graphsplit.marks.annotations import Annotation, check_blocks
from graphsplit.marks.rules import kept_rules
from graphsplit.optimizers.parameter_hooks import with_hooks
from graphsplit.partition.checks.given_roots import refuse_unordered
from graphsplit.partition.checks.one_state import refuse_shared_state
from graphsplit.partition.checks.redrawn import refuse_draws_on_devices, refuse_redrawn
from graphsplit.partition.checks.replicated import is_evaluated_apart, refuse_unreplicable
from graphsplit.partition.checks.sound import verify
from graphsplit.partition.checks.sparse import refuse_sent_sparse
from graphsplit.partition.edges import partition
from graphsplit.partition.plan import Exchange, PartitionPlan
from graphsplit.partition.recomputation import with_recomputation
from graphsplit.partition.replicas.blocks import with_blocks
from graphsplit.partition.replicas.buffer_chains import with_chains
from graphsplit.partition.replicas.bundles import (
    borrowed_together,
    bundled,
    exchange_alone,
    without_exchange,
)
from graphsplit.partition.replicas.lanes import merge_lanes
from graphsplit.partition.shared_norms import check_reduction, with_reduction
from graphsplit.partition.splitting import with_splits
from graphsplit.placement.present import graph_among, modules_among, rules_among
from graphsplit.placement.replicas import (
    in_lane,
    lanes_of,
    num_together,
    replicated,
    shared_out,
)
from graphsplit.placement.resolve import (
    PlacedGraph,
    PlacementRules,
    asked_placements,
    branches_to_open,
    resolve,
)
from graphsplit.placement.whole import nearest
from graphsplit.planning.task import Task, module_annotations, named_state, stateful_modules
from graphsplit.planning.trainable import check_graph
from graphsplit.program.depths import channel_depths
from graphsplit.program.lower import (
    WHOLE_STEP,
    Policy,
    StepPart,
    WorkerProgram,
    lower,
)
from graphsplit.program.proof import verify_programs
from graphsplit.rewrite.branches import take_branches_apart
from graphsplit.rewrite.buffer_updates import take_updates_apart
from graphsplit.rewrite.keep_together import keep_memory_together
from graphsplit.rewrite.known_results import with_known_results
from graphsplit.schedule.auto import policy_of
from graphsplit.schedule.costs import Costs
from graphsplit.schedule.orders import checked
from graphsplit.torch_ext.attributes import buffer_of_form
from graphsplit.torch_ext.stand_ins import as_ordinary


def capture_graph(
    task: Task,
    mode: Mode,
    signature: Signature,
    *,
    lift: tuple[Place, ...] = (),
    answers: Answers | None = None,
) -> CapturedGraph:
    """Capture the step of a mode, for arguments of a signature, in the modes that modules have.

    Args:
        task: What to capture.
        mode: Train, eval or predict.
        signature: Of the arguments.
        lift: Places whose numbers are operands of the graph.
        answers: What tensors were found to hold, for code that asks them.
    """
    from graphsplit.capture.export import CaptureRequest, capture  # with torch's compiler

    run: Callable[..., Any] = step_functions.run_predict
    loss: int | None = None
    if mode is Mode.TRAIN:
        run = (
            step_functions.run_train_with_outputs if task.keep_outputs else step_functions.run_train
        )
        loss = 0
    elif mode is Mode.EVAL:
        run = step_functions.run_eval_with_loss if task.with_loss else step_functions.run_eval
        loss = 0 if task.with_loss else None
    args, kwargs = signature.example()
    with ExitStack() as stack:
        for module in stateful_modules(task):
            stack.enter_context(as_ordinary((*module.parameters(), *module.buffers())))
        run = step_functions.casting_to(task.autocast, run)
        return capture(
            CaptureRequest(
                *(task.network, task.loss_fn, run, mode, loss, args, kwargs),
                *(task.dynamic_dims, lift, answers),
            )
        )


def placement_rules(
    task: Task,
    *,
    num_workers: int,
    owners: Mapping[str, int],
    seats: Sequence[int] | None = None,
) -> PlacementRules:
    """All that decides where the parts of a network go, apart from its graph.

    Args:
        task: The network.
        num_workers: How many workers there are.
        owners: Owners that are fixed.
        seats: The workers that are there, as the script knows them; None: all are.
    """
    check_blocks()
    kept = kept_rules(task.network)
    modules = modules_among(module_annotations(task.network, task.loss_fn), seats)
    rules = PlacementRules(
        num_workers,
        modules,
        task.unplaced,
        dict(owners),
        kept.operations,
        kept.parameters,
        shared_out(modules, named_state(task.network, task.loss_fn)),
    )
    return rules if seats is None else rules_among(rules, seats)


def is_placed(graph: CapturedGraph, task: Task) -> bool:
    """Whether the user has said of any part of a network, or of its loss, where it runs."""
    return bool(asked_placements(graph, placement_rules(task, num_workers=1, owners={})))


def make_plan(
    graph: CapturedGraph,
    task: Task,
    *,
    num_workers: int,
    owners: Mapping[str, int],
    part: StepPart,
    seats: Sequence[int] | None = None,
    goes_on: bool = False,
) -> tuple[PartitionPlan, tuple[WorkerProgram, ...]]:
    """All pure passes in a row: resolve, partition, lower; each result is verified.

    Where replicas share the microbatches, each lane is placed and partitioned by itself.
    """
    rules = placement_rules(task, num_workers=num_workers, owners=owners, seats=seats)
    if goes_on:
        graph = graph_among(graph, placement_rules(task, num_workers=num_workers, owners={}), seats)
    replicas = replicated(graph, rules)
    is_evaluated, together = graph.mode in (Mode.EVAL, Mode.PREDICT), 1
    if replicas and is_evaluated:
        together = num_together(replicas.values())
    elif replicas:
        graph = take_updates_apart(graph)
        if graph.ending or not graph.asks:  # else one microbatch alone runs, and leaves nothing
            refuse_unreplicable(graph, replicas, task.divider.num_microbatches, part.start)
    check_graph(graph)
    num_parts = together if is_evaluated else part.num_parts or part.num_microbatches
    lanes = lanes_of(replicas.values(), part.shared, num_parts)
    rules = replace(rules, in_lanes=len(lanes) > 1)
    plans: list[PartitionPlan] = []
    torn: list[frozenset[str]] = [frozenset()]
    while not plans or len({*torn}) > 1:  # lanes run the same operations
        also, plans, torn = torn[0].union(*torn), [], []
        for lane in lanes:
            home = plans[0].home if plans else None
            its_rules = in_lane(rules, lane.start, num_parts)
            plan, found = _partitioned(graph, task, its_rules, part, home, also)
            plans.append(plan)
            torn.append(found)
            rules = replace(rules, owners={**owners, **_owners_in(plans[0].placed)})
    modules = [in_lane(rules, lane.start, num_parts).modules for lane in lanes]
    start = part.shared.start
    plan = merge_lanes(plans, [range(x.start - start, x.stop - start) for x in lanes])
    plan = with_chains(borrowed_together(plan), modules)
    if together > 1 and is_evaluated_apart(graph):
        shared = dict.fromkeys(annotation.replicas for annotation in replicas.values())
        plan = replace(plan, together=together, evaluators=tuple(shared))
    plan = replace(plan, is_replicated=bool(plan.evaluators or (replicas and not is_evaluated)))
    if is_evaluated and part.num_microbatches > plan.together:
        raise InvariantError(f"{part.num_microbatches} batches would be evaluated at once")
    plan = _with_blocks(plan, task, part)
    refuse_sent_sparse(plan)
    if part.last and graph.mode is Mode.TRAIN:
        names = [name for name, _ in task.network.named_parameters()]
        owned = all_owners(plan.placed, owners, names, rules.modules)
        sizes = task.partial_sizes([owned[name] for name in names], num_workers)
        plan = with_reduction(plan, sizes) if sizes is not None else plan
    check_reduction(plan)
    plan = exchange_alone(plan) if part.exchange is Exchange.ALONE else plan
    return plan, lower_plan(plan, part, task.schedule)


def plan_ahead(
    graph: CapturedGraph, task: Task, part: StepPart, *, num_workers: int, owners: Mapping[str, int]
) -> tuple[PartitionPlan, tuple[WorkerProgram, ...]]:
    """The plan that steps will run, made beforehand: that of one microbatch, if they take turns."""
    try:
        return make_plan(graph, task, num_workers=num_workers, owners=owners, part=part)
    except PlacementError as error:
        if not may_take_turns(error, task, has_replicas=graph.has_replicas):
            raise
    return make_plan(graph, task, num_workers=num_workers, owners=owners, part=WHOLE_STEP)


def may_take_turns(error: PlacementError, task: Task, *, has_replicas: bool) -> bool:
    """Whether what cannot be planned may be if each microbatch runs like a batch.

    Args:
        error: Why not.
        task: What is trained.
        has_replicas: Whether replicas share its microbatches.
    """
    return error.may_do_in_turn and task.part_sums is None and not has_replicas


def _with_blocks(plan: PartitionPlan, task: Task, part: StepPart) -> PartitionPlan:
    """The plan with the blocks in which replicas add parts of gradients, if there are to be any."""
    in_pairs, by_microbatch = task.gradient_order == "pairs", task.num_kept > 0
    if not (in_pairs or by_microbatch):
        return plan
    hooked = with_hooks(named_state(task.network, task.loss_fn))
    plan = with_blocks(
        *(plan, part.parts),
        in_pairs=in_pairs,
        by_microbatch=by_microbatch,
        dtype=task.gradient_dtype,
        hooked=hooked,
    )
    plan = replace(bundled(plan), exchange=part.exchange)
    return without_exchange(plan) if part.exchange is Exchange.LATER else plan


def _partitioned(
    graph: CapturedGraph,
    task: Task,
    rules: PlacementRules,
    part: StepPart,
    home: int | None,
    also: frozenset[str],
) -> tuple[PartitionPlan, frozenset[str]]:
    """The plan of microbatches that run alike, verified, and the memories that have versions."""
    opened = take_branches_apart(graph, branches_to_open(graph, rules))
    placed, torn = keep_memory_together(with_known_results(resolve(opened, rules)), also)
    refuse_redrawn(placed, is_microbatched=part.is_microbatched)
    refuse_draws_on_devices(placed)
    plan = partition(placed, is_microbatched=part.is_microbatched, home=home)
    refuse_shared_state(plan)
    refuse_unordered(plan)
    if task.compiler is None:  # it decides what to keep, and makes backward one piece
        plan = with_splits(with_recomputation(plan, task.recompute))
    verify(plan)
    return plan, torn


def _owners_in(placed: PlacedGraph) -> dict[str, int]:
    """The owner of every parameter and buffer of a graph, by each of its names."""
    return {
        name: placed.workers[position]
        for position, names in placed.graph.state_names.items()
        for name in names
    }


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
    is_chosen = is_training and part.exchange is not Exchange.ALONE  # by the user
    policy: Any = policy_of(schedule if is_chosen else "gpipe", number)
    if costs is not None:
        policy = partial(policy, costs=costs)
    policy = checked(policy)
    programs = lower(
        plan,
        policy,
        num_microbatches=number,
        first=part.first,
        last=part.last,
        adds_up=part.adds_up,
    )
    verify_programs(plan, programs, depths=channel_depths(programs))
    return programs


def all_owners(
    placed: PlacedGraph,
    owners: Mapping[str, int],
    names: Iterable[str],
    modules: Mapping[str, Annotation],
) -> dict[str, int]:
    """The owner of every parameter and buffer; what no operation uses is with its module, or 0."""
    found = dict(owners)
    for name, owner in _owners_in(placed).items():
        found.setdefault(name, owner)
    for name in list(found):  # a step may leave a buffer where there is none now
        found.setdefault(buffer_of_form(name), found[name])
    for name in names:
        buffer = buffer_of_form(name)
        found.setdefault(buffer, _owner_of_unused(buffer, modules))
        found.setdefault(name, found[buffer])
    return found


def _owner_of_unused(name: str, modules: Mapping[str, Annotation]) -> int:
    placed = nearest(modules, name.rpartition(".")[0])
    return placed[1].rank if placed is not None else 0


def consumers_of(plan: PartitionPlan, *, are_all: bool = False) -> tuple[int, ...]:
    """Workers that read the loader: those whose segments read an input, and the metrics' one.

    So do all replicas of those, which run other batches; and all workers in a prediction, whose
    outputs all are given. Who needs nothing of a batch may read one row of it.

    Args:
        plan: The plan.
        are_all: Whether the others do, too: so that any of them can go on with the loader.
    """
    nodes = plan.placed.graph.nodes
    found: dict[int, None] = {}
    for segment, io in zip(plan.segments, plan.io, strict=True):
        if any(nodes[v].kind is NodeKind.INPUT for v in io.values):
            found[segment.worker] = None
    if plan.placed.graph.mode is Mode.EVAL or not found:
        found[plan.home] = None
    for replicas in plan.evaluators:
        if not found.keys().isdisjoint(replicas):
            found.update(dict.fromkeys(replicas))
    are_all |= plan.placed.graph.mode is Mode.PREDICT
    if are_all or plan.placed.graph.asks:  # who reads the rest depends on the answer
        found.update(dict.fromkeys(range(plan.num_workers)))
    return tuple(found)
