"""Patterns for module paths: which modules of a network does ``layers.{0..3}.mlp`` name?

========================  =================================================================
``encoder.layers.3``      one module
``layers.*.mlp``          ``*`` and ``?`` match inside one part of a path
``decoder.**``            ``**`` matches any number of parts: the module and all inside it
``layers.{0..3}``         a range with both ends, as ``explain`` prints it
``{q,k,v}_proj``          one of several
``layers[0:4]``           an element or a slice of a ``ModuleList`` or ``Sequential``, as in Python
``(network)``             the network itself
``(loss)``                the loss function; ``(loss).**`` with all modules inside it
========================  =================================================================
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from graphsplit.torch_ext.attributes import modules_of

NETWORK = "(network)"
_LOSS = "(loss)"
_SLICE = re.compile(r"\[(-?\d*)(?::(-?\d*))?(?::(-?\d*))?\]")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


class PatternError(ValueError):
    """A pattern that cannot be read; says why."""


@dataclass(frozen=True)
class _Part:
    """One part of a path.

    Attributes:
        text: As written.
        names: Matches the names of children; None for ``**``.
        slices: Elements or slices of the child, one after the other.
    """

    text: str
    names: re.Pattern[str] | None
    slices: tuple[int | slice, ...] = ()


@dataclass(frozen=True)
class ModulePattern:
    """A pattern, read.

    Attributes:
        text: As written.
        parts: Its parts; none for the network itself.
    """

    text: str
    parts: tuple[_Part, ...]

    @property
    def is_in_loss(self) -> bool:
        """Whether it names the loss, or modules inside it."""
        return bool(self.parts) and self.parts[0].text == _LOSS

    def select(self, network: nn.Module) -> dict[str, nn.Module]:
        """All modules of a network that the pattern matches, by path."""
        return dict(_walk(network, "", self.parts))

    def matches(self, path: str) -> bool:
        """Whether it matches a path, given as text; slices match nothing."""
        texts = [
            r"(?:\.[^.]+)*" if part.names is None else rf"\.(?:{part.names.pattern})"
            for part in self.parts
        ]
        return re.fullmatch("".join(texts), f".{path}") is not None

    def miss(self, network: nn.Module) -> str:
        """Why it matches nothing, with a name that may have been meant."""
        for length in range(len(self.parts), -1, -1):
            reached = dict(_walk(network, "", self.parts[:length]))
            if reached:
                break
        if length == len(self.parts):
            return "matches no module"
        first, *others = (repr(path) if path else "the network" for path in reached)
        where = f"{first} and {len(others)} more have" if others else f"{first} has"
        part = self.parts[length]
        names = {name for module in reached.values() for name, _ in module.named_children()}
        if part.slices and part.names is not None and any(map(part.names.fullmatch, names)):
            return f"{where} no module {part.text!r}: there are no such elements"
        return f"{where} no module {part.text!r}{near_miss(part.text, names)}"

    def outside(self) -> ModulePattern:
        """The pattern of the modules around: all parts but the last."""
        return ModulePattern(self.text, self.parts[:-1])

    def last_matches(self, name: str) -> bool:
        """Whether the last part matches a name."""
        last = self.parts[-1]
        return last.names is None or last.names.fullmatch(name) is not None


def near_miss(name: str, names: set[str]) -> str:
    """``; did you mean 'layers'?`` where some name is near, else what there is."""
    near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    if not names:
        return "; there is none"
    shown = sorted(names)[:8]
    return f"; there is {', '.join(shown)}{', ...' if len(names) > len(shown) else ''}"


def read_pattern(text: str) -> ModulePattern:
    """Read a pattern for module paths.

    Raises:
        PatternError: It cannot be read.
    """
    if text in ("", NETWORK):
        return ModulePattern(text, ())
    return ModulePattern(text, tuple(_read_part(part) for part in _split(text, ".")))


def read_names(text: str) -> re.Pattern[str]:
    """A pattern for names alone: ``*``, ``?`` and braces.

    Raises:
        PatternError: It cannot be read.
    """
    return re.compile(_expression(text))


def read_slice(text: str) -> tuple[str, int | slice | None]:
    """Split ``add[1]`` into the name and the element or slice.

    Raises:
        PatternError: More than one pair of brackets.
    """
    part, slices = _split_slices(text)
    if len(slices) > 1:
        raise PatternError(f"{text!r} has more than one pair of brackets")
    return part, slices[0] if slices else None


def _split(text: str, separator: str) -> list[str]:
    """Split at separators outside braces and brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "{[") - (character in "}]")
        if depth < 0:
            break
        if character == separator and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    if depth != 0:
        raise PatternError(f"braces or brackets do not match in {text!r}")
    return [*parts, current]


