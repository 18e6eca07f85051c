"""Orders of the policies besides GPipe and 1F1B, and what ``auto`` chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_helpers import Op, lenet_plan, placed_graph, placed_graphs

from graphsplit.errors import ConfigurationError, ScheduleError
from graphsplit.partition.edges import partition
from graphsplit.partition.plan import BackwardSplit, EdgeKind, PartitionPlan, WeightUse
from graphsplit.partition.splitting import with_splits
from graphsplit.placement.resolve import PlacedGraph
from graphsplit.program.depths import channel_depths
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.program.lower import late_edges, lower
from graphsplit.program.proof import verify_programs
from graphsplit.schedule.auto import NAMED, POLICIES, auto, choose, policy_of, takes_costs, tried
from graphsplit.schedule.costs import Costs, LinkCost
from graphsplit.schedule.estimates import estimated_costs, with_weights_apart
from graphsplit.schedule.named import ZERO_BUBBLE
from graphsplit.schedule.orders import check_orders, checked
from graphsplit.schedule.play import Preference, play
from graphsplit.schedule.simulation.simulate import simulate

_LETTERS = {
    Opcode.FORWARD: "F",
    Opcode.BACKWARD: "B",
    Opcode.BACKWARD_INPUT: "I",
    Opcode.BACKWARD_WEIGHT: "W",
    Opcode.ACCUMULATE: "A",
}


def chain(*workers: int) -> PartitionPlan:
    """One operation after the other, each with a weight; all but the first can be split."""
    names = ["x", *(f"op{i}" for i in range(len(workers)))]
    ops = {
        name: Op(worker, (before, f"w{i}"))
        for i, (worker, before, name) in enumerate(zip(workers, names, names[1:], strict=False))
    }
    parameters = {f"w{i}": worker for i, worker in enumerate(workers)}
    return split_wherever_possible(partition(placed_graph(ops, parameters=parameters)))


def split_wherever_possible(plan: PartitionPlan) -> PartitionPlan:
    """Split operations of any name whose last operand is a weight that nothing else uses."""
    nodes = plan.placed.graph.nodes
    uses = Counter(operand for node in nodes for operand in node.reads)
    splits = {}
    for segment in plan.segments:
        found = [
            WeightUse(p, (len(nodes[p].reads) - 1,), (-1,), 1)
            for p in segment.nodes
            if nodes[p].reads[-1] in plan.io[segment.index].parameters
            and uses[nodes[p].reads[-1]] == 1
        ]
        if found and plan.io[segment.index].leaves:
            splits[segment.index] = BackwardSplit(tuple(found))
    return replace(plan, splits=splits)


def text(
    plan: PartitionPlan, name: str, num_microbatches: int, *, levels: bool = False
) -> list[str]:
    """Each worker's order; segments on a higher level in small letters if asked for."""

    def letter(instruction: Instruction) -> str:
        found = _LETTERS[instruction.opcode]
        is_high = plan.segments[instruction.operand].level >= plan.num_workers
        return (found.lower() if levels and is_high else found) + str(instruction.microbatch)

    return [" ".join(map(letter, order)) for order in POLICIES[name](plan, num_microbatches)]


def test_zero_bubble_on_a_straight_pipeline_runs_as_published() -> None:
    assert text(chain(0, 1, 2), "zero_bubble", 5) == [
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",  # nobody waits for its gradients: it is not split
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4",
    ]


def test_with_one_microbatch_weight_gradients_wait_until_nothing_else_can_run() -> None:
    plan = chain(0, 1, 0, 1)
    assert text(plan, "zero_bubble", 1) == ["F0 F0 I0 W0 B0", "F0 F0 I0 W0 I0 W0"]
    sent = lower(plan, POLICIES["zero_bubble"])[1].instructions
    lines = [str(i) for i in sent]
    first = lines.index("BACKWARD_INPUT mb0 seg3")
    gradient, loss = sent[first + 1], sent[first + 2]
    assert (gradient.opcode, loss.opcode) == (Opcode.SEND, Opcode.SEND)
    assert plan.edges[gradient.operand].kind is EdgeKind.GRADIENT
    assert loss.operand in late_edges(plan)
    assert lines[first + 3] == "BACKWARD_WEIGHT mb0 seg3"


def test_a_worker_begins_the_next_step_while_another_computes_weight_gradients() -> None:
    plan = chain(0, 1)
    plan = replace(plan, splits={1: plan.splits[1]})
    costs = costs_of(plan, (1.0, 1.0, 0.0, 0.0))
    costs = replace(
        costs,
        backward_input={0: 2.0, 1: 1.0},
        backward_weight={1: 1.0},
        backward_whole={},
        links={},
    )
    for number in (3, 4, 8):
        chosen = choose(plan, number, costs)
        programs = lower(plan, partial(_as_given, chosen.orders), num_microbatches=number)
        steps = {num: simulate(plan, programs, costs, num_steps=num) for num in (1, 6)}
        assert steps[1].step_s >= 3 * number + 1  # worker 1 has nothing to do at first
        assert steps[6].step_s == pytest.approx(3 * number)  # both compute all the time
        assert chosen.step_s == pytest.approx(steps[6].step_s)


