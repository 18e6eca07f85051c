"""Write a resolved placement out as rules that ``gs.apply_placement`` turns into the same plan.

Modules come first, each with a worker of its own only where it differs from the module around it;
then the operations, and the owners of parameters, that modules alone would put elsewhere. Whether
the rules are right is not argued but tried: they are resolved over the same graph.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from graphsplit.capture.graph import LOSS_PATH
from graphsplit.errors import InvariantError, PlacementError
from graphsplit.marks.annotations import Annotation
from graphsplit.marks.pattern import NETWORK, read_names, read_pattern, read_slice
from graphsplit.marks.rules import OperationRule
from graphsplit.marks.source import MODULES, OPERATIONS, PARAMETERS, Rule
from graphsplit.placement.match import operations_by_module
from graphsplit.placement.replicas import replicated
from graphsplit.placement.resolve import PlacedGraph, PlacementRules, resolve
from graphsplit.placement.whole import nearest
from graphsplit.text import short_source

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a path that is a number


@dataclass(frozen=True)
class WrittenPlacement:
    """A placement as rules.

    Attributes:
        modules: Worker by pattern.
        operations: Worker by pattern of modules, and pattern of operations.
        parameters: Owner by pattern of names.
        why: A remark on each rule, by section and patterns.
        title: What it is the placement of.
    """

    modules: dict[str, int]
    operations: dict[str, dict[str, int]]
    parameters: dict[str, int]
    why: dict[tuple[str, ...], str]
    title: str

    def as_mapping(self) -> dict[str, Any]:
        """The mapping that ``gs.apply_placement`` takes."""
        sections = {
            MODULES: self.modules,
            OPERATIONS: self.operations,
            PARAMETERS: self.parameters,
        }
        return {name: section for name, section in sections.items() if section}

    def as_yaml(self) -> str:
        """A file with a remark on every rule."""
        lines = [f"# {self.title}", "# A module takes along all inside it that has no rule."]
        for section, rules in self.as_mapping().items():
            lines.append(f"{section}:")
            for pattern, value in rules.items():
                if not isinstance(value, Mapping):
                    why = self.why.get((section, pattern), "")
                    lines.append(_line(f"  {_scalar(pattern)}: {value}", why))
                    continue
                lines.append(f"  {_scalar(pattern)}:")
                for operation, rank in value.items():
                    why = self.why.get((section, pattern, operation), "")
                    lines.append(_line(f"    {_scalar(operation)}: {rank}", why))
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        """Write a YAML file, or a JSON file where the name ends in ``.json``."""
        path = Path(path)
        if path.suffix == ".json":
            path.write_text(json.dumps(self.as_mapping(), indent=2) + "\n")
        else:
            path.write_text(self.as_yaml())


def write_placement(
    placed: PlacedGraph, rules: PlacementRules, network: nn.Module
) -> WrittenPlacement:
    """The rules that reproduce a placement.

    Args:
        placed: The placement, resolved.
        rules: What it was resolved from.
        network: The network; only its names are looked at.

    Raises:
        PlacementError: Modules are replicated: a placement names one worker each.
    """
    if replicated(placed.graph, rules):
        raise PlacementError(
            "this network has modules on several workers, and what is written names one worker "
            "each\n  Fix: keep .place in the code, or your rules; there is nothing to write."
        )
    writer = _Writer(placed, rules, network)
    writer.choose_modules()
    writer.add_operations()
    writer.add_owners()
    return writer.written()


class _Writer:
    """Collects rules until resolving them gives the placement that is asked for."""

    def __init__(self, placed: PlacedGraph, rules: PlacementRules, network: nn.Module) -> None:
        self._placed = placed
        # What stands in the code stays there, under the new rules as under the old ones.
        self._code = {path: a for path, a in rules.modules.items() if not a.by_rule}
        self._unplaced = rules.unplaced
        self._own = operations_by_module(placed.graph)
        self._module_of = dict(network.named_modules(remove_duplicate=False))
        self._modules: dict[str, int] = {}
        self._operations: dict[tuple[str, str], int] = {}
        self._parameters: dict[str, int] = {}
        self._decided: dict[str, Annotation] = {}  # what the rules for modules come to, by path

    def choose_modules(self) -> None:
        """Give every module the worker of most of its own operations and of the modules inside."""
        children: dict[str, list[str]] = {}
        seen = {""}
        for path in self._own:
            while path not in seen and path.partition(".")[0] != LOSS_PATH:
                seen.add(path)
                children.setdefault(path.rpartition(".")[0], []).append(path)
                path = path.rpartition(".")[0]
        workers: dict[str, int | None] = {}
        for path in sorted(seen, key=lambda p: (p.count(".") + bool(p), p), reverse=True):
            if path in self._module_of:
                inside = [workers.get(child) for child in children.get(path, ())]
                workers[path] = self._worker_of(path, inside)
        workers |= self._undecided_where_shared(workers)
        self._emit("", None, workers, children)

    def _worker_of(self, path: str, inside: Sequence[int | None]) -> int | None:
        if path in self._code:
            return self._code[path].rank
        nodes, placed = self._placed.graph.nodes, self._placed.workers
        votes = Counter(
            placed[p] for p, _ in self._own.get(path, ()) if nodes[p].annotation is None
        )
        votes.update(worker for worker in inside if worker is not None)
        return min(votes, key=lambda worker: (-votes[worker], worker)) if votes else None

    def _undecided_where_shared(self, workers: Mapping[str, int | None]) -> dict[str, int | None]:
        """A module under two names has one placement: none, if its names go different ways."""
        by_module: dict[nn.Module, list[str]] = {}
        for path in workers:
            if path in self._module_of:
                by_module.setdefault(self._module_of[path], []).append(path)
        return {
            path: None
            for paths in by_module.values()
            if len({workers[p] for p in paths}) > 1
            for path in paths
            if path not in self._code
        }

    def _emit(
        self,
        path: str,
        around: int | None,
        workers: Mapping[str, int | None],
        children: Mapping[str, Sequence[str]],
    ) -> None:
        worker = workers.get(path)
        if worker is None:
            worker = around
        elif worker != around:
            self._modules[path] = worker
        for child in children.get(path, ()):
            self._emit(child, worker, workers, children)

    def add_operations(self) -> None:
        """Name the operations that modules alone would put elsewhere, and those of the loss."""
        workers, nodes = self._placed.workers, self._placed.graph.nodes
        found = self._resolved().workers
        for path, operations in self._own.items():
            is_free_loss = path.partition(".")[0] == LOSS_PATH and not any(
                path == p or path.startswith(f"{p}.") for p in self._code
            )
            wrong = [
                p
                for p, _ in operations
                if found[p] != workers[p] or (is_free_loss and nodes[p].annotation is None)
            ]
            if not wrong:
                continue
            if len(operations) > 1 and len({workers[p] for p, _ in operations}) == 1:
                self._operations[path, "*"] = workers[wrong[0]]
                continue
            for name in dict.fromkeys(name for _, name in operations):
                alike = [p for p, other in operations if other == name]
                if not set(alike) & set(wrong):
                    continue
                if len({workers[p] for p in alike}) == 1:
                    self._operations[path, name] = workers[alike[0]]
                    continue
                for index, position in enumerate(alike):
                    if position in wrong:
                        self._operations[path, f"{name}[{index}]"] = workers[position]

    def add_owners(self) -> None:
        """Name the parameters and buffers that would live elsewhere."""
        found = self._resolved().workers
        for position, names in self._placed.graph.state_names.items():
            if found[position] != self._placed.workers[position]:
                self._parameters[names[0]] = self._placed.workers[position]
        if self._resolved().workers != self._placed.workers:
            raise InvariantError("the rules give another placement")

    def _resolved(self) -> PlacedGraph:
        """The placement that the rules collected so far give, from a fresh start."""
        ranks = {self._module_of[path]: rank for path, rank in self._modules.items()}
        self._decided = {
            path: Annotation(ranks[module], "")
            for path, module in self._module_of.items()
            if module in ranks
        }
        operations = tuple(
            _rule(path, operation, rank) for (path, operation), rank in self._operations.items()
        )
        parameters = {name: Annotation(rank, "") for name, rank in self._parameters.items()}
        return resolve(
            self._placed.graph,
            PlacementRules(
                self._placed.num_workers,
                {**self._decided, **self._code},
                self._unplaced,
                operations=operations,
                parameters=parameters,
            ),
        )

    def written(self) -> WrittenPlacement:
        by_path: dict[str, dict[str, int]] = {}
        for (path, operation), rank in self._operations.items():
            by_path.setdefault(path, {})[operation] = rank
        why: dict[tuple[str, ...], str] = {}
        modules, operations = _fold(self._modules), _fold(by_path)
        parameters = _fold(self._parameters)
        for pattern, (_, path) in modules.items():
            why[MODULES, pattern] = self._why_module(path)
        for pattern, (rules, path) in operations.items():
            for operation in rules:
                why[OPERATIONS, pattern, operation] = self._why_operation(path, operation)
        graph = self._placed.graph
        return WrittenPlacement(
            {pattern: value for pattern, (value, _) in modules.items()},
            {pattern: value for pattern, (value, _) in operations.items()},
            {pattern: value for pattern, (value, _) in parameters.items()},
            why,
            f"Placement of the {graph.mode.value} graph over {self._placed.num_workers} worker(s).",
        )

    def _why_module(self, path: str) -> str:
        if path in self._code:
            return f"in the code at {short_source(self._code[path].source)}"
        inside = [
            position
            for own_path, operations in self._own.items()
            if (nearest(self._decided, own_path) or (None,))[0] == path
            for position, _ in operations
        ]
        reasons = Counter(_kind(self._placed.reasons[position]) for position in inside)
        return "; ".join(f"{count} by {kind}" for kind, count in reasons.most_common(2))

    def _why_operation(self, path: str, operation: str) -> str:
        rule = _rule(path, operation, 0)
        named = [p for p, name in self._own[path] if re.fullmatch(rule.names, name)]
        if rule.which is not None:
            assert isinstance(rule.which, int)
            named = [named[rule.which]]
        reasons = {self._placed.reasons[position] for position in named}
        return reasons.pop() if len(reasons) == 1 else ""


def _rule(path: str, operation: str, rank: int) -> OperationRule:
    name, which = read_slice(operation)
    return OperationRule(
        Rule(OPERATIONS, path or NETWORK, operation, Annotation(rank, "")),
        frozenset({path}),
        read_pattern(path) if path.partition(".")[0] == LOSS_PATH else None,
        read_names(name).pattern,
        which,
    )


def _fold(rules: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Join rules that differ in a number of their path: ``layers.{0..3}``.

    Returns:
        Value and first path, by pattern.
    """
    folded = {path or NETWORK: (value, path) for path, value in rules.items()}
    depth = max((len(_NUMBER.findall(path)) for path in folded), default=0)
    for position in reversed(range(depth)):
        groups: dict[tuple[str, str, str], list[tuple[int, str]]] = {}
        for path, (value, _) in folded.items():
            numbers = list(_NUMBER.finditer(path))
            if position < len(numbers):
                found = numbers[position]
                key = (path[: found.start()], path[found.end() :], repr(value))
                groups.setdefault(key, []).append((int(found[0]), path))
        for (before, after, _), members in groups.items():
            if len(members) > 1:
                ranges = _ranges(sorted(number for number, _ in members))
                renamed = dict.fromkeys((p for _, p in members), f"{before}{{{ranges}}}{after}")
                joined: dict[str, tuple[Any, str]] = {}
                for path, entry in folded.items():
                    joined.setdefault(renamed.get(path, path), entry)
                folded = joined
    return folded


def _ranges(numbers: Sequence[int]) -> str:
    """``0..3,7`` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}..{r[-1]}" for r in runs)


def _kind(reason: str) -> str:
    """A reason without the names in it."""
    if reason.startswith(("affinity", "nothing to be near")):
        return "affinity"
    if reason.startswith(("module ", "the network")):
        return "the placement of modules"
    return "gs.place" if reason.startswith("gs.place") else "rules"


def _scalar(text: str) -> str:
    """A key of a YAML mapping, quoted where it must be."""
    return yaml.safe_dump(text, width=1 << 20).removesuffix("\n").removesuffix("\n...")


def _line(text: str, why: str) -> str:
    return f"{text}  # {why}" if why else text