def _read_part(text: str) -> _Part:
    if text == "**":
        return _Part(text, None)
    name, slices = _split_slices(text)
    if not name:
        raise PatternError("a part of the path is empty")
    return _Part(text, read_names(name), slices)


def _split_slices(text: str) -> tuple[str, tuple[int | slice, ...]]:
    name, bracket, rest = text.partition("[")
    slices: list[int | slice] = []
    position, rest = 0, bracket + rest
    while position < len(rest):
        found = _SLICE.match(rest, position)
        if found is None or found[0] == "[]":
            raise PatternError(f"{rest[position:]!r} is no element or slice, such as [3] or [0:4]")
        numbers = [int(number) if number else None for number in found.groups()]
        first = numbers[0]
        if ":" in found[0]:
            slices.append(slice(*numbers))
        elif first is not None:
            slices.append(first)
        position = found.end()
    return name, tuple(slices)


def _expression(text: str) -> str:
    """A regular expression for one part."""
    result, position = "", 0
    while position < len(text):
        character = text[position]
        if character == "{":
            end = text.find("}", position)
            if end < 0:
                raise PatternError(f"a brace is not closed in {text!r}")
            result += _alternatives(text[position + 1 : end])
            position = end
        else:
            result += {"*": "[^.]*", "?": "[^.]"}.get(character, re.escape(character))
        position += 1
    return result


def _alternatives(text: str) -> str:
    """``0..3,7`` inside braces."""
    names: list[str] = []
    for item in text.split(","):
        numbers = _RANGE.fullmatch(item.strip())
        if numbers is None:
            names.append(_expression(item.strip()))
            continue
        first, last = int(numbers[1]), int(numbers[2])
        if last < first:
            raise PatternError(f"the range {item.strip()!r} is empty")
        names += map(str, range(first, last + 1))
    return f"(?:{'|'.join(names)})"


def _walk(
    module: nn.Module, path: str, parts: tuple[_Part, ...]
) -> Iterator[tuple[str, nn.Module]]:
    if not parts:
        yield path, module
        return
    part, rest = parts[0], parts[1:]
    if part.names is None:
        yield from _walk(module, path, rest)
    for name, child in _children(module).items():
        inside = f"{path}.{name}" if path else name
        if part.names is None:
            yield from _walk(child, inside, parts)
        elif part.names.fullmatch(name):
            for found_path, found in _elements(inside, child, part.slices):
                yield from _walk(found, found_path, rest)


def _elements(
    path: str, module: nn.Module, slices: tuple[int | slice, ...]
) -> list[tuple[str, nn.Module]]:
    """The modules that ``[3]`` or ``[0:4]`` names; none where the module has no elements."""
    found = [(path, module)]
    for wanted in slices:
        inside: list[tuple[str, nn.Module]] = []
        for container_path, container in found:
            if not isinstance(container, (nn.ModuleList, nn.Sequential)):
                continue
            children = [(f"{container_path}.{n}", c) for n, c in _children(container).items()]
            if isinstance(wanted, slice):
                inside += children[wanted]
            elif -len(children) <= wanted < len(children):
                inside.append(children[wanted])
        found = inside
    return found


def _children(module: nn.Module) -> Mapping[str, nn.Module]:
    """Children by name, shared ones under each of their names."""
    return {name: child for name, child in modules_of(module).items() if child is not None}