def _as_given(
    orders: Sequence[Sequence[Instruction]], plan: PartitionPlan, number: int
) -> Sequence[Sequence[Instruction]]:
    return orders


def test_interleaved_sends_groups_of_microbatches_through_every_chunk() -> None:
    plan = replace(chain(0, 1, 0, 1), splits={})
    first, second = text(plan, "interleaved_1f1b", 4, levels=True)
    assert first == "F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3"
    assert second == "F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3"


def proven(plan: PartitionPlan, orders: Sequence[Sequence[Instruction]], number: int) -> None:
    check_orders(plan, orders, number)
    programs = lower(plan, lambda *_: orders, num_microbatches=number)
    verify_programs(plan, programs, depths=channel_depths(programs))


def test_backward_in_the_middle_of_a_step_can_be_whole() -> None:
    plan = chain(0, 1)
    for ends, expected in {
        (1, 1): "F0 I0 F1 W0 B1 F2 B2 F3 B3 F4 B4 F5 I5 W5",
        (0, 2): "F0 B0 F1 B1 F2 B2 F3 B3 F4 I4 W4 F5 I5 W5",
    }.items():
        orders = play(plan, 6, replace(ZERO_BUBBLE, ends=ends))
        assert " ".join(_LETTERS[i.opcode] + str(i.microbatch) for i in orders[1]) == expected
        proven(plan, orders, 6)


@settings(max_examples=25, deadline=None)
@given(
    placed=placed_graphs(),
    number=st.sampled_from([2, 3, 5, 8]),
    ends=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    rule=st.builds(Preference, backward_first=st.booleans(), more=st.integers(0, 2)),
)
def test_any_graph_is_scheduled_with_backwards_whole_and_in_parts(
    placed: PlacedGraph, number: int, ends: tuple[int, int], rule: Preference
) -> None:
    plan = split_wherever_possible(partition(placed, is_microbatched=True))
    orders = play(plan, number, replace(rule, splits=True, ends=ends))
    proven(plan, orders, number)
    parts = [i for order in orders for i in order if i.opcode is Opcode.BACKWARD_INPUT]
    microbatches = set(range(number)) - set(range(ends[0], number - ends[1]))
    assert {i.microbatch for i in parts} == (microbatches if plan.splits else set())


@settings(max_examples=40, deadline=None)
@given(
    placed=placed_graphs(),
    number=st.sampled_from([1, 2, 3, 5, 8]),
    name=st.sampled_from(["interleaved_1f1b", "zero_bubble"]),
)
def test_any_graph_is_scheduled_completely_and_without_deadlock(
    placed: PlacedGraph, number: int, name: str
) -> None:
    plan = split_wherever_possible(partition(placed, is_microbatched=number > 1))
    proven(plan, POLICIES[name](plan, number), number)


@settings(max_examples=6, deadline=None)
@given(placed=placed_graphs(), number=st.sampled_from([1, 4]))
def test_auto_on_any_graph_is_complete_and_free_of_deadlock(
    placed: PlacedGraph, number: int
) -> None:
    plan = split_wherever_possible(partition(placed, is_microbatched=number > 1))
    proven(plan, POLICIES["auto"](plan, number), number)


COSTS = {"as estimated": None, "uneven": (1.0, 4.0, 2.0, 1.0), "one slow": (1.0, 1.0, 5.0, 1.0)}


@pytest.mark.parametrize("number", [1, 4, 8])
@pytest.mark.parametrize("costs", sorted(COSTS))
def test_auto_is_never_slower_than_a_named_policy(costs: str, number: int) -> None:
    plan = chain(0, 1, 2, 3)
    given_costs = costs_of(plan, COSTS[costs])
    chosen = choose(plan, number, given_costs)
    assert given_costs.backward_weight
    for name in NAMED:
        programs = lower(plan, POLICIES[name], num_microbatches=number)
        assert chosen.step_s <= simulate(plan, programs, given_costs, num_steps=2).step_s + 1e-12
    proven(plan, chosen.orders, number)


def costs_of(plan: PartitionPlan, forward: Sequence[float] | None) -> Costs:
    if forward is None:
        return estimated_costs(plan)
    each = dict(enumerate(forward))
    costs = Costs(
        each,
        {segment: 2 * seconds for segment, seconds in each.items()},
        {},
        activations=dict.fromkeys(each, 1000),
        links={(a, b): LinkCost(0.1, 1e9) for a in range(4) for b in range(4)},
    )
    return with_weights_apart(plan, costs)


