"""``gs.apply_placement``: a whole placement as rules, from a mapping or from a file.

Rules of modules are written on the modules at once, as ``Module.place`` would. Rules of operations
and of parameters are kept with the network; they are looked at when a plan is made, as only the
captured graph knows the operations.

Where several rules of one section name the same thing, the later one wins. A rule of which nothing
is left is refused, as is one that matches nothing, and one that contradicts ``.place`` in the code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from graphsplit.errors import PlacementError
from graphsplit.marks.annotations import (
    WORKER_ROLE,
    Annotation,
    annotations_of,
    callers_line,
    faults_found,
    is_planned,
    write_rule,
)
from graphsplit.marks.pattern import (
    ModulePattern,
    PatternError,
    near_miss,
    read_names,
    read_pattern,
    read_slice,
)
from graphsplit.marks.source import MODULES, OPERATIONS, PARAMETERS, Rule, hidden_rules, read_rules
from graphsplit.text import called, need
from graphsplit.torch_ext.attributes import named_tensors

_RULES_ATTRIBUTE = "_graphsplit_rules"

NetworkT = TypeVar("NetworkT", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class OperationRule:
    """Where some operations of some modules go.

    Attributes:
        rule: As written.
        modules: Paths of the modules whose own operations it names.
        loss: Where it names the loss: its pattern, which only the captured graph can answer.
        names: Matches the names of operations, such as ``softmax``.
        which: Which of the matching operations of a module: ``[1]`` or ``[0:2]``; None for all.
    """

    rule: Rule
    modules: frozenset[str]
    loss: ModulePattern | None
    names: str
    which: int | slice | None

    def reaches(self, path: str) -> bool:
        """Whether it speaks of the operations of a module."""
        return self.loss.matches(path) if self.loss is not None else path in self.modules


@dataclass(frozen=True)
class KeptRules:
    """The rules that wait for the captured graph.

    Attributes:
        operations: Rules of operations, in order.
        parameters: The owner that each named parameter or buffer is given.
    """

    operations: tuple[OperationRule, ...] = ()
    parameters: Mapping[str, Annotation] = field(default_factory=dict)


@called("gs.apply_placement")
def apply_placement(network: NetworkT, source: Mapping[str, Any] | str | Path) -> NetworkT:
    """Place the parts of a network by rules.

    Replaces the rules of an earlier call. The sections, all optional, are ``modules`` (module
    pattern to worker), ``operations`` (module pattern to a mapping from operations to workers) and
    ``parameters`` (pattern of names to the owner); without any of them the source is the section
    ``modules``. A worker is its rank, ``[role, rank]``, or ``{role: ..., rank: ...}``. Several that
    share the microbatches are ``[0, 1]``, or ``{ranks: [0, 1], rows: [2, 1]}``. For the patterns
    see ``docs/how-to/place-modules-and-operations.md``.

    Args:
        network: The network.
        source: A mapping, or the path of a YAML or JSON file.

    Returns:
        The network itself.

    Raises:
        PlacementError: Patterns that match nothing, rules hidden by later ones, contradictions of
            ``.place`` in the code, bad ranks, unknown keys. All of them are listed. Rules of
            operations that match nothing are found when a plan is made.
    """
    is_swapped = isinstance(source, nn.Module)
    why = "the network first: gs.apply_placement(network, source)" if is_swapped else "a module"
    need("gs.apply_placement", "network", network, isinstance(network, nn.Module), why)
    caller = callers_line(3)
    if is_planned(network):
        raise PlacementError(
            f"apply_placement: this network is already planned; its parameters live on their "
            f"workers\n  {caller}\n  Fix: apply the placement before the first train, eval or "
            f"predict of a Model."
        )
    read = read_rules(source, caller=caller)
    for module in network.modules():
        write_rule(module, None)
    applier = _Applier(network, read.rules, read.faults)
    modules, kept = applier.modules(), KeptRules(applier.operations(), applier.parameters())
    if applier.faults:
        network.__dict__.pop(_RULES_ATTRIBUTE, None)
        raise faults_found(
            applier.faults, fix="mend the lines above; 'print(network)' shows the names of modules."
        )
    for module, annotation in modules:
        write_rule(module, annotation)
    network.__dict__[_RULES_ATTRIBUTE] = kept
    return network


def kept_rules(network: nn.Module) -> KeptRules:
    """The rules of operations and parameters that were applied to a network."""
    found = network.__dict__.get(_RULES_ATTRIBUTE)
    return found if isinstance(found, KeptRules) else KeptRules()


def has_replicas(network: nn.Module, modules: Mapping[str, Annotation]) -> bool:
    """Whether modules, or operations by rules, are placed on several workers.

    Args:
        network: The network; its rules of operations are looked at.
        modules: Annotation of every placed module, by module path.
    """
    ruled = (rule.rule.placement for rule in kept_rules(network).operations)
    return any(annotation.replicas for annotation in (*modules.values(), *ruled))


class _Applier:
    """Finds what each rule names, and every fault on the way."""

    def __init__(self, network: nn.Module, rules: Sequence[Rule], faults: list[str]) -> None:
        self.faults = faults
        self._network = network
        self._rules = rules

    def modules(self) -> list[tuple[nn.Module, Annotation]]:
        """The annotation to write on each module."""
        decided: dict[str, Rule] = {}
        matched: dict[Rule, dict[str, nn.Module]] = {}
        for rule in self._section(MODULES):
            pattern = self._pattern(rule, rule.path)
            if pattern is None:
                continue
            if pattern.is_in_loss:
                self._fault(
                    rule,
                    "a loss that is a module is placed by loss_fn.place, and any loss under "
                    "operations, as in {'(loss)': {'*': 1}}",
                )
                continue
            matched[rule] = pattern.select(self._network)
            if not matched[rule]:
                self._fault(rule, pattern.miss(self._network))
            decided.update(dict.fromkeys(matched[rule], rule))
        self.faults += hidden_rules(matched, decided)
        self._check_code(decided)
        modules = dict(self._network.named_modules(remove_duplicate=False))
        return [(modules[path], rule.placement) for path, rule in decided.items()]

    def operations(self) -> tuple[OperationRule, ...]:
        """Rules of operations, with the modules that they speak of."""
        found = []
        for rule in self._section(OPERATIONS):
            pattern = self._pattern(rule, rule.path)
            try:
                name, which = read_slice(rule.operation)
                names = read_names(name).pattern
            except PatternError as error:
                self._fault(rule, str(error))
                continue
            if pattern is None:
                continue
            modules = {} if pattern.is_in_loss else pattern.select(self._network)
            if not modules and not pattern.is_in_loss:
                self._fault(rule, pattern.miss(self._network))
            loss = pattern if pattern.is_in_loss else None
            found.append(OperationRule(rule, frozenset(modules), loss, names, which))
        return tuple(found)

    def parameters(self) -> dict[str, Annotation]:
        """The owners that rules give to parameters and buffers, by each of their names."""
        decided: dict[str, Rule] = {}
        matched: dict[Rule, list[str]] = {}
        for rule in self._section(PARAMETERS):
            pattern = self._pattern(rule, rule.path)
            if pattern is None:
                continue
            matched[rule] = self._names(pattern) if pattern.parts else []
            if not matched[rule]:
                self._fault(rule, self._missed_name(pattern))
            decided.update(dict.fromkeys(matched[rule], rule))
        self.faults += hidden_rules(matched, decided)
        return self._owners_of_tensors(decided)

    def _owners_of_tensors(self, decided: Mapping[str, Rule]) -> dict[str, Annotation]:
        """A tied parameter has several names, but one owner."""
        by_tensor: dict[int, tuple[str, Rule]] = {}
        for name, tensor in named_tensors(self._network).items():
            if name not in decided:
                continue
            other = by_tensor.setdefault(id(tensor), (name, decided[name]))
            if not other[1].placement.is_like(decided[name].placement):
                self._fault(decided[name], f"{name!r} is the same tensor as {other[0]!r}", other[1])
        return {name: rule.placement for name, rule in decided.items()}

    def _names(self, pattern: ModulePattern) -> list[str]:
        """Names of the parameters and buffers that a pattern matches."""
        around = pattern if pattern.parts[-1].names is None else pattern.outside()
        modules = around.select(self._network)
        return [
            name
            for name in named_tensors(self._network)
            if name.rpartition(".")[0] in modules and pattern.last_matches(name.rpartition(".")[2])
        ]

    def _missed_name(self, pattern: ModulePattern) -> str:
        if not pattern.parts:
            return "names the network, not a parameter"
        modules = pattern.outside().select(self._network)
        if not modules:
            return pattern.outside().miss(self._network)
        names = {
            n.rpartition(".")[2]
            for n in named_tensors(self._network)
            if n.rpartition(".")[0] in modules
        }
        where = repr(next(iter(modules))) if len(pattern.parts) > 1 else "the network"
        last = pattern.parts[-1].text
        return f"{where} has no parameter or buffer {last!r}{near_miss(last, names)}"

    def _section(self, name: str) -> list[Rule]:
        return [rule for rule in self._rules if rule.section == name]

    def _pattern(self, rule: Rule, text: str) -> ModulePattern | None:
        try:
            return read_pattern(text)
        except PatternError as error:
            self._fault(rule, str(error))
            return None

    def _check_code(self, decided: Mapping[str, Rule]) -> None:
        """Two names of one module must agree, and so must ``.place`` in the code and a rule."""
        modules = dict(self._network.named_modules(remove_duplicate=False))
        code = annotations_of(self._network)
        names: dict[nn.Module, str] = {}
        told: set[tuple[Rule, Annotation]] = set()
        for path, rule in decided.items():
            first = names.setdefault(modules[path], path)
            if not decided[first].placement.is_like(rule.placement):
                self._fault(rule, f"{path!r} is the same module as {first!r}", decided[first])
            found = code.get(path)
            if found is None or (rule, found) in told or found.is_like(rule.placement):
                continue
            told.add((rule, found))
            what = f"module {path!r}" if path else "the network"
            self._fault(rule, f"{what} is placed on {WORKER_ROLE} {found.where} in the code", found)

    def _fault(self, rule: Rule, problem: str, *others: Rule | Annotation) -> None:
        self.faults.append(rule.fault(problem, *others))
