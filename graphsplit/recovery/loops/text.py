"""The names that a loop's body carries from one round to the next, by its text. Pure.

A name is carried where a round may read it before it has set it, and some round sets it::

    for batch in gs.loop(loader):
        total += loss.item()      # carried
        x, y = batch              # not carried: set before it is read
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Names = frozenset[str]
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_COUNTED = ("enumerate", "zip")


@dataclass(frozen=True)
class BodyText:
    """The body of a loop.

    Attributes:
        line: The line of the statement.
        carried: Names that a round may read before it has set them, and sets.
        read: Names that come from before the loop.
        counted: ``enumerate`` or ``zip``, where that stands around the iterator.
        around: The plain loops of the same function around it, from the inside out.
    """

    line: int
    carried: Names
    read: Names
    counted: str = ""
    around: tuple[AroundText, ...] = ()


@dataclass(frozen=True)
class AroundText:
    """A plain loop around a loop.

    Attributes:
        line: The line of the statement.
        carried: Names that it carries from one round to the next.
        left: Names that the inner loop sets, and that are read after it.
        read: Names that it reads outside of the inner loop, and that come from before it.
    """

    line: int
    carried: Names
    left: Names
    read: Names


def body_of(tree: ast.AST, line: int) -> BodyText | None:
    """The loop whose iterator is made in a line; None if that is no ``for`` statement."""
    ways = [way for way in _ways(tree, ()) if _is_made_in(way[-1], line)]
    if not ways:
        return None
    way = max(ways, key=len)
    loop = way[-1]
    assert isinstance(loop, ast.For)
    outer: list[ast.stmt] = []
    for node in reversed(way[:-1]):
        if isinstance(node, (*_SCOPES, ast.ClassDef)):
            break
        if isinstance(node, (ast.For, ast.While)):
            outer.append(node)
    reads = _Reads.of(loop.body, loop.target)
    call = loop.iter.func if isinstance(loop.iter, ast.Call) else None
    counted = call.id if isinstance(call, ast.Name) and call.id in _COUNTED else ""
    around = tuple(_around(node, loop) for node in outer)
    return BodyText(loop.iter.lineno, reads.carried, reads.outside, counted, around)


def _ways(node: ast.AST, above: tuple[ast.AST, ...]) -> Iterable[tuple[ast.AST, ...]]:
    for child in ast.iter_child_nodes(node):
        way = (*above, child)
        if isinstance(child, ast.For):
            yield way
        yield from _ways(child, way)


def _is_made_in(node: ast.AST, line: int) -> bool:
    if not isinstance(node, ast.For):
        return False
    return node.iter.lineno <= line <= (node.iter.end_lineno or node.iter.lineno)


def _around(node: ast.stmt, inner: ast.For) -> AroundText:
    assert isinstance(node, (ast.For, ast.While))
    target = node.target if isinstance(node, ast.For) else None
    everything = _Reads.of(node.body, target)
    beside = _Reads.of(node.body, target, without=inner)
    set_inside = _stored(inner)
    line = node.iter.lineno if isinstance(node, ast.For) else node.lineno
    return AroundText(
        line, everything.carried, frozenset(beside.exposed & set_inside), beside.outside
    )


def _stored(node: ast.AST) -> set[str]:
    """The names that a statement sets, somewhere."""
    found: set[str] = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and isinstance(one.ctx, (ast.Store, ast.Del)):
            found.add(one.id)
        elif isinstance(one, (ast.FunctionDef, ast.ClassDef)):
            found.add(one.name)
        elif isinstance(one, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in one.names}
    return found


class _Reads:
    """The names that statements read before they have set them.

    Args:
        without: A loop that is left out.
    """

    def __init__(self, without: ast.stmt | None) -> None:
        self.exposed: set[str] = set()
        self._without = without
        self._stored: set[str] = set()

    @classmethod
    def of(
        cls, body: Sequence[ast.stmt], target: ast.expr | None, without: ast.stmt | None = None
    ) -> _Reads:
        """Look at the body of a loop."""
        made = cls(without)
        for statement in body:
            made._stored |= _stored(statement)
        made._all(body, set() if target is None else _stored(target))
        return made

    @property
    def carried(self) -> Names:
        """Names that are read before they are set, and are set."""
        return frozenset(self.exposed & self._stored)

    @property
    def outside(self) -> Names:
        """Names that are read, and not set."""
        return frozenset(self.exposed - self._stored)

    def _all(self, statements: Iterable[ast.stmt], known: set[str]) -> set[str] | None:
        """Go through statements; returns what is set for sure after them, None if never there."""
        now: set[str] | None = set(known)
        for statement in statements:
            if now is None:
                break
            now = self._one(statement, now)
        return now

    def _one(self, node: ast.stmt, known: set[str]) -> set[str] | None:
        if node is self._without:
            return known
        match node:
            case ast.Continue() | ast.Break() | ast.Return() | ast.Raise():
                self._read(node, known)
                return None
            case ast.If():
                self._read(node.test, known)
                known = known | _stored(node.test)
                return _joined(self._all(node.body, known), self._all(node.orelse, known))
            case ast.For():
                self._read(node.iter, known)
                after = self._all(node.body, known | _stored(node.target))
                self._all(node.orelse, known)
                # One that is begun in its middle is never begun at its end.
                return known | (after or set()) if _is_loop(node) else known
            case ast.While():
                self._read(node.test, known)
                self._all(node.body, known)
                self._all(node.orelse, known)
                return known
            case ast.With():
                for item in node.items:
                    self._read(item.context_expr, known)
                    known = known | (_stored(item.optional_vars) if item.optional_vars else set())
                return self._all(node.body, known)
            case ast.Try():
                after = self._all([*node.body, *node.orelse], known)
                for handler in node.handlers:
                    own = known | ({handler.name} if handler.name else set())
                    after = _joined(after, self._all(handler.body, own))
                self._all(node.finalbody, known)
                return after
            case ast.AugAssign():
                self._read(node.value, known)
                if isinstance(node.target, ast.Name):
                    self._note(node.target.id, known)
                else:
                    self._read(node.target, known)
                return known | _stored(node.target)
            case ast.Match():
                self._read(node.subject, known)
                for case in node.cases:
                    self._all(case.body, known | _captured(case.pattern))
                return known
        self._read(node, known)
        return known | _stored(node)

    def _note(self, name: str, known: set[str]) -> None:
        if name not in known:
            self.exposed.add(name)

    def _read(self, node: ast.AST, known: set[str]) -> None:
        """Note the names that an expression or a plain statement reads."""
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                self._note(node.id, known)
            return
        if isinstance(node, _SCOPES):
            own = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
            inside = node.body if isinstance(node.body, list) else [node.body]
            known = known | own | {n for one in inside for n in _stored(one)}
        elif isinstance(node, _COMPREHENSIONS):
            known = known | {n for g in node.generators for n in _stored(g.target)}
        for child in ast.iter_child_nodes(node):
            self._read(child, known)


def _is_loop(node: ast.For) -> bool:
    """Whether it goes through ``gs.loop``."""
    called = node.iter.func if isinstance(node.iter, ast.Call) else None
    return getattr(called, "attr", getattr(called, "id", "")) == "loop"


def _joined(one: set[str] | None, other: set[str] | None) -> set[str] | None:
    if one is None or other is None:
        return one if other is None else other
    return one & other


def _captured(pattern: ast.AST) -> set[str]:
    names = {getattr(one, "name", None) for one in ast.walk(pattern)}
    return {name for name in names if isinstance(name, str)}
