"""From a network and a batch's signature to an agreed plan and a runner, once per signature."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from graphsplit.batches.signature import Signature
from graphsplit.capture.graph import CapturedGraph, Mode
from graphsplit.capture.python.answers import Answers
from graphsplit.capture.reach.at_calls import NOTHING_LEFT, left_by
from graphsplit.capture.reach.plain import SharedValues
from graphsplit.capture.state.older_values import kept_places, leave_and_count
from graphsplit.guards.places import Place
from graphsplit.job.job import Job
from graphsplit.marks.annotations import Annotation, mark_planned
from graphsplit.marks.rules import has_replicas
from graphsplit.optimizers.freed_memory import return_now
from graphsplit.optimizers.optimizer import are_same
from graphsplit.optimizers.ownership import Residence
from graphsplit.optimizers.update import Updater
from graphsplit.partition.checks.one_state import left_by_calls
from graphsplit.partition.dump import describe_plan
from graphsplit.partition.plan import Exchange, PartitionPlan
from graphsplit.placement.present import modules_among
from graphsplit.planning.compared.announced import Note, PythonStep, Swaps, compare, topic_of_graph
from graphsplit.planning.compared.hooks import ParameterHooks
from graphsplit.planning.compared.moved import settle_moved
from graphsplit.planning.compared.writes import Writes, written_apart
from graphsplit.planning.homes import check_homes, free_others, own_all, state_here
from graphsplit.planning.modes import as_in, check_around
from graphsplit.planning.overlap import check_overlapping, check_used, modified_state, overlapping
from graphsplit.planning.passes import (
    all_owners,
    capture_graph,
    consumers_of,
    lower_plan,
    make_plan,
)
from graphsplit.planning.progress import PlanningLines, SizesSeen
from graphsplit.planning.python_values import PythonValues
from graphsplit.planning.ready_plan import ReadyPlan, written_inputs
from graphsplit.planning.recordings import Match, Recordings
from graphsplit.planning.task import (
    Task,
    check_held,
    check_trained,
    describe_optimizers,
    module_annotations,
    named_state,
    trainable_of,
)
from graphsplit.planning.trainable import requires_grad_of
from graphsplit.program.depths import channel_depths
from graphsplit.program.lower import WHOLE_STEP, StepPart, WorkerProgram, describe_programs
from graphsplit.runtime.channels import first_received
from graphsplit.runtime.parts import RunnerParts
from graphsplit.runtime.runner import ProgramRunner
from graphsplit.schedule.auto import takes_costs
from graphsplit.schedule.costs import Costs
from graphsplit.torch_ext.private import is_any_autocast_on, num_function_modes
from graphsplit.torch_ext.steering import let_steer, owned_state


class Planner:
    """Makes plans, and keeps the latest ones. All workers ask for the same ones in one order."""

    def __init__(self, task: Task, job: Job) -> None:
        self.task = self._task = task
        self._job = job
        self._plans: OrderedDict[tuple[int, StepPart], ReadyPlan] = OrderedDict()  # by recording
        self._numbers: dict[tuple[int, StepPart], int] = {}
        self.taking_turns: set[int] = set()  # recordings whose microbatches run like batches
        self.parameters, self.trainable = tuple(task.network.parameters()), trainable_of(task)
        self.plain_values_agree = True  # on all workers, once all have read one loader
        self._is_settled = False  # whether the updater knows where its parameters live
        self.updater = Updater(task, self.parameters)
        self._progress = PlanningLines(job.rank, task)
        self.sums, self.num_kept = task.part_sums, task.num_kept
        self._optimizers = check_trained(task)
        self._overlapping = overlapping(self.tensors())
        self._modified: set[str] = set()  # by any graph so far
        self.owners: dict[str, int] = {}
        self.expected_owners: dict[str, int] = {}
        self.on_settled: Callable[[], None] = lambda: None
        self._max_plans = 64
        self.has_replicas = False  # whether several workers share what is placed outside forward
        self._swaps = swaps = Swaps(task)
        self.answers = Answers()
        state = (lambda: self.trainable, self.tensors)
        self.recordings = Recordings(self._record, task, *state, swaps, self.answers.holds)
        self.python_values = PythonValues(self.recordings, task)
        hooks = ParameterHooks(self.tensors, self.known_owners, lambda: job.rank)
        self.writes = Writes(self.tensors, job.compared_writes, hooks)
        self._found: tuple[Mode, Signature, Match | None] | None = None
        self._told = PythonStep()  # the message of the last step to which nothing happened
        self._agreed = self._told, self._told  # messages of this worker and the leader
        self._sizes = SizesSeen(task.dynamic_dims)
        self._due: dict[tuple[int, StepPart], Costs] = {}  # to lower again, with what they cost
        self.catch_up: Callable[[str | None], bool] = lambda text: False

    def start_over(self) -> None:
        """Forget all plans; owners stay. All workers do so at the same point."""
        self._plans.clear()
        self._numbers.clear()
        self.taking_turns.clear()
        self._due.clear()
        self._swaps.settle()  # the channels are gone
        # Somebody may be new, and know nothing of what was seen before.
        self.writes.start_over()
        self.python_values.note()
        self.recordings.start_over()
        self._found = None

    def let_go(self) -> None:
        """Have memory for everything again, without values: all workers fix owners anew."""
        own_all(self.tensors())
        self.owners.clear()
        self.expected_owners = {}
        self._progress = PlanningLines(self._job.rank, self._task)
        self._renew(force=True)

    def adopt(self, owners: Mapping[str, int]) -> None:
        """Take the owners that other workers have fixed, as if a plan had told them."""
        self.owners.update(owners)
        let_steer(t for name, t in self.tensors().items() if name not in self.owners)
        self._free_others()

    def known_owners(self) -> dict[str, int]:
        """The owners of all tensors that have one: a Model of the same modules may have fixed it.

        Of the whole network if this Model has a plan, or another worker has had one.
        """
        owners = self.owners or self.expected_owners
        return {**owners, **self._job.owners.known(self.tensors())}

    def keep_at_least(self, num_plans: int) -> None:
        """Keep more plans than usual: all that one step needs, and as many again."""
        self._max_plans = max(self._max_plans, num_plans)

    def begin_step(self, mode: Mode) -> None:
        """A step of training finds the network in train mode, whatever was made of it meanwhile."""
        is_training = mode is Mode.TRAIN
        is_on = is_any_autocast_on() or num_function_modes()
        if is_on or (is_training and not torch.is_grad_enabled()):
            check_around(mode)
        if is_training and not self._task.network.training:
            self._task.network.train()

    def ahead(self, mode: Mode, signature: Signature | None) -> PythonStep | None:
        """The message of ``python_step``, if no script runs until then, and a recording holds."""
        is_begun = mode is not Mode.TRAIN or self._task.network.training
        if signature is None or not is_begun:
            return None
        found = self.recordings.find(mode, signature)
        return None if found is None else self._message(mode, signature, found)

    def python_step(self, mode: Mode, signature: Signature) -> PythonStep:
        """The message to others on the Python values behind the next step.

        What was found is used by the ``recording_for`` that follows.
        """
        self.begin_step(mode)
        return self._message(mode, signature, self.recordings.find(mode, signature))

    def _message(self, mode: Mode, signature: Signature, found: Match | None) -> PythonStep:
        self._found = (mode, signature, found)
        rates = self.updater.settings.numbers() if mode is Mode.TRAIN else ()
        written = self.writes.names(with_replaced=found is None)
        if found is None:
            changed = self.recordings.changed(mode, signature)
            return PythonStep.of(changed, rates, written=written)
        number, told = found.recording.number + 1, self._told
        if self._swaps.plans or found.lifted or written:
            lifted = tuple(map(float, found.lifted))
            return PythonStep.of(self._swaps.changed(), rates, number, lifted, written)
        if told.recording != number or told.settings is not rates:
            told = self._told = PythonStep(number, settings=rates)
        return told

    def python_left(self, mode: Mode, signature: Signature) -> PythonStep:
        """The message on what a loader may have changed since the last step, when it has ended."""
        written = self.writes.names(with_replaced=False)
        latest = self.recordings.latest_if_it_holds()
        if latest is None:
            return PythonStep.of(self.recordings.changed(mode, signature), (), written=written)
        return PythonStep(latest.number + 1, tuple(map(float, latest.lifted())), written=written)

    def values_shared_with(self, loader: Any) -> SharedValues:
        """The plain values that network or loss may read and a loader may change."""
        task, rules, hooks = self._task, self._task.optimizers, self.writes.hooks.all()
        objects = [*rules, *(rule.state for rule in rules), *task.network.modules(), task.loss_fn]
        return SharedValues((task.loss_fn, task.network), (loader,), objects, hooks)

    def check_python_step(
        self,
        mode: Mode,
        signature: Signature,
        leaders: tuple[PythonStep, int],
        ahead: PythonStep | None,
        catch_up: Callable[[], object] = lambda: None,
    ) -> None:
        """Compare this worker's Python values with the leader's.

        Args:
            mode: Train, eval or predict.
            signature: Of the batch, or of its first microbatch.
            leaders: What the leader has told, and its rank.
            ahead: What ``ahead`` has found, while the leader's message was not here yet.
            catch_up: Does what the leader has done, and this worker has not, if they differ.

        Raises:
            PlanMismatchError: They differ; names the places, with both values.
        """
        theirs = leaders[0]
        is_of_it = ahead is not None and self._found and self._found[:2] == (mode, signature)
        mine = ahead if ahead is not None and is_of_it else self.python_step(mode, signature)
        if mine is self._agreed[0] and theirs is self._agreed[1]:  # they are held
            return
        ranks = self._job.rank, leaders[1]
        if mine.agrees_with(theirs) and not written_apart(mine, theirs, ranks, self.known_owners):
            self._agreed = mine, theirs
            return
        catch_up()
        mine = self.python_step(mode, signature)
        found = self._found[2] if self._found is not None else None
        compare(
            mine,
            theirs,
            ranks=ranks,
            mode=mode,
            labels=[p.label for p in found.recording.graph.state.guards.lifted] if found else [],
            changed=partial(self.recordings.changed, mode, signature, theirs.recording - 1),
            here=partial(self.recordings.value_at, mode, signature),
            settings=self.updater.settings.differing,
            written=written_apart(mine, theirs, ranks, self.known_owners),
        )

    def recording_for(self, mode: Mode, signature: Signature, *, note: Note = str) -> Match:
        """The recording that holds; made now where there is none, which is collective.

        Raises:
            CaptureError: The network cannot be captured.
            PlanMismatchError: Workers recorded different graphs.
        """
        if self._swaps.plans:
            for number in self._swaps.settle():
                self._job.transport.close_plan(number)
        looked, self._found = self._found or (None, None, None), None
        is_of_it, find = looked[:2] == (mode, signature), self.recordings.find
        found = looked[2] if is_of_it else find(mode, signature)
        if found is None:
            self._renew(force=settle_moved(self.tensors(), self.known_owners(), self._job))
            self._progress.begun("capturing", mode, self.recordings.why_again(mode, signature))
            if self._job.rank == 0:
                self._sizes.note(mode, signature)
            found = self._made(mode, signature)
            check_held(self._task, mode, found.recording.graph.constants.values())
            self._overlapping = overlapping(self.tensors())  # tensors may be buffers since
            number, plans = found.recording.number, found.recording.plans
            text = f"recording {number}\n" if plans == number else f"as {plans}\n"
            topic = topic_of_graph(self._job.num_plans, mode)
            self._job.member.agree(topic, f"{note()}\n{text}{found.describe()}")
            if plans != number:
                self._job.next_plan_number()  # no topic comes twice
        elif found.recording.parameters is not self.trainable:
            self._renew()  # the script has put back parameters that it had before
            self.owners.update(self._job.owners.known(self.tensors()))
        if self._job.recapture_every:
            self.recordings.check_again(found, self._job.recapture_every)
        return found

    def _made(self, mode: Mode, signature: Signature) -> Match:
        """A new recording; a second one if what the loader gives was missed here, and decides."""
        try:
            found = self.recordings.make(mode, signature)
        except Exception:  # a name that the data set has yet to set, or anything that comes of it
            if not self.catch_up(None):
                raise
            return self.recordings.make(mode, signature)
        if not self.catch_up(found.describe()):
            return found
        self.recordings.drop(found)
        return self.recordings.make(mode, signature)

    def plan_for(self, found: Match, part: StepPart = WHOLE_STEP, *, note: Note = str) -> ReadyPlan:
        """The plan for a recorded step; made now if it is new.

        Collective where it is new. The 64 plans used last are kept.

        Args:
            found: The recording, with the numbers to compute with.
            part: Which part of a step the plan is for.
            note: Gives what workers must agree on besides, where the plan is new.

        Raises:
            PlacementError: A placement cannot be honoured.
            PlanMismatchError: Workers made different plans.
        """
        if self._due:
            self._lower_again(note)
        recording, asks = found.recording, found.recording.graph.num_answered is not None
        key = (recording.plans, WHOLE_STEP if asks else part)
        planned = self._plans.get(key)
        if planned is None:
            planned = self._plans[key] = self._make(found, key[1], note)
            self._numbers[key] = planned.runner.plan_number
            if len(self._plans) > self._max_plans:
                oldest, _ = self._plans.popitem(last=False)
                self._job.transport.close_plan(self._numbers.pop(oldest))
        else:
            self._plans.move_to_end(key)
        if not self._is_settled:
            self._free_others()
        state, self.left = recording.graph.state, NOTHING_LEFT
        if state.changes or state.calls.found or kept_places:
            leave = partial(leave_and_count, self._task.network, state, found.lifted)
            self.left = left_by(state, leave, found.lifted)
        own: dict[str, Any] = {"part": part, "asks": asks, "ending": recording.graph.ending}
        return replace(planned, numbers=found.numbers, **own) if found.numbers or asks else planned

    def known_plan(self, found: Match) -> ReadyPlan | None:
        """The plan for a recorded step as a whole, if there is one."""
        return self._plans.get((found.recording.plans, WHOLE_STEP))

    def renew(self) -> None:
        """The task has another loss, or other optimizers. All workers do so at the same point."""
        self._optimizers = check_trained(self._task, self._optimizers)
        self.python_values.note_loss()
        self._renew(force=True)
        self._swaps.note(self._numbers.values())
        self._plans.clear()
        self._numbers.clear()
        self._due.clear()

    def _renew(self, *, force: bool = False) -> None:
        """The script may have given modules other parameters since the last recording."""
        parameters = tuple(self._task.network.parameters())
        self.has_replicas = has_replicas(self._task.network, self.modules())
        trainable = trainable_of(self._task)
        former = [r.parameters for r in self.recordings if are_same(r.parameters, trainable)]
        self.trainable = former[0] if former else trainable
        if not force and list(map(id, parameters)) == list(map(id, self.parameters)):
            return  # they are held, so that identities stay their own
        self.parameters, self._is_settled = parameters, False
        self.updater.renew(parameters)

    def latest(self, mode: Mode) -> ReadyPlan | None:
        """The plan of a mode that was used last, and computes, if there is any."""
        plans = (p for p in self._plans.values() if p.plan.placed.graph.mode is mode)
        return next((p for p in [*plans][::-1] if p.part.exchange is not Exchange.ALONE), None)

    def requires_grad(self) -> tuple[bool, ...]:
        """Of every parameter of network and loss, whether it is trained."""
        return requires_grad_of(self.trainable)

    def _make(self, found: Match, part: StepPart, note: Note) -> ReadyPlan:
        recording = found.recording
        mode, number = recording.mode, self._job.next_plan_number()
        self._progress.begun("planning", mode)
        plan, programs = self._pure_passes(recording.graph, part)
        optimizers = describe_optimizers(self._task) if mode is Mode.TRAIN else ""
        told = note(), describe_plan(plan), describe_programs(programs), optimizers
        text = "\n".join([*told, f"signature {recording.signature.text}"])
        self._job.member.agree(f"plan {number} ({mode.value})", text)
        made = self._open(number, plan, programs, found.numbers)
        recording.graph.state.guards.settle()
        self._progress.planned(plan)
        is_measured = takes_costs(self._task.schedule) and part.num_microbatches > 1
        is_measured = is_measured and part.exchange is not Exchange.ALONE
        return replace(made, wants_costs=is_measured and mode is Mode.TRAIN, part=part, mode=mode)

    @property
    def lowers_again(self) -> bool:
        """Whether the next ``plan_for`` lowers a plan again: its channels will be new ones."""
        return bool(self._due)

    def use_costs(self, planned: ReadyPlan, costs: Costs) -> None:
        """Lower a plan again before it runs next, with what its steps were found to cost.

        All workers call it with equal costs, after the same step.
        """
        for key, number in self._numbers.items():
            if number == planned.runner.plan_number:
                self._due[key] = costs

    def _lower_again(self, note: Note) -> None:
        """Collective. The values stay the same: only the order of the computations changes."""
        due, self._due = self._due, {}
        for key, costs in due.items():
            old = self._plans.get(key)
            if old is None:  # not among the plans used last any more
                continue
            programs = lower_plan(old.plan, key[-1], self._task.schedule, costs)
            text = "\n".join([note(), *(describe_programs((program,)) for program in programs)])
            number = self._job.next_plan_number()
            self._job.member.agree(f"plan {number}, with measured costs", text)
            if programs == old.programs:
                self._plans[key] = replace(old, wants_costs=False)
                continue
            made = self._open(number, old.plan, programs, old.numbers)
            self._plans[key] = replace(made, part=old.part)
            self._job.transport.close_plan(self._numbers[key])
            self._numbers[key] = number

    def _open(
        self,
        number: int,
        plan: PartitionPlan,
        programs: tuple[WorkerProgram, ...],
        numbers: Mapping[str, Any],
    ) -> ReadyPlan:
        """Make an agreed plan ready to run."""
        mark_planned(self._task.network)
        self._settle_ownership(plan)
        if plan.placed.graph.mode is Mode.TRAIN:
            self.updater.check_optimizers()
        runner = self._runner(
            RunnerParts(
                plan=plan,
                plan_number=number,
                program=programs[self._job.rank],
                depths=channel_depths(programs),
                state=state_here(plan, self.tensors(), self._job.rank),
                transport=self._job.transport,
                updater=self.updater,
                position=self._job.member.position,
                compiler=self._task.compiler,
                hook_state=self.writes.hooks.shared_with(plan),
                sums=self.sums,
            )
        )
        waiting = frozenset(p.worker for p in programs if first_received(p, plan) is not None)
        left = left_by_calls(plan, {*map(id, self.tensors().values())}, self._task.ways)
        consumers, writes = consumers_of(plan, are_all=self._job.goes_on), written_inputs(plan)
        return ReadyPlan(plan, programs, runner, consumers, waiting, numbers, writes, left)

    def _runner(self, parts: RunnerParts) -> ProgramRunner:
        return ProgramRunner(parts)

    def _pure_passes(
        self, graph: CapturedGraph, part: StepPart
    ) -> tuple[PartitionPlan, tuple[WorkerProgram, ...]]:
        """The results that every worker computes alike; a simulation of many does it once."""
        return make_plan(
            *(graph, self._task),
            num_workers=self._job.num_workers,
            owners=self.known_owners(),
            part=part,
            seats=self._job.seats_left,
            goes_on=self._job.goes_on,
        )

    def graph_of(self, mode: Mode, signature: Signature) -> CapturedGraph:
        """The graph of a mode, captured now unless it is known."""
        with as_in(mode, self._task.network):
            found = self.recordings.find(mode, signature)
            return self._record(mode, signature, ()) if found is None else found.recording.graph

    def _record(self, mode: Mode, signature: Signature, lift: tuple[Place, ...]) -> CapturedGraph:
        with self._job.member.position.calls.inside_step():
            return capture_graph(self._task, mode, signature, lift=lift, answers=self.answers)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers there are now, by name."""
        return named_state(self._task.network, self._task.loss_fn)

    def _settle_ownership(self, plan: PartitionPlan) -> None:
        """Fix the owner of every parameter and buffer seen first; free what others own."""
        tensors = owned_state(self.tensors())
        owners = all_owners(plan.placed, self.known_owners(), tensors, self.modules())
        self._modified |= modified_state(plan.placed)
        trained = {name for name, tensor in tensors.items() if tensor.requires_grad}
        check_overlapping(self._overlapping, owners, self._modified | trained)
        check_used(plan.placed, tensors, self._overlapping)
        self.owners.update(owners)
        check_homes(plan, self.owners)
        self._free_others()

    def _free_others(self) -> None:
        """Give what is owned here its memory, and free what others own."""
        tensors = owned_state(self.tensors())
        self._job.owners.fix(tensors, self.owners)
        residence = Residence(tensors, {**self.owners}, self._job.rank, self._job.num_workers)
        free_others(self._task, residence)
        self.updater.settle(residence)
        self._is_settled = True
        self.on_settled()
        self.writes.look()
        return_now()

    def modules(self) -> dict[str, Annotation]:
        """The placement of each module of network and loss on the workers there are, by path."""
        written = module_annotations(self._task.network, self._task.loss_fn)
        return modules_among(written, self._job.seats_left)
