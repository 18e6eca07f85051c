"""Read a placement from a mapping, a YAML file or a JSON file, each rule with its place.

    modules:
      model.layers.{0..3}: 0
      lm_head: [MS_WORKER, 1]
      vision: {ranks: [0, 1], rows: [2, 1]}
    operations:
      model.layers.3.self_attn:
        "softmax*": 1
    parameters:
      model.embed_tokens.weight: 0

A source without any of the three sections is the section ``modules`` alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from graphsplit.errors import PlacementError
from graphsplit.marks.annotations import (
    WORKER_ROLE,
    Annotation,
    annotation_of,
    problem_with_ranks,
)
from graphsplit.marks.workers import UnknownWorkerError, numbered

MODULES, OPERATIONS, PARAMETERS = "modules", "operations", "parameters"
SECTIONS = (MODULES, OPERATIONS, PARAMETERS)
_T = TypeVar("_T")
_RULE_KEYS = ("role", "rank", "ranks", "rows")
# Aliases make a small file stand for a huge one: no placement has this many keys and values.
_MAX_NODES = 100_000


@dataclass(frozen=True)
class Rule:
    """One rule as it was written.

    Attributes:
        section: ``modules``, ``operations`` or ``parameters``.
        path: Pattern for modules (for parameters: for their names).
        operation: Pattern for operations; "" in other sections.
        placement: The worker, or workers that share the microbatches, and ``file:line``.
    """

    section: str
    path: str
    operation: str
    placement: Annotation

    @property
    def source(self) -> str:
        """``file:line``."""
        return self.placement.source

    def __str__(self) -> str:
        inside = f": {self.operation!r}" if self.operation else ""
        kind = "rule" if self.section == MODULES else f"rule of {self.section}"
        return f"{kind} {self.path!r}{inside} -> {self.placement.where}"

    def fault(self, problem: str, *others: Rule | Annotation) -> str:
        """A fault of it in words, with the lines of all that are involved."""
        return f"{self}: {problem}" + "".join(f"\n    {one.source}" for one in (self, *others))


def hidden_rules(
    matched: Mapping[Rule, Collection[_T]], decided: Mapping[_T, Rule]
) -> Iterator[str]:
    """The faults of rules of which later ones leave nothing.

    Args:
        matched: What each rule names.
        decided: The last rule that names it.
    """
    deciding = set(decided.values())
    for rule, names in matched.items():
        if names and rule not in deciding:
            hiding = dict.fromkeys(decided[name] for name in names)
            yield rule.fault("all that it matches is decided by later rules", *hiding)


@dataclass(frozen=True)
class _Value:
    """A value and where it was written; mappings are lists of pairs, so that nothing is lost."""

    content: Any
    source: str

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.content, _Pairs)


class _Pairs(list[tuple[_Value, _Value]]):
    """The entries of a mapping, in order, keys that come twice included."""


@dataclass
class RulesRead:
    """A placement that was read.

    Attributes:
        rules: All rules that could be read, in order.
        faults: What could not, in words and with its place.
    """

    rules: list[Rule]
    faults: list[str]


def read_rules(source: Mapping[str, Any] | str | Path, *, caller: str) -> RulesRead:
    """Read all rules of a source.

    Args:
        source: A mapping, or the path of a YAML or JSON file.
        caller: ``file:line`` of the user's call: the place of a mapping's rules.

    Raises:
        PlacementError: The file cannot be read, or is no mapping.
    """
    if isinstance(source, Mapping):
        top = _of_mapping(source, caller)
    elif isinstance(source, (str, Path)):
        top = _of_file(Path(source), caller)
    else:
        raise PlacementError(
            f"apply_placement: the source is a {type(source).__name__}; expected a mapping, or the "
            f"path of a YAML or JSON file\n  {caller}\n  Fix: pass one of the two."
        )
    read = RulesRead([], [])
    for section, key, value in _sections(top, read):
        if section == OPERATIONS:
            _read_operations(key, value, read)
        else:
            _read_rule(section, key, "", value, read)
    return read


def _of_mapping(content: Any, source: str) -> _Value:
    if isinstance(content, Mapping):
        return _Value(
            _Pairs((_Value(k, source), _of_mapping(v, source)) for k, v in content.items()), source
        )
    return _Value(content, source)


def _of_file(path: Path, caller: str) -> _Value:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlacementError(
            f"apply_placement: {path} cannot be read: {error}\n  {caller}\n"
            f"  Fix: pass the path of a YAML or JSON file."
        ) from None
    if path.suffix == ".json":  # YAML reads JSON too, but for tabs, which no string there can hold
        text = text.replace("\t", " ")
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise PlacementError(
                f"apply_placement: {path} holds no mapping\n  {caller}\n"
                f"  Fix: write rules such as 'encoder: 0', one a line."
            )
        _check_size(node, path, caller)
        return _of_node(loader, node, path)
    except RecursionError:
        raise PlacementError(_too_much(path, caller, "is nested too deeply")) from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise PlacementError(
            f"apply_placement: {path} is no YAML: {error.problem}\n    {path}{line}\n"
            f"  Fix: mend that line; quote patterns that begin with * or {{."
        ) from None
    finally:
        loader.dispose()


def _too_much(path: Path, caller: str, what: str) -> str:
    return (
        f"apply_placement: {path} {what}\n  {caller}\n"
        f"  Fix: write each rule once, without aliases (*name) inside of others."
    )


def _check_size(top: yaml.Node, path: Path, caller: str) -> None:
    """Refuse a file whose aliases stand for more than anybody writes, or for themselves.

    Raises:
        PlacementError: It is such a file.
    """
    sizes: dict[yaml.Node, int] = {}
    above: set[yaml.Node] = set()

    def size_of(node: yaml.Node) -> int:
        if node in above:
            raise PlacementError(_too_much(path, caller, "holds an alias of what it stands in"))
        if node not in sizes:
            above.add(node)
            sizes[node] = 1 + sum(map(size_of, _inside(node)))
            above.remove(node)
        return sizes[node]

    if size_of(top) > _MAX_NODES:
        what = f"stands for more than {_MAX_NODES:,} keys and values with its aliases"
        raise PlacementError(_too_much(path, caller, what))


def _inside(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [one for pair in node.value for one in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _of_node(loader: yaml.SafeLoader, node: yaml.Node, path: Path) -> _Value:
    source = f"{path}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        pairs = _Pairs()
        for key, value in node.value:
            # As written: 0 and 1.10 are names here, not numbers.
            text = key.value if isinstance(key, yaml.ScalarNode) else loader.construct_object(key)
            place = f"{path}:{key.start_mark.line + 1}"
            pairs.append((_Value(text, place), _of_node(loader, value, path)))
        return _Value(pairs, source)
    return _Value(loader.construct_object(node, deep=True), source)


def _sections(top: _Value, read: RulesRead) -> Iterator[tuple[str, _Value, _Value]]:
    """Every entry with the section that it is in."""
    named = {key.content for key, value in top.content if _is_section(key.content, value)}
    if not named:
        yield from ((MODULES, key, value) for key, value in _once(top.content, read))
        return
    for key, value in _once(top.content, read):
        if key.content not in SECTIONS:
            near = difflib.get_close_matches(str(key.content), SECTIONS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; expected {', '.join(SECTIONS)}"
            read.faults.append(f"unknown section {key.content!r}{hint}\n    {key.source}")
        elif value.is_mapping:
            for inner, rule in _once(value.content, read):
                yield key.content, inner, rule
        elif value.content is not None:  # an empty section
            read.faults.append(
                f"section {key.content!r} holds a {type(value.content).__name__}; expected a "
                f"mapping\n    {key.source}"
            )


def _is_section(name: Hashable, value: _Value) -> bool:
    if name not in SECTIONS:
        return False
    if not value.is_mapping:
        return value.content is None
    return not any(key.content in _RULE_KEYS for key, _ in value.content)


def _once(pairs: _Pairs, read: RulesRead) -> Iterator[tuple[_Value, _Value]]:
    """Entries; a key that comes twice is a fault, as YAML would keep only the last."""
    seen: dict[Any, str] = {}
    for key, value in pairs:
        name = key.content
        if not isinstance(name, (str, int)) or isinstance(name, bool):
            read.faults.append(f"{name!r} is no pattern; expected a string\n    {key.source}")
        elif str(name) in seen:
            read.faults.append(
                f"{str(name)!r} stands there twice\n    {seen[str(name)]}\n    {key.source}"
            )
        else:
            seen[str(name)] = key.source
            yield _Value(str(name) if name not in SECTIONS else name, key.source), value


def _read_operations(key: _Value, value: _Value, read: RulesRead) -> None:
    if not value.is_mapping:
        read.faults.append(
            f"operations of {key.content!r}: expected a mapping from operations to workers, "
            f"as in {{'softmax*': 1}}; found {value.content!r}\n    {key.source}"
        )
        return
    for operation, rule in _once(value.content, read):
        _read_rule(OPERATIONS, key, operation.content, rule, read, operation.source)


def _read_rule(
    section: str, key: _Value, operation: str, value: _Value, read: RulesRead, source: str = ""
) -> None:
    source = source or key.source
    what = f"{key.content!r}: {operation!r}" if operation else f"{key.content!r}"
    role, ranks, rows, unknown = _role_and_ranks(value)
    if unknown:
        near = difflib.get_close_matches(unknown, _RULE_KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "expected role and rank, or ranks and rows"
        read.faults.append(f"{what}: unknown key {unknown!r}; {hint}\n    {source}")
        return
    try:
        ranks = numbered(ranks)
    except UnknownWorkerError as error:
        read.faults.append(f"{what}: {error.problem}; {error.fix}\n    {source}")
        return
    problem = problem_with_ranks(role, ranks, rows)
    if problem is None and section == PARAMETERS and isinstance(ranks, (list, tuple)):
        problem = f"{ranks!r} are several workers, and a parameter lives on one", ""
    if problem is not None:
        read.faults.append(f"{what}: {problem[0]}\n    {source}")
        return
    placement = annotation_of(ranks, rows, source, by_rule=True)
    read.rules.append(Rule(section, key.content, operation, placement))


def _role_and_ranks(value: _Value) -> tuple[Any, Any, Any, str]:
    """Role, ranks, rows, and a key that is not known.

    Of ``1``, ``[0, 1]``, ``[MS_WORKER, 1]``, ``{rank: 1}`` and ``{ranks: [0, 1], rows: [2, 1]}``;
    in place of each rank may stand a name.
    """
    content = value.content
    if value.is_mapping:
        entries = {str(key.content): inner.content for key, inner in content}
        unknown = next((name for name in entries if name not in _RULE_KEYS), "")
        ranks = entries.get("ranks", entries.get("rank"))
        return entries.get("role", WORKER_ROLE), ranks, entries.get("rows"), unknown
    is_pair = isinstance(content, (list, tuple)) and len(content) == 2
    if is_pair and isinstance(content[0], str) and _is_role(content):
        return content[0], content[1], None, ""
    return WORKER_ROLE, content, None, ""


def _is_role(pair: Sequence[Any]) -> bool:
    """Whether a pair that begins with a text is role and rank, and not two names of workers."""
    return pair[0].startswith("MS_") or not isinstance(pair[1], str)
