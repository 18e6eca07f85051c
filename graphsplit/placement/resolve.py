"""Which worker runs this operation? Decided here, and nowhere else.

For every operation the first rule that applies wins:

1. it must run where its operand is made (an element of a tuple; what hands an operand to the
   branches of a ``torch.cond``; the rounding of ``gs.wire``),
2. the innermost ``with gs.place(...)`` or ``gs.op(...).place(...)`` around it,
3. a rule of ``gs.apply_placement`` for operations,
4. for a branch, loop or call that is kept whole: the placed modules whose parameters it uses,
5. the nearest module around it that is placed,
6. the ``unplaced`` rule: ``"affinity"`` (beside the operand that would cost most to move; an
   operation with nothing to move goes where its result is used first) or ``"worker0"``.

A parameter or buffer lives where a rule for parameters says, else where it is used; where several
workers use it, on the nearest placed module's worker if that is one of them, else on the first
that uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from graphsplit.capture.branching import is_branching
from graphsplit.capture.graph import CapturedGraph, Mode, Node, NodeKind
from graphsplit.frames import short_path, warn_users
from graphsplit.marks.annotations import WORKER_ROLE, Annotation, faults_found
from graphsplit.marks.rules import OperationRule
from graphsplit.placement.match import Matched, match_rules
from graphsplit.placement.whole import branches_placed_apart, modules_inside, nearest, torn_apart
from graphsplit.torch_ext.attributes import buffer_of_form

UnplacedRule = Literal["affinity", "worker0"]
EVERYWHERE = -1


@dataclass(frozen=True)
class PlacementRules:
    """All that decides a placement, apart from the graph.

    Attributes:
        num_workers: Size of the cluster.
        modules: Annotation of every placed module, by module path (``""``: the network itself).
        unplaced: What to do with operations that nobody placed.
        owners: Owners of parameters and buffers that an earlier plan has fixed, by name.
        operations: Rules of ``gs.apply_placement`` for operations, in order.
        parameters: Owners that its rules give to parameters and buffers, by name.
        shared_out: Owners that replicas have shared out among them, by name.
        in_lanes: Whether other microbatches run elsewhere: gradients of parameters then go through
            a sum of their own, for their order is that of all microbatches.
        lane: One of the microbatches that these rules are for, and how many there are, where
            replicas share them; modules are those of that lane already.
    """

    num_workers: int
    modules: Mapping[str, Annotation] = field(default_factory=dict)
    unplaced: UnplacedRule = "affinity"
    owners: Mapping[str, int] = field(default_factory=dict)
    operations: tuple[OperationRule, ...] = ()
    parameters: Mapping[str, Annotation] = field(default_factory=dict)
    shared_out: Mapping[str, int] = field(default_factory=dict)
    in_lanes: bool = False
    lane: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class PlacedGraph:
    """A captured graph with a worker, and the reason for it, for every node.

    Attributes:
        graph: The graph.
        workers: Worker of each node, by position; ``EVERYWHERE`` for inputs and constants.
        reasons: Why, in words.
        num_workers: Size of the cluster.
        notes: Placements that decide nothing in this graph, in words.
        in_lanes: As in ``PlacementRules``.
        exchanged: Names of the parameters and buffers that workers of several lanes share out.
    """

    graph: CapturedGraph
    workers: tuple[int, ...]
    reasons: tuple[str, ...]
    num_workers: int
    notes: tuple[str, ...] = ()
    in_lanes: bool = False
    exchanged: frozenset[str] = frozenset()


def resolve(graph: CapturedGraph, rules: PlacementRules) -> PlacedGraph:
    """Give every node its worker.

    Args:
        graph: The graph; what ``branches_to_open`` names was taken apart before.
        rules: What decides.

    Raises:
        PlacementError: Ranks out of range, rules that decide nothing or contradict the code; all
            of them are listed, with the user's lines.
    """
    matched = match_rules(graph, rules.operations)
    check_annotations(graph, rules, matched)
    _warn_of_dead_rules(graph, matched)
    resolver = _Resolver(graph, rules, matched)
    resolver.place_operations()
    resolver.place_state()
    return PlacedGraph(
        graph,
        tuple(resolver.workers),
        tuple(resolver.reasons),
        rules.num_workers,
        (*(text for _, text in _dead_rules(graph, matched)), *resolver.idle_placements()),
        rules.in_lanes,
        frozenset(rules.shared_out if rules.in_lanes else ()),
    )


def branches_to_open(graph: CapturedGraph, rules: PlacementRules) -> frozenset[str]:
    """Names of the ``torch.cond`` operations whose branches these rules place apart."""
    if not any(map(is_branching, graph.fx_graph.nodes)):
        return frozenset()
    decided = match_rules(graph, rules.operations).deciding
    return branches_placed_apart(graph, rules.modules, decided)


def check_annotations(graph: CapturedGraph, rules: PlacementRules, matched: Matched) -> None:
    """Refuse ranks that the job does not have, and rules that cannot be honoured."""
    last = rules.num_workers - 1
    placed = asked_placements(graph, rules)
    too_high = {what: found for what, found in placed.items() if found.highest > last}
    faults = [*_too_high(too_high, last), *matched.faults]
    faults += [
        fault
        for position, inside in modules_inside(graph, rules.modules).items()
        if graph.nodes[position].annotation is None and position not in matched.deciding
        if (fault := torn_apart(graph, position, inside)) is not None
    ]
    dead = _dead_rules(graph, matched)
    if graph.mode is Mode.TRAIN:
        faults += [text for _, text in dead]
    if not faults:
        return
    fix = "mend the lines above."
    if too_high:
        needed = max(found.highest for found in too_high.values()) + 1
        fix = (
            f"start {needed} workers (graphsplit run -n {needed}, or MS_WORKER_NUM={needed}), or "
            f"choose ranks below {rules.num_workers}."
        )
    raise faults_found(faults, fix=fix)


def _too_high(placed: Mapping[str, Annotation], last: int) -> Iterator[str]:
    """One fault for each line that names a rank too high, whatever it places: a slice, a loop."""
    workers = f"workers 0 to {last}" if last else "one worker, 0"
    by_line: dict[tuple[str, int], list[str]] = {}
    for what, found in placed.items():
        by_line.setdefault((found.source, found.highest), []).append(what)
    for (source, rank), (first, *others) in by_line.items():
        are = f" and {len(others)} other{'s' * (len(others) > 1)} are" if others else " is"
        where = f"{WORKER_ROLE} {rank} at {short_path(source)}"
        yield f"{first}{are} placed on {where}, but the job has {workers}"


def asked_placements(graph: CapturedGraph, rules: PlacementRules) -> dict[str, Annotation]:
    """Everything that the user has placed, in words."""
    placed: dict[str, Annotation] = {}
    for path, annotation in rules.modules.items():
        placed[f"module {path!r}" if path else "the network"] = annotation
    for node in graph.nodes:
        if node.annotation is not None:
            placed[f"operation {node.name!r}"] = node.annotation
    for rule in rules.operations:
        placed[str(rule.rule)] = rule.rule.placement
    for name, annotation in rules.parameters.items():
        placed[f"parameter {name!r}"] = annotation
    return placed


def _dead_rules(graph: CapturedGraph, matched: Matched) -> list[tuple[OperationRule, str]]:
    """Rules that match nothing; those of the loss are not missed where there is none."""
    return [
        (rule, f"{rule.rule}: {why}\n    {rule.rule.source}")
        for rule, why in matched.dead
        if rule.loss is None or graph.loss is not None
    ]


# Rules of operations that have matched something in some graph, or were warned about.
_known_rules: weakref.WeakSet[OperationRule] = weakref.WeakSet()


def _warn_of_dead_rules(graph: CapturedGraph, matched: Matched) -> None:
    """Name the rules that match nothing here, nor in any graph so far.

    Only in the graph of training is that a fault: without dropout, say, a rule may have nothing to
    decide.
    """
    _known_rules.update(matched.deciding.values())
    for rule, text in _dead_rules(graph, matched):
        if rule not in _known_rules:
            _known_rules.add(rule)
            warn_users(f"in the {graph.mode.value} graph, {text}")


class _Resolver:
    """The state of one resolution."""

    def __init__(self, graph: CapturedGraph, rules: PlacementRules, matched: Matched) -> None:
        self.nodes = graph.nodes
        self.inside = modules_inside(graph, rules.modules)
        self.state_names = graph.state_names
        self.rules = rules
        self.matched = matched
        # The nearest placed module of each module, and the modules whose placement decided.
        self.around: dict[str, tuple[str, Annotation] | None] = {}
        self.deciding: set[str] = set()
        self.workers: list[int] = [EVERYWHERE] * len(graph.nodes)
        self.reasons: list[str] = ["every worker has it"] * len(graph.nodes)
        self.users: list[list[int]] = [[] for _ in graph.nodes]
        for position, node in enumerate(graph.nodes):
            for operand in node.reads:
                self.users[operand].append(position)

    def place_operations(self) -> None:
        waiting: list[int] = []
        for position, node in enumerate(self.nodes):
            if node.kind is NodeKind.OPERATION and not self._place_now(position, node):
                waiting.append(position)
        for position in reversed(waiting):
            self._place_beside_user(position)

    def _set(self, position: int, worker: int, reason: str) -> bool:
        self.workers[position], self.reasons[position] = worker, reason
        return True

    def _place_now(self, position: int, node: Node) -> bool:
        if node.with_producer:
            producer = next(r for r in node.reads if self.nodes[r].meta is None)
            worker = self.workers[producer]
            if worker == EVERYWHERE:
                return False
            return self._set(position, worker, f"element of {self.nodes[producer].name}")
        if node.stays:
            return self._place_beside_operand(position, node)
        if node.annotation is not None:
            where = node.annotation.source
            rank = node.annotation.in_lane(*self.rules.lane).rank
            return self._set(position, rank, f"gs.place at {where}")
        if position in self.matched.deciding:
            rule = self.matched.deciding[position].rule
            rank = rule.placement.in_lane(*self.rules.lane).rank
            return self._set(position, rank, f"rule {rule.operation!r} at {rule.source}")
        placed = self._nearest(node)
        if position in self.inside:
            self.deciding.update(self.inside[position])
            placed = placed or next(iter(self.inside[position].items()), None)
        if placed is not None:
            path, annotation = placed
            self.deciding.add(path)
            name = f"module {path}" if path else "the network"
            return self._set(position, annotation.rank, f"{name} is placed there")
        if self.rules.unplaced == "worker0":
            return self._set(position, 0, "unplaced: worker 0")
        return self._place_beside_operand(position, node)

    def _nearest(self, node: Node) -> tuple[str, Annotation] | None:
        path = node.module_path
        if path not in self.around:
            self.around[path] = nearest(self.rules.modules, path)
        return self.around[path]

    def _place_beside_operand(self, position: int, node: Node) -> bool:
        heaviest, most = None, -1
        for operand in node.reads[-1:] if node.stays else node.reads:
            worker = self._known_worker(operand)
            meta = self.nodes[operand].meta
            size = meta.size_bytes if meta is not None else 1 << 62  # tuples cannot be moved
            if worker != EVERYWHERE and size > most:
                heaviest, most = operand, size
        if heaviest is None:
            return False
        return self._set(
            position,
            self._known_worker(heaviest),
            f"{'affinity' if node.wire is None else 'wire'}: beside {self.nodes[heaviest].name}",
        )

    def _known_worker(self, position: int) -> int:
        node = self.nodes[position]
        if not node.is_state:
            return self.workers[position]
        owned = self._owned_as(node.target)
        if owned is not None:
            return owned
        owner = self._owner_by_rule(position)
        if owner is not None:
            return owner.rank
        if node.target in self.rules.shared_out:
            return self.rules.shared_out[node.target]
        placed = self._nearest(node)
        return placed[1].rank if placed is not None else EVERYWHERE

    def _owned_as(self, name: str) -> int | None:
        """The owner that an earlier plan has fixed; all forms of a buffer have one."""
        owners = self.rules.owners
        return owners.get(name, owners.get(buffer_of_form(name)))

    def _owner_by_rule(self, position: int) -> Annotation | None:
        """The answer of a rule for parameters, by whichever of a tied parameter's names."""
        names = self.state_names.get(position, (self.nodes[position].target,))
        names = (*names, *map(buffer_of_form, names))
        found = (self.rules.parameters[n] for n in names if n in self.rules.parameters)
        return next(found, None)

    def _place_beside_user(self, position: int) -> None:
        for user in self.users[position]:
            if self.workers[user] != EVERYWHERE:
                self._set(
                    position, self.workers[user], f"affinity: first used by {self.nodes[user].name}"
                )
                break
        else:
            self._set(position, 0, "nothing to be near to: worker 0")
        for user in self.users[position]:
            if self.nodes[user].with_producer:
                self._set(user, self.workers[position], f"element of {self.nodes[position].name}")

    def place_state(self) -> None:
        by_name: dict[str, int] = {}
        for position, node in enumerate(self.nodes):
            if not node.is_state:
                continue
            # A form that waits for a buffer's place comes after it.
            buffer = by_name.get(buffer_of_form(node.target))
            if buffer is not None:
                self._set(position, self.workers[buffer], self.reasons[buffer])
                continue
            by_name[node.target] = position
            users = [self.workers[u] for u in self.users[position]]
            placed = self._nearest(node)
            owner = self._owner_by_rule(position)
            owned = self._owned_as(node.target)
            if owned is not None:
                self._set(position, owned, "an earlier plan put it there")
            elif owner is not None:
                self._set(position, owner.rank, f"rule at {owner.source}")
            elif node.target in self.rules.shared_out:
                owned = self.rules.shared_out[node.target]
                self._set(position, owned, "replicas share the parameters out")
            elif placed is not None and (not users or placed[1].rank in users):
                self._set(position, placed[1].rank, f"module {placed[0] or 'network'} is placed")
            elif users:
                self._set(position, users[0], "first used there")
            else:
                self._set(position, 0, "unused: worker 0")
            if placed is not None and users and self.workers[position] == placed[1].rank:
                self.deciding.add(placed[0])

    def idle_placements(self) -> list[str]:
        """Modules whose placement decides over nothing in this graph."""
        return [
            f"{f'module {path!r}' if path else 'the network'} is placed on worker "
            f"{annotation.rank}, but nothing in this graph is placed by that\n"
            f"    {annotation.source}"
            for path, annotation in self.rules.modules.items()
            if path not in self.deciding
        ]
