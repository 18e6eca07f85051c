"""``auto``: try several rules on a clock of what things cost, and keep the fastest.

Every rule is a list scheduling of the same computations: a worker that is free runs, of what is
ready, what the rule prefers. The named policies are among them, played as ever; the others are
played on a clock of the costs, split and not, with more and fewer microbatches under way. All are
lowered and simulated, and the fastest of those that keep within the memory is taken: so ``auto`` is
never worse, by the simulator, than a named policy.

Nothing is random, and ties go to the rule that was tried first: equal costs give equal orders on
every worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from graphsplit.errors import ScheduleError
from graphsplit.partition.dump import human_bytes
from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.instruction import Instruction
from graphsplit.program.lower import lower
from graphsplit.schedule import gpipe, interleaved, one_forward_one_backward, zero_bubble
from graphsplit.schedule.clock import Clock, CostClock, UnitClock
from graphsplit.schedule.costs import Costs
from graphsplit.schedule.estimates import estimated_costs, with_weights_apart
from graphsplit.schedule.play import Rule, play
from graphsplit.schedule.simulate import simulate
from graphsplit.schedule.warm_up import WarmUp

Orders = tuple[Sequence[Instruction], ...]
NAMED: Mapping[str, Rule] = {
    "1f1b": one_forward_one_backward.RULE,
    "zero_bubble": zero_bubble.RULE,
    "interleaved_1f1b": interleaved.RULE,
    "gpipe": gpipe.RULE,
}
_MANY = 200_000  # computations of a step beyond which only the named policies are tried
_STEPS = 2  # simulated: the second begins as those in the middle of an epoch do


@dataclass(frozen=True)
class Choice:
    """A schedule that was tried.

    Attributes:
        name: What it is, for people.
        orders: The compute of all workers.
        step_s: How long a step takes, by simulation.
        peak_bytes: The most bytes that activations and messages take at once, by worker.
    """

    name: str
    orders: Orders
    step_s: float
    peak_bytes: tuple[int, ...]

    def fits(self, limits: Mapping[int, int]) -> bool:
        """Whether it keeps within the memory."""
        return all(self.peak_bytes[worker] <= limit for worker, limit in limits.items())


def auto(
    plan: PartitionPlan,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_limit: int | Mapping[int, int] | None = None,
) -> Orders:
    """The compute of all workers, each in the order to run it.

    Args:
        plan: The plan.
        num_microbatches: How many microbatches.
        costs: What computing and moving costs; None: as estimated from the graph.
        memory_limit: The most bytes that activations and messages may take: of every worker, or by
            worker.

    Raises:
        ScheduleError: No schedule that was tried keeps within the memory.
    """
    return choose(plan, num_microbatches, costs, memory_limit).orders


def choose(
    plan: PartitionPlan,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_limit: int | Mapping[int, int] | None = None,
) -> Choice:
    """As ``auto``, with what is known of the schedule that was chosen."""
    found = tried(plan, num_microbatches, costs)
    if isinstance(memory_limit, int):
        memory_limit = dict.fromkeys(range(plan.num_workers), memory_limit)
    limits = memory_limit or {}
    best: Choice | None = None
    least: Choice | None = None
    for choice in found:
        if choice.fits(limits) and (best is None or choice.step_s < best.step_s):
            best = choice
        if least is None or _excess(choice, limits) < _excess(least, limits):
            least = choice
    if best is None:
        assert least is not None
        worker = max(limits, key=lambda w: least.peak_bytes[w] - limits[w])
        raise ScheduleError(
            f"no schedule keeps worker {worker} within {human_bytes(limits[worker])}: the one that "
            f"needs least, {least.name}, holds {human_bytes(least.peak_bytes[worker])} of "
            f"activations and messages there\n"
            f"  Fix: raise memory_limit, split the batch into more microbatches, or place some of "
            f"what worker {worker} runs elsewhere."
        )
    return best


def tried(
    plan: PartitionPlan, num_microbatches: int, costs: Costs | None = None
) -> Iterator[Choice]:
    """All schedules that ``auto`` chooses from, each different one once."""
    known = estimated_costs(plan) if costs is None else with_weights_apart(plan, costs)
    seen: set[tuple[tuple[Instruction, ...], ...]] = set()
    for name, rule, clock in _candidates(plan, num_microbatches, known):
        orders = play(plan, num_microbatches, rule, clock)
        key = tuple(map(tuple, orders))
        if key in seen:
            continue
        seen.add(key)
        given = orders  # the loop's variable changes

        def as_given(
            plan: PartitionPlan, number: int, given: Orders = given
        ) -> Sequence[Sequence[Instruction]]:
            return given

        programs = lower(plan, as_given, num_microbatches=num_microbatches)
        timeline = simulate(plan, programs, known, num_steps=_STEPS)
        yield Choice(name, orders, timeline.step_s, timeline.peak_bytes)


def _candidates(
    plan: PartitionPlan, num_microbatches: int, costs: Costs
) -> Iterator[tuple[str, Rule, Clock]]:
    for name, rule in NAMED.items():
        yield name, rule, UnitClock()
    if len(plan.segments) * num_microbatches > _MANY:
        return
    clock = CostClock.of(plan, costs)
    for more in (0, 1, 2, 4, -1, -num_microbatches):
        if more < num_microbatches:
            for name in ("1f1b", "zero_bubble", "interleaved_1f1b"):
                rule = replace(NAMED[name], more=more)
                yield f"{name}, by costs, {more:+} under way", rule, clock
    yield "all under way, by costs", Rule(warm_up=WarmUp.NONE, splits=True), clock


def _excess(choice: Choice, limits: Mapping[int, int]) -> int:
    return sum(max(0, choice.peak_bytes[worker] - limit) for worker, limit in limits.items())
