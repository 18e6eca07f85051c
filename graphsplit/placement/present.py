"""A placement while some workers are away: its replicas are those that are left.

Scripts name workers by their *seats*, the ranks that they had when all were there. A generation
that goes on without some of them counts those that it has from 0::

    seats that are there   0  1  3        net.body.place([1, 2, 3])  is on workers [1, 2]
    workers                0  1  2        net.head.place(0)          is on worker 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphsplit.capture.graph import CapturedGraph
from graphsplit.frames import short_path
from graphsplit.marks.annotations import WORKER_ROLE, Annotation, faults_found
from graphsplit.placement.resolve import PlacementRules, asked_placements


def graph_among(
    graph: CapturedGraph, rules: PlacementRules, seats: Sequence[int] | None
) -> CapturedGraph:
    """A graph whose ``gs.place`` blocks are on the workers that are there.

    Args:
        graph: The graph, as it was captured.
        rules: The rules, as the script wrote them.
        seats: The workers that are there; None: all are.

    Raises:
        PlacementError: Nothing is replicated; or something was on workers alone that are away.
    """
    if seats is None:
        _check_any_replicated(graph, rules)
        return graph
    _check_all_left(graph, rules, seats)
    found = (None if n.annotation is None else n.annotation.among(seats) for n in graph.nodes)
    pairs = zip(graph.nodes, found, strict=True)
    return replace(graph, nodes=tuple(replace(n, annotation=a) if a else n for n, a in pairs))


def modules_among(
    modules: dict[str, Annotation], seats: Sequence[int] | None
) -> dict[str, Annotation]:
    """The placements of modules that have a worker left; all of them if ``seats`` is None."""
    if seats is None:
        return modules
    found = {path: annotation.among(seats) for path, annotation in modules.items()}
    return {path: annotation for path, annotation in found.items() if annotation is not None}


def rules_among(rules: PlacementRules, seats: Sequence[int]) -> PlacementRules:
    """Rules whose operations and parameters are on the workers that are there."""
    operations = []
    for one in rules.operations:
        placement = one.rule.placement.among(seats)
        if placement is not None:
            operations.append(replace(one, rule=replace(one.rule, placement=placement)))
    parameters = {name: a.among(seats) for name, a in rules.parameters.items()}
    kept = {name: a for name, a in parameters.items() if a is not None}
    return replace(rules, operations=tuple(operations), parameters=kept)


def _check_all_left(graph: CapturedGraph, rules: PlacementRules, seats: Sequence[int]) -> None:
    lost = {w: a for w, a in asked_placements(graph, rules).items() if a.among(seats) is None}
    if lost:
        faults = [
            f"{what} is on {WORKER_ROLE} {annotation.where} alone, and no such worker is left: "
            f"placed at {short_path(annotation.source)}"
            for what, annotation in lost.items()
        ]
        raise faults_found(
            faults,
            fix="place it on several workers: under GS_RECOVERY=go_on a job goes on as long as "
            "each replicated piece has one left; or start the lost worker again in time, under "
            "wait_rejoin.",
        )


def _check_any_replicated(graph: CapturedGraph, rules: PlacementRules) -> None:
    asked = asked_placements(graph, rules).values()
    if rules.num_workers > 1 and not any(annotation.replicas for annotation in asked):
        raise faults_found(
            ["GS_RECOVERY=go_on, and nothing of the network is placed on several workers"],
            fix="place what trains on several workers, as in net.place([0, 1]), or set "
            "GS_RECOVERY=wait_rejoin, where a lost worker is waited for.",
        )