def test_auto_keeps_within_the_memory_and_says_so_if_it_cannot() -> None:
    plan = chain(0, 1, 2, 3)
    costs = costs_of(plan, (1.0, 4.0, 2.0, 1.0))
    free = choose(plan, 8, costs)
    most = max(free.peak_bytes)
    tight = choose(plan, 8, costs, most - 1000)
    assert max(tight.peak_bytes) <= most - 1000
    assert tight.step_s >= free.step_s
    with pytest.raises(ScheduleError, match=r"no schedule keeps worker \d within 10 B: the one"):
        choose(plan, 8, costs, 10)


def test_auto_is_faster_than_every_named_policy_where_messages_are_slow() -> None:
    plan = chain(0, 1, 2, 3)
    costs = replace(
        costs_of(plan, (1.0, 1.0, 1.0, 1.0)),
        links={(a, b): LinkCost(3.0, 1e9) for a in range(4) for b in range(4)},
    )
    found = {choice.name: choice.step_s for choice in tried(plan, 12, costs)}
    named = [seconds for name, seconds in found.items() if name in ("1f1b", "zero_bubble")]
    assert min(found.values()) < 0.9 * min(named)


def test_auto_on_a_plan_without_operations() -> None:
    placed = placed_graph({"op": Op(0, ("x", "w"))}, parameters={"w": 0})
    graph = placed.graph  # the operation is its last node; the output is the parameter instead
    output = replace(graph.outputs[0], node=1)
    graph = replace(graph, nodes=graph.nodes[:2], outputs=(output,))
    placed = replace(placed, graph=graph, workers=(-1, 0), reasons=placed.reasons[:2])
    plan = partition(placed)
    assert not plan.segments
    assert choose(plan, 1).orders == ([],)


def test_auto_tries_fewer_rules_where_a_step_has_many_computations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = chain(0, 1)
    all_names = [choice.name for choice in tried(plan, 8)]
    names = {}
    for num_rules in (0, 3):
        monkeypatch.setattr("graphsplit.schedule.auto._BUDGET", num_rules * 8 * len(plan.segments))
        names[num_rules] = [choice.name for choice in tried(plan, 8)]
    assert set(names[0]) <= set(NAMED)
    assert len(names[0]) < len(names[3]) <= len(names[0]) + 3 < len(all_names)
    assert names[3] == all_names[: len(names[3])]


def test_auto_holds_no_memory_for_nothing() -> None:
    plan = chain(0, 1)
    plan = replace(plan, splits={1: plan.splits[1]})
    costs = costs_of(plan, (1.0, 1.0, 0.0, 0.0))
    parts = {1: 1.0}
    costs = replace(costs, backward_input={0: 2.0, **parts}, backward_weight=parts, links={})
    found = list(tried(plan, 32, costs))
    fastest = min(choice.step_s for choice in found)
    quick = [choice for choice in found if choice.step_s < 1.005 * fastest]
    chosen = choose(plan, 32, costs)
    assert max(chosen.peak_bytes) < 3500  # one more on worker 0: both compute all the time then
    assert max(max(choice.peak_bytes) for choice in quick) > 4000
    assert chosen.step_s < 1.005 * fastest


def test_auto_runs_backward_whole_where_parts_take_longer_and_nobody_waits() -> None:
    plan = chain(0, 1)
    plan = replace(plan, splits={1: plan.splits[1]})
    costs = replace(
        costs_of(plan, (1.0, 1.0, 0.0, 0.0)),
        backward_input={0: 2.0, 1: 1.1},
        backward_weight={1: 1.1},
        backward_whole={1: 2.0},
        links={},
    )
    chosen = choose(plan, 32, costs)
    kinds = Counter(i.opcode for i in chosen.orders[1])
    assert 0 < kinds[Opcode.BACKWARD_INPUT] <= 8
    assert kinds[Opcode.BACKWARD] + kinds[Opcode.BACKWARD_INPUT] == 32
    free = {1: 1.0}
    costs = replace(costs, backward_input={0: 2.0, **free}, backward_weight=free)
    chosen = choose(plan, 32, costs)
    assert Counter(i.opcode for i in chosen.orders[1])[Opcode.BACKWARD_INPUT] == 32


def test_a_whole_backward_beside_its_parts_is_refused() -> None:
    plan = chain(0, 1)
    given = [list(order) for order in POLICIES["zero_bubble"](plan, 2)]
    given[1].append(Instruction(Opcode.BACKWARD, 1, 1))
    with pytest.raises(ScheduleError, match="worker 1 runs 'BACKWARD_INPUT mb1 seg1' twice"):
        check_orders(plan, given, 2)


