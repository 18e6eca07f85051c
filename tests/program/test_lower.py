"""Programs hold every message once at each end, each receive right before its first need."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from pass_helpers import Op, placed_graph, placed_graphs

from graphsplit.capture.graph import Mode, NodeKind
from graphsplit.partition.edges import partition
from graphsplit.partition.plan import EdgeKind, PartitionPlan, SumTerm
from graphsplit.placement.resolve import PlacedGraph
from graphsplit.program.instruction import Instruction, Opcode
from graphsplit.program.lower import Policy, WorkerProgram, late_edges, lower
from graphsplit.schedule.named import NAMED, gpipe

EXAMPLES = settings(max_examples=60, deadline=None)
MICROBATCHES = st.integers(1, 3)
MODES = st.sampled_from([Mode.TRAIN, Mode.PREDICT])


def in_mode(graph: PlacedGraph, mode: Mode) -> PlacedGraph:
    return replace(graph, graph=replace(graph.graph, mode=mode))


def text(program: WorkerProgram) -> list[str]:
    return [str(instruction) for instruction in program.instructions]


def needs(plan: PartitionPlan, instruction: Instruction) -> set[int]:
    """Edges that an instruction cannot do without, were it run on another worker's values."""
    if instruction.opcode is Opcode.FORWARD:
        segment = plan.segments[instruction.operand]
        io = plan.io[segment.index]
        reads = {*io.values, *(plan.contributions[c].value for c in io.leaves)}
        return {
            e.index
            for e in plan.edges
            if e.destination == segment.worker
            and (
                (e.kind is EdgeKind.VALUE and e.value in reads)
                or (e.kind is EdgeKind.GENERATOR and io.is_random)
            )
        }
    sums: list[tuple[SumTerm, ...]] = []
    if instruction.opcode is Opcode.BACKWARD:
        io = plan.io[instruction.operand]
        sums = [plan.gradient_sums.get(root, ()) for root in io.roots]
        sums += [plan.seeds.get(leaf, ()) for leaf in io.leaves]
    elif instruction.opcode is Opcode.ACCUMULATE:
        sums = [plan.gradient_sums[instruction.operand]]
    return {term.edge for terms in sums for term in terms if term.edge is not None}


@EXAMPLES
@given(placed_graphs(), MICROBATCHES, MODES)
def test_every_send_has_one_receive_and_none_is_left_out(
    graph: PlacedGraph, num_microbatches: int, mode: Mode
) -> None:
    plan = partition(in_mode(graph, mode))
    found: Counter[tuple[Opcode, int, int, int]] = Counter()
    for program in lower(plan, gpipe, num_microbatches=num_microbatches):
        for i in program.instructions:
            if i.opcode in (Opcode.SEND, Opcode.RECEIVE):
                found[i.opcode, program.worker, i.operand, i.microbatch] += 1
    expected = {
        (opcode, worker, edge.index, microbatch): 1
        for edge in plan.edges
        for microbatch in range(1 if edge.per_step else num_microbatches)
        for opcode, worker in (
            (Opcode.SEND, edge.source),
            (Opcode.RECEIVE, edge.destination),
        )
    }
    assert found == expected


@EXAMPLES
@given(placed_graphs(), MICROBATCHES)
def test_a_receive_stands_right_before_what_needs_it_first(
    graph: PlacedGraph, num_microbatches: int
) -> None:
    plan = partition(graph)
    for program in lower(plan, gpipe, num_microbatches=num_microbatches):
        waiting: list[Instruction] = []
        end = program.instructions.index(Instruction(Opcode.OPTIMIZER))
        for instruction in program.instructions[:end]:
            if instruction.opcode is Opcode.RECEIVE:
                waiting.append(instruction)
                continue
            assert {i.operand for i in waiting} <= needs(plan, instruction)
            waiting = []
        # What a callback that is shown the gradients may draw from.
        assert {plan.edges[i.operand].kind for i in waiting} <= {EdgeKind.GENERATOR}
        late = {i.operand for i in program.instructions[end:] if i.opcode is Opcode.RECEIVE}
        assert late <= late_edges(plan)


