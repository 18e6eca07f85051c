"""``auto``: try several rules on a clock of what things cost, and keep the fastest.

Every rule is a list scheduling of the same computations: a worker that is free runs, of what is
ready, what the rule prefers. The named policies are among them, played as ever; the others are
played on a clock of the costs, split and not, with more and fewer microbatches under way. Where a
step has many computations, only the most promising of these are. All are lowered and simulated, as
steps that follow each other. Of those that keep within the memory the fastest is taken, or one that
needs less memory and is as good as equally fast: ``auto`` is never worse, by the simulator, than a
named policy.

Nothing is random, and ties go to the rule that was tried first: equal costs give equal orders on
every worker.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from graphsplit.errors import ConfigurationError, ScheduleError
from graphsplit.partition.dump import human_bytes
from graphsplit.partition.plan import PartitionPlan
from graphsplit.program.instruction import Instruction
from graphsplit.program.lower import Policy, lower
from graphsplit.schedule.costs import CostClock, Costs
from graphsplit.schedule.estimates import estimated_costs, with_weights_apart
from graphsplit.schedule.named import NAMED, RULES, ZERO_BUBBLE, Orders
from graphsplit.schedule.play import Preference, WarmUp, play
from graphsplit.schedule.simulation.simulate import simulate

_BACKWARD_FIRST = "zero_bubble, backward first"
_RULES: Mapping[str, Preference] = {
    _BACKWARD_FIRST: replace(ZERO_BUBBLE, backward_first=True),
    **{name: RULES[name] for name in ("zero_bubble", "1f1b", "interleaved_1f1b")},
}
# Of how many microbatches the backward runs in two parts, by rule; see Rule.ends.
_ENDS = {_BACKWARD_FIRST: ((0, 3), (0, 4), (0, 2)), "zero_bubble": ((1, 1), (2, 2), (4, 4))}
_BUDGET = 100_000  # segments times microbatches times rules: half a minute
_STEPS = 2  # simulated: the second begins as those in the middle of an epoch do
_AS_GOOD = 1.005  # a step that takes this much longer saves memory at no price that could be seen


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
        ConfigurationError: ``memory_limit`` is of a wrong kind, or for a worker that there is not.
    """
    return choose(plan, num_microbatches, costs, memory_limit).orders


def choose(
    plan: PartitionPlan,
    num_microbatches: int,
    costs: Costs | None = None,
    memory_limit: int | Mapping[int, int] | None = None,
) -> Choice:
    """As ``auto``, with what is known of the schedule that was chosen."""
    limits = _limits(memory_limit, plan.num_workers)
    found = list(tried(plan, num_microbatches, costs))
    fitting = [choice for choice in found if choice.fits(limits)]
    if not fitting:
        least = min(
            found,
            key=lambda one: sum(max(0, one.peak_bytes[w] - limits[w]) for w in limits),
        )
        worker = max(limits, key=lambda w: least.peak_bytes[w] - limits[w])
        raise ScheduleError(
            f"no schedule keeps worker {worker} within {human_bytes(limits[worker])}: the one that "
            f"needs least, {least.name}, holds {human_bytes(least.peak_bytes[worker])} of "
            f"activations and messages there, as {'estimated' if costs is None else 'measured'}\n"
            f"  Fix: raise memory_limit, split the batch into more microbatches, or place some of "
            f"what worker {worker} runs elsewhere."
        )
    longest_s = min(choice.step_s for choice in fitting) * _AS_GOOD
    longest_s = min([longest_s, *(c.step_s for c in fitting if c.name in NAMED)])
    as_good = [choice for choice in fitting if choice.step_s <= longest_s]
    return min(as_good, key=lambda choice: (max(choice.peak_bytes), choice.step_s))


def tried(
    plan: PartitionPlan, num_microbatches: int, costs: Costs | None = None
) -> Iterator[Choice]:
    """All schedules that ``auto`` chooses from, each different one once."""
    known = estimated_costs(plan) if costs is None else with_weights_apart(plan, costs)
    seen: set[tuple[tuple[Instruction, ...], ...]] = set()
    for name, orders in _candidates(plan, num_microbatches, known):
        key = tuple(map(tuple, orders))
        if key in seen:
            continue
        seen.add(key)
        programs = lower(plan, lambda *_, given=orders: given, num_microbatches=num_microbatches)
        timeline = simulate(plan, programs, known, num_steps=_STEPS)
        yield Choice(name, orders, timeline.step_s, timeline.peak_bytes)


def _candidates(
    plan: PartitionPlan, num_microbatches: int, costs: Costs
) -> Iterator[tuple[str, Orders]]:
    for name, policy in NAMED.items():
        yield name, policy(plan, num_microbatches)
    clock = CostClock.of(plan, costs)
    num_rules = _BUDGET // max(1, len(plan.segments) * num_microbatches)
    for name, rule in itertools.islice(_rules(plan, num_microbatches), num_rules):
        yield f"{name}, by costs", play(plan, num_microbatches, rule, clock)


def _rules(plan: PartitionPlan, num_microbatches: int) -> Iterator[tuple[str, Preference]]:
    """Rules to try, the most promising first."""
    for more in (1, 2, 0, 4, -1, -num_microbatches):
        if more >= num_microbatches:
            continue
        for name, rule in _RULES.items():
            named, changed = f"{name}, {more:+} under way", replace(rule, more=more)
            yield named, changed
            for first, last in _ENDS.get(name, ()) if plan.splits and 0 <= more <= 2 else ():
                if first + last < num_microbatches:
                    ends = f"{named}, whole but the first {first} and the last {last}"
                    yield ends, replace(changed, ends=(first, last))
    yield "all under way", Preference(warm_up=WarmUp.NONE, splits=True)


def _limits(given: Any, num_workers: int) -> Mapping[int, int]:
    """The limit of every worker that has one."""
    if given is None:
        return {}
    limits: Mapping[Any, Any] = (
        given if isinstance(given, Mapping) else dict.fromkeys(range(num_workers), given)
    )
    for worker, limit in limits.items():
        if type(worker) is not int or not 0 <= worker < num_workers:
            raise ConfigurationError(
                f"memory_limit has worker {worker!r}; the schedule is for workers 0 to "
                f"{num_workers - 1}"
            )
        if type(limit) is not int or limit < 1:
            raise ConfigurationError(
                f"memory_limit is {limit!r}; expected an int of 1 or more, in bytes, or a "
                f"dictionary of one for each worker, as in {{0: 4 * 2**30}}"
            )
    return limits


# The schedules that there are, by name, and what users give in their place.

POLICIES: Mapping[str, Policy] = MappingProxyType({"gpipe": NAMED["gpipe"], **NAMED, "auto": auto})
# With one microbatch these are one and the same.
_WHOLE = ("gpipe", "1f1b", "interleaved_1f1b")


def policy_of(schedule: str | Policy, num_microbatches: int) -> Policy:
    """The policy that a name stands for, or the user's own."""
    if not isinstance(schedule, str):
        return schedule
    return POLICIES["gpipe" if num_microbatches == 1 and schedule in _WHOLE else schedule]


def takes_costs(schedule: str | Policy) -> bool:
    """Whether a policy asks, by a parameter ``costs``, for what steps were found to cost."""
    policy = POLICIES[schedule] if isinstance(schedule, str) else schedule
    return "costs" in inspect.signature(policy).parameters