def test_a_whole_backward_before_weight_gradients_of_an_earlier_microbatch_is_refused() -> None:
    plan = chain(0, 1)
    parts = (Opcode.BACKWARD_INPUT, Opcode.BACKWARD_WEIGHT)
    given = [list(order) for order in POLICIES["zero_bubble"](plan, 2)]
    given[1] = [i for i in given[1] if i.opcode not in parts or i.microbatch == 0]
    weight = next(i for i in given[1] if i.opcode is Opcode.BACKWARD_WEIGHT)
    given[1].remove(weight)
    given[1] += [Instruction(Opcode.BACKWARD, 1, 1), weight]
    with pytest.raises(ScheduleError, match="'BACKWARD_WEIGHT mb1 seg1' before 'BACKWARD_WEIGHT"):
        check_orders(plan, given, 2)


def test_equal_plans_and_costs_give_equal_orders() -> None:
    first, second = (POLICIES["auto"](with_splits(lenet_plan()), 4) for _ in range(2))
    assert first == second


def test_with_one_microbatch_the_whole_policies_are_one() -> None:
    names = ("gpipe", "1f1b", "interleaved_1f1b")
    assert len({policy_of(name, 1) for name in names}) == 1
    assert len({policy_of(name, 2) for name in names}) == 3


def test_auto_with_a_bound_on_memory_is_given_measured_costs_too() -> None:
    assert [name for name in POLICIES if takes_costs(name)] == ["auto"]
    assert takes_costs(partial(auto, memory_limit=10))
    assert not takes_costs(lambda plan, number: [])


def orders(plan: PartitionPlan) -> list[list[Instruction]]:
    return [list(order) for order in POLICIES["1f1b"](plan, 2)]


def test_an_order_that_leaves_something_out_is_refused() -> None:
    plan = chain(0, 1)
    given = orders(plan)
    given[1].pop()
    with pytest.raises(ScheduleError, match=r"leaves out 'BACKWARD mb1 seg1' of worker 1$"):
        check_orders(plan, given, 2)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda first, second: None, "gave None; expected a list with one list of instructions"),
        (lambda first, second: {0: first, 1: second}, "gave a dict; expected a list with one list"),
        (lambda first, second: [*first, *second], "gave an Instruction for worker 0; expected"),
        (lambda first, second: [["FORWARD mb0 seg0"], second], "has 'FORWARD mb0 seg0' in the ord"),
    ],
)
def test_what_is_no_order_at_all_is_refused(made: Any, message: str) -> None:
    plan = chain(0, 1)
    with pytest.raises(ScheduleError, match=f"the schedule {message}"):
        checked(lambda plan, number: made(*orders(plan)))(plan, 2)


@pytest.mark.parametrize("limit", [4e9, True, 0, "4 GB", {0: 4e9}, {2: 10**9}, {-1: 5}, {"0": 5}])
def test_a_limit_of_memory_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"memory_limit (is|has worker)"):
        auto(chain(0, 1), 2, memory_limit=limit)


def test_an_order_that_computes_twice_too_early_or_elsewhere_is_refused() -> None:
    plan = chain(0, 1)
    first, second = orders(plan)
    with pytest.raises(ScheduleError, match="worker 0 runs 'FORWARD mb0 seg0' twice"):
        check_orders(plan, [[first[0], *first], second], 2)
    with pytest.raises(ScheduleError, match="worker 1 runs 'BACKWARD mb1 seg1' before 'B"):
        check_orders(plan, [first, second[::-1]], 2)
    with pytest.raises(ScheduleError, match="'FORWARD mb0 seg1', which belongs to worker 1"):
        check_orders(plan, [second, first], 2)
    with pytest.raises(
        ScheduleError, match=r"an order for 1 worker\(s\); expected one for each of 2"
    ):
        check_orders(plan, [first], 2)


def test_backward_in_two_parts_is_refused_where_it_cannot_be_split() -> None:
    plan = chain(0, 1)
    first, second = orders(plan)
    parts = [Instruction(Opcode.BACKWARD_INPUT, 0), Instruction(Opcode.BACKWARD_WEIGHT, 0)]
    with pytest.raises(
        ScheduleError, match="backward of seg0 cannot be split\n  Fix: give it 'BACK"
    ):
        check_orders(plan, [[*first[:2], *parts], second], 2)
    with pytest.raises(ScheduleError, match="before 'BACKWARD_INPUT mb0 seg1'"):
        whole = [i for i in second if i.opcode is Opcode.FORWARD]
        kinds = (Opcode.BACKWARD_WEIGHT, Opcode.BACKWARD_INPUT)
        whole += [Instruction(opcode, 1, m) for m in range(2) for opcode in kinds]
        check_orders(plan, [first, whole], 2)