@EXAMPLES
@given(placed_graphs(), MICROBATCHES)
def test_nothing_runs_before_what_it_needs_is_there(
    graph: PlacedGraph, num_microbatches: int
) -> None:
    plan = partition(graph)
    nodes = graph.graph.nodes
    for program in lower(plan, gpipe, num_microbatches=num_microbatches):
        here = {
            (p, m)
            for p, node in enumerate(nodes)
            for m in range(num_microbatches)
            if node.is_everywhere or (node.is_state and graph.workers[p] == program.worker)
        }
        received: set[tuple[int, int]] = set()
        for i in program.instructions:
            if i.opcode is Opcode.RECEIVE:
                edge = plan.edges[i.operand]
                each = range(num_microbatches) if edge.per_step else (i.microbatch,)
                if edge.kind is EdgeKind.VALUE:
                    here |= {(edge.value, m) for m in each}
                received |= {(edge.index, m) for m in each}
            elif i.opcode is Opcode.FORWARD:
                io = plan.io[i.operand]
                reads = {*io.values, *(plan.contributions[c].value for c in io.leaves)}
                assert {(v, i.microbatch) for v in reads} <= here
                here |= {(v, i.microbatch) for v in io.outputs}
            elif i.opcode is Opcode.SEND and plan.edges[i.operand].kind is EdgeKind.VALUE:
                assert (plan.edges[i.operand].value, i.microbatch) in here
            elif i.opcode in (Opcode.BACKWARD, Opcode.ACCUMULATE):
                assert {(edge, i.microbatch) for edge in needs(plan, i)} <= received


@EXAMPLES
@given(
    placed_graphs(),
    MICROBATCHES,
    st.sampled_from(list(NAMED.values())),
)
def test_what_only_the_end_of_a_step_needs_goes_out_behind_the_next_gradients(
    graph: PlacedGraph, num_microbatches: int, policy: Policy
) -> None:
    plan = partition(graph, is_microbatched=num_microbatches > 1)
    segment_of = plan.segmentation.segment_of
    late = {e for e in late_edges(plan) if segment_of[plan.edges[e].value] >= 0}
    for program in lower(plan, policy, num_microbatches=num_microbatches):
        instructions = program.instructions
        for position, send in enumerate(instructions):
            if send.opcode is not Opcode.SEND or send.operand not in late:
                continue
            before = [i for i in instructions[:position] if i.opcode is not Opcode.SEND]
            after = [i.opcode for i in instructions[position:]]
            segment = segment_of[plan.edges[send.operand].value]
            made = before.index(Instruction(Opcode.FORWARD, segment, send.microbatch))
            backward = [
                i
                for i in (*before[made:], *instructions[position:])
                if i.opcode in (Opcode.BACKWARD, Opcode.BACKWARD_INPUT)
                and i.microbatch == send.microbatch
            ]
            if backward:
                assert before[-1] == backward[0]
            else:
                assert Opcode.FORWARD not in after and Opcode.BACKWARD not in after


def two_workers() -> PlacedGraph:
    ops = {"a": Op(0, ("x", "w")), "b": Op(1, ("a", "w")), "c": Op(0, ("b",))}
    return placed_graph(ops, parameters={"w": 0})


def test_a_step_with_a_borrowed_parameter_in_full() -> None:
    plan = partition(two_workers())
    first, second = lower(plan, gpipe)
    assert text(first) == [
        "ZERO_GRADIENTS",
        "SEND mb0 edge0",  # the parameter: its owner has it before anything runs
        "FORWARD mb0 seg0",
        "SEND mb0 edge1",
        "RECEIVE mb0 edge2",
        "FORWARD mb0 seg2",
        "BACKWARD mb0 seg2",
        "SEND mb0 edge6",
        "SEND mb0 edge3",  # the loss: behind the gradient, since no segment waits for it
        "RECEIVE mb0 edge5",
        "BACKWARD mb0 seg0",
        "RECEIVE mb0 edge4",
        "ACCUMULATE mb0 v1",
        "OPTIMIZER",
    ]
    assert text(second) == [
        "ZERO_GRADIENTS",
        "RECEIVE mb0 edge0",
        "RECEIVE mb0 edge1",
        "FORWARD mb0 seg1",
        "SEND mb0 edge2",
        "RECEIVE mb0 edge6",
        "BACKWARD mb0 seg1",
        "SEND mb0 edge4",
        "SEND mb0 edge5",
        "OPTIMIZER",
        "RECEIVE mb0 edge3",
    ]


