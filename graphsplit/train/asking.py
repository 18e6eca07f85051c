"""Ask for the values of tensors that decide how a microbatch goes on, before it runs.

Where code asks a tensor for its value, the graph that was recorded ends there (``capture.python.
answers``). It is run, and leaves nothing but that value, which all workers get; with it there is a
longer graph, and in the end the whole one. So forward is run up to each question, and then once
more: each time from the same state, to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from graphsplit.batches.microbatches import Division
from graphsplit.batches.signature import Signature
from graphsplit.capture.graph import NodeKind
from graphsplit.capture.reach.at_calls import NOTHING_LEFT
from graphsplit.job.job import Job
from graphsplit.partition.checks.one_state import opaque_calls
from graphsplit.planning.planner import Planner
from graphsplit.planning.ready_plan import ReadyPlan
from graphsplit.planning.step_plan import StepPhase, TrainingProgress
from graphsplit.runtime.randomness import all_generators, set_all_generators


@contextmanager
def answered(
    phase: StepPhase,
    division: Division | None,
    step: int,
    planner: Planner,
    job: Job,
    progress: TrainingProgress,
) -> Iterator[StepPhase]:
    """The phase with the whole plan of its microbatch, for what its code asks of tensors.

    Collective. Inside, the answers are known; or it is the plan of what runs before an error.

    Args:
        phase: A phase of a step, whose plan asks.
        division: The batch, which is on all workers.
        step: Number of the step.
        planner: Makes the plans.
        job: The job.
        progress: How far training is.
    """
    assert division is not None
    arguments = division.microbatches[phase.start] if division.weights else division.arguments
    mode, signature = phase.planned.mode, Signature.of(arguments)
    generators = all_generators()
    try:
        while True:
            found = planner.recording_for(mode, signature)
            part = phase.planned.part
            if phase.weights and found.recording.graph.has_replicas:  # behind the question
                part = part._replace(start=phase.start, num_parts=len(division.microbatches))
            phase = phase._replace(planned=planner.plan_for(found, part))
            planner.left = NOTHING_LEFT
            if not phase.planned.asks or phase.planned.ending is not None:
                break
            if phase.weights:
                torch.default_generator.set_state(progress.rng_state(phase.start))
            with leaving_nothing(phase.planned, job.rank):
                value = _asked(phase, step, job.rank)
            set_all_generators(generators)
            home, what = phase.planned.home_of_answer, "a value that forward asks for"
            told = job.control.share_value(value, source=home, what=what)
            planner.answers.add(told.item())
        yield phase
    finally:
        planner.answers.forget()


def _asked(phase: StepPhase, step: int, rank: int) -> torch.Tensor | None:
    planned, (inputs,) = phase.planned, phase.inputs
    if planned.written_inputs:
        inputs = [one.clone() if isinstance(one, torch.Tensor) else one for one in inputs]
    state = planned.runner.run_forward(step, [inputs], planned.numbers)
    (output,) = planned.plan.placed.graph.outputs
    assert output.node is not None
    return state.values[0][output.node] if rank == planned.home_of_answer else None


@contextmanager
def leaving_nothing(planned: ReadyPlan, rank: int) -> Iterator[None]:
    """Run a plan, and put back the buffers and the Python state of this worker that it changes."""
    graph = planned.plan.placed.graph
    changing = {p for p, node in enumerate(graph.nodes) if node.kind is NodeKind.BUFFER}
    state = planned.runner.state
    with ExitStack() as stack, torch.no_grad():
        before = {p: state[p].detach().clone() for p in changing | graph.modified if p in state}
        for position, call in opaque_calls(planned.plan):
            if planned.plan.placed.workers[position] == rank:
                stack.enter_context(call.reached.kept())
        yield
        for position, value in before.items():
            state[position].data.copy_(value)
