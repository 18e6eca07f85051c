"""How deep channels must be, found by playing the programs through."""

from __future__ import annotations

from pass_helpers import Op, placed_graph

from graphsplit.partition.edges import partition
from graphsplit.program.depths import channel_depths
from graphsplit.program.instruction import Instruction
from graphsplit.program.lower import WorkerProgram, lower
from graphsplit.schedule.named import gpipe


def test_channels_are_as_deep_as_the_levels_they_cross() -> None:
    ops = {
        "a": Op(0, ("x", "w")),
        "b": Op(1, ("a",)),
        "c": Op(2, ("b",)),
        "d": Op(3, ("a", "c")),
    }
    plan = partition(placed_graph(ops, parameters={"w": 0}))
    depths = channel_depths(lower(plan, gpipe, num_microbatches=8))
    found = {
        (e.kind.value, plan.placed.graph.nodes[e.value].name, e.destination): depths[e.index]
        for e in plan.edges
        if e.index in depths
    }
    losses = {("value", "d", worker): 8 for worker in range(3)}  # received at the end of the step
    assert found == {("value", "a", 3): 4, ("gradient", "a", 0): 3, **losses}
    assert channel_depths(lower(plan, gpipe, num_microbatches=2)) == {}


def test_programs_that_cannot_go_on_end_the_play() -> None:
    programs = [
        WorkerProgram(worker, 3, tuple(map(Instruction.parse, texts)))
        for worker, texts in enumerate(
            [
                ["SEND mb0 edge0", "SEND mb1 edge0", "SEND mb2 edge0", "RECEIVE mb0 edge1"],
                ["RECEIVE mb0 edge2"],
            ]
        )
    ]
    assert channel_depths(programs) == {0: 3}