def test_without_training_nothing_runs_backward() -> None:
    plan = partition(in_mode(two_workers(), Mode.PREDICT))
    opcodes = {i.opcode for program in lower(plan, gpipe) for i in program.instructions}
    assert opcodes == {Opcode.FORWARD, Opcode.SEND, Opcode.RECEIVE}


def test_a_worker_without_operations_still_steps_and_gets_the_loss() -> None:
    plan = partition(placed_graph({"a": Op(0, ("x", "w"))}, parameters={"w": 0}, num_workers=2))
    assert text(lower(plan, gpipe)[1]) == ["ZERO_GRADIENTS", "OPTIMIZER", "RECEIVE mb0 edge0"]


def with_buffer(graph: PlacedGraph, *, modified_by: str = "") -> PlacedGraph:
    """The graph with a buffer for its parameter."""
    nodes = list(graph.graph.nodes)
    position = next(p for p, node in enumerate(nodes) if node.is_state)
    nodes[position] = replace(nodes[position], kind=NodeKind.BUFFER, requires_grad=False)
    for p, node in enumerate(nodes):
        if node.name == modified_by:
            nodes[p] = replace(node, changes_inputs=True, shares_modified=((position, True),))
    return replace(graph, graph=replace(graph.graph, nodes=tuple(nodes)))


def test_a_borrowed_buffer_travels_once() -> None:
    plan = partition(with_buffer(two_workers()))
    programs = [text(program) for program in lower(plan, gpipe, num_microbatches=2)]
    assert [line for line in programs[0] if line.endswith("edge0")] == ["SEND mb0 edge0"]
    assert [line for line in programs[1] if line.endswith("edge0")] == ["RECEIVE mb0 edge0"]


def test_a_borrowed_buffer_that_changes_travels_when_the_microbatch_before_has_changed_it() -> None:
    ops = {"a": Op(1, ("x", "w")), "b": Op(0, ("a", "w"))}
    graph = with_buffer(placed_graph(ops, parameters={"w": 0}), modified_by="b")
    plan = partition(graph)
    first, second = (text(program) for program in lower(plan, gpipe, num_microbatches=3))
    forward = first.index("FORWARD mb2 seg1")
    assert first[1 : forward + 1] == [
        "SEND mb0 edge0",
        "RECEIVE mb0 edge1",
        "FORWARD mb0 seg1",
        "SEND mb1 edge0",
        "RECEIVE mb1 edge1",
        "FORWARD mb1 seg1",
        "SEND mb2 edge0",
        "RECEIVE mb2 edge1",
        "FORWARD mb2 seg1",
    ]
    assert second[1:5] == [
        "RECEIVE mb0 edge0",
        "FORWARD mb0 seg0",
        "SEND mb0 edge1",
        "RECEIVE mb1 edge0",
    ]


def test_the_parts_of_a_step_zero_gradients_first_and_step_the_optimizer_last() -> None:
    plan = partition(two_workers())
    for first, last in ((True, False), (False, False), (False, True)):
        for program in lower(plan, gpipe, num_microbatches=2, first=first, last=last):
            opcodes = [i.opcode for i in program.instructions]
            assert (Opcode.ZERO_GRADIENTS in opcodes) == first
            assert (Opcode.OPTIMIZER in opcodes) == last


def chain_with_a_shared_weight(owner: int) -> PlacedGraph:
    """Four workers in a row; the first and the last use one weight, which one of them owns."""
    ops = {
        "a": Op(0, ("x", "w")),
        "b": Op(1, ("a",)),
        "c": Op(2, ("b",)),
        "d": Op(3, ("c", "w")),
    }
    return placed_graph(ops, parameters={"w": owner})


def order_of_accumulation(owner: int) -> str:
    plan = partition(chain_with_a_shared_weight(owner))
    program = lower(plan, gpipe, num_microbatches=5)[owner]
    return " ".join(
        f"{i.opcode.value[0]}{i.microbatch}"
        for i in program.instructions
        if i.opcode in (Opcode.BACKWARD, Opcode.ACCUMULATE)
    )


def test_gradients_from_higher_levels_are_added_right_after_each_microbatch() -> None:
    assert order_of_accumulation(owner=0) == "B0 A0 B1 A1 B2 A2 B3 A3 B4 A4"


def test_the_last_worker_does_not_wait_for_gradients_from_the_first() -> None:
    assert order_of_accumulation(owner=3) == "B0 B1 B2 B3 A0 B4 A1 A2 A3 A4"
