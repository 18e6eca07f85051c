"""Which worker runs this operation? Decided here, and nowhere else.

For every operation the first rule that applies wins:

1. it must run where its operand is made (an element of a tuple),
2. the innermost ``with gs.place(...)`` or ``gs.op(...).place(...)`` around it,
3. the nearest module around it that is placed,
4. the ``unplaced`` rule: ``"affinity"`` (beside the operand that would cost most to move; an
   operation with nothing to move goes where its result is used first) or ``"worker0"``.

A parameter or buffer lives where it is used; where several workers use it, on the nearest placed
module's worker if that is one of them, else on the first that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from graphsplit.capture.graph import LOSS_PATH, CapturedGraph, Node, NodeKind
from graphsplit.errors import PlacementError
from graphsplit.placement.annotations import WORKER_ROLE, Annotation

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
    """

    num_workers: int
    modules: Mapping[str, Annotation] = field(default_factory=dict)
    unplaced: UnplacedRule = "affinity"
    owners: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PlacedGraph:
    """A captured graph with a worker, and the reason for it, for every node.

    Attributes:
        graph: The graph.
        workers: Worker of each node, by position; ``EVERYWHERE`` for inputs and constants.
        reasons: Why, in words.
        num_workers: Size of the cluster.
    """

    graph: CapturedGraph
    workers: tuple[int, ...]
    reasons: tuple[str, ...]
    num_workers: int


def resolve(graph: CapturedGraph, rules: PlacementRules) -> PlacedGraph:
    """Give every node its worker.

    Raises:
        PlacementError: Ranks out of range; all of them are listed, with the user's lines.
    """
    check_annotations(graph, rules)
    resolver = _Resolver(graph, rules)
    resolver.place_operations()
    resolver.place_state()
    return PlacedGraph(graph, tuple(resolver.workers), tuple(resolver.reasons), rules.num_workers)


def check_annotations(graph: CapturedGraph, rules: PlacementRules) -> None:
    """Refuse ranks that the job does not have."""
    faults: dict[str, Annotation] = {}
    for path, annotation in rules.modules.items():
        if annotation.rank >= rules.num_workers:
            faults[f"module {path!r}" if path else "the network"] = annotation
    for node in graph.nodes:
        if node.annotation is not None and node.annotation.rank >= rules.num_workers:
            faults[f"operation {node.name!r}"] = node.annotation
    if not faults:
        return
    last = rules.num_workers - 1
    workers = f"workers 0 to {last}" if last else "one worker, 0"
    lines = [
        f"{what} is placed on {WORKER_ROLE} {found.rank}, but the job has {workers}\n"
        f"    {found.source}"
        for what, found in faults.items()
    ]
    needed = max(found.rank for found in faults.values()) + 1
    raise PlacementError(
        "\n  ".join([f"{len(lines)} placement(s) cannot be honoured:", *lines])
        + f"\n  Fix: start with MS_WORKER_NUM={needed}, or choose ranks below {rules.num_workers}."
    )


def nearest(modules: Mapping[str, Annotation], path: str) -> tuple[str, Annotation] | None:
    """The nearest placed module around a module path, itself included."""
    inside_loss = path.partition(".")[0] == LOSS_PATH  # the loss is no part of the network
    while path:
        if path in modules:
            return path, modules[path]
        path = path.rpartition(".")[0]
        if not path and inside_loss:
            return None
    return ("", modules[""]) if "" in modules else None


class _Resolver:
    """The state of one resolution."""

    def __init__(self, graph: CapturedGraph, rules: PlacementRules) -> None:
        self.nodes = graph.nodes
        self.rules = rules
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
        if node.annotation is not None:
            where = node.annotation.source
            return self._set(position, node.annotation.rank, f"gs.place at {where}")
        placed = nearest(self.rules.modules, node.module_path)
        if placed is not None:
            path, annotation = placed
            name = f"module {path}" if path else "the network"
            return self._set(position, annotation.rank, f"{name} is placed there")
        if self.rules.unplaced == "worker0":
            return self._set(position, 0, "unplaced: worker 0")
        return self._place_beside_operand(position, node)

    def _place_beside_operand(self, position: int, node: Node) -> bool:
        heaviest, most = None, -1
        for operand in node.reads:
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
            f"affinity: beside {self.nodes[heaviest].name}",
        )

    def _known_worker(self, position: int) -> int:
        node = self.nodes[position]
        if not node.is_state:
            return self.workers[position]
        if node.target in self.rules.owners:
            return self.rules.owners[node.target]
        placed = nearest(self.rules.modules, node.module_path)
        return placed[1].rank if placed is not None else EVERYWHERE

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
        for position, node in enumerate(self.nodes):
            if not node.is_state:
                continue
            users = [self.workers[u] for u in self.users[position]]
            placed = nearest(self.rules.modules, node.module_path)
            if node.target in self.rules.owners:
                self._set(position, self.rules.owners[node.target], "an earlier plan put it there")
            elif placed is not None and (not users or placed[1].rank in users):
                self._set(position, placed[1].rank, f"module {placed[0] or 'network'} is placed")
            elif users:
                self._set(position, users[0], "first used there")
            else:
                self._set(position, 0, "unused: worker 0")
