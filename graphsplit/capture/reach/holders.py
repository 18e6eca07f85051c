"""Something that holds Python state, as it was at one moment."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from graphsplit.guards.places import Place

# The generators of the whole process: what everybody draws from who has none of their own.
PYTHONS: Any = random._inst
NUMPYS: Any = np.random.mtrand._rand
OF_THE_PROCESS = frozenset({id(PYTHONS), id(NUMPYS)})
ALL_OF_THE_PROCESS = OF_THE_PROCESS | {id(torch.default_generator)}
GENERATORS = (random.Random, torch.Generator, np.random.Generator, np.random.RandomState)


class Holder:
    """Something that holds state, with what it held when it was noted.

    Attributes:
        key: Equal for two holders of one state.
        name: What it is, for people.
        generator: The generator of random numbers that it is; else None.
        tensor: The tensor that it is; else None.
        decides: Whether what it holds may decide over values: no cache, and not the name of code.
        is_stepped: Whether it is of an optimizer or a schedule: those of a Model change each step.
        held: Gives its present contents, for ``hold``.
        hold: Lets it hold what it held once.

    Args:
        thing: What holds it, or a key for it.
        name: For people.
        read: Gives what it holds, apart from it.
        write: Puts that back.
        of: The object whose state it is, where that is not ``thing``.
    """

    def __init__(
        self,
        thing: Any,
        name: str,
        read: Callable[[], Any],
        write: Callable[[Any], None],
        *,
        decides: bool = True,
        of: Any = None,
    ) -> None:
        self._of = weakly(thing if of is None else of)
        self.key: Any = thing if isinstance(thing, tuple) else id(thing)
        self.name = name
        self.generator = thing if isinstance(thing, GENERATORS) else None
        self.tensor = thing if isinstance(thing, torch.Tensor) else None
        self.decides, self.is_stepped = decides, False
        self._thing = thing  # held, so that nothing else gets its number
        self.held = read
        self.hold = write
        self._noted = read()

    def has_changed(self) -> bool:
        """Whether it holds something else now."""
        return not _is_same(self._noted, self.held())

    @property
    def of(self) -> Any:
        """The object whose state it is; None once nobody has it any more."""
        return self._of()

    def note(self) -> None:
        """Note what it holds now."""
        self._noted = self.held()

    @property
    def is_generator(self) -> bool:
        """Whether it is a generator of random numbers."""
        return self.generator is not None

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor."""
        return self.tensor is not None

    @property
    def is_value(self) -> bool:
        """Whether it holds Python values that may decide: no tensor, nothing of a generator."""
        return self.decides and not self.is_tensor and not self.is_generator

    @property
    def can_hold_again(self) -> bool:
        """Whether contents of another time can be put there: not into iterators, large arrays."""
        return isinstance(self.held(), (dict, tuple, list, frozenset, ByValue))

    def entries(self) -> dict[Any, Any]:
        """Its present contents by their keys; what has none of its own is under ""."""
        return _entries_of(self.held())

    def noted_entries(self) -> dict[Any, Any]:
        """The contents that were noted."""
        return _entries_of(self._noted)

    def items(self) -> list[Any]:
        """All that it holds."""
        found = [*self.entries().values()]
        return [*found, *found[0]] if len(found) == 1 and isinstance(found[0], list) else found

    def hold_entries(self, entries: dict[Any, Any]) -> None:
        """Let it hold what ``entries`` gave, with changes."""
        held = self.held()
        if isinstance(held, tuple):
            self.hold((entries[""], *held[1:]))
        elif isinstance(held, ByValue):
            self.hold(ByValue(held.content, entries[""]))
        else:
            self.hold(entries if isinstance(held, dict) else entries[""])

    def forget(self) -> None:
        """Let go of what was noted."""
        self._noted = None

    def put_back(self) -> None:
        """Let it hold what was noted."""
        self.hold(self._noted)


@dataclass(frozen=True)
class ByValue:
    """Contents that are compared by value.

    Attributes:
        content: What decides.
        kept: What is put back.
    """

    content: Any
    kept: Any = field(compare=False)


def at_place(place: Place) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Functions that read and write a place, for a holder."""

    def read() -> tuple[Any, None]:
        return (place.read(), None)

    def write(held: tuple[Any, None]) -> None:
        place.write(held[0])

    return read, write


def weakly(value: Any) -> Callable[[], Any]:
    """A function that gives a value as long as somebody else holds it, where that can be told."""
    try:
        return weakref.ref(value)
    except TypeError:  # a list, a dictionary, an object with slots
        return lambda: value


def _entries_of(held: Any) -> dict[Any, Any]:
    if isinstance(held, dict):
        return held
    if isinstance(held, tuple):  # of a cell or a global
        return {"": held[0]}
    return {"": held.kept if isinstance(held, ByValue) else held}


def _is_same(one: Any, other: Any) -> bool:
    """Whether a holder holds the same objects, not just equal ones."""
    if isinstance(one, dict):
        one, other = [*one, *one.values()], [*other, *other.values()]
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return bool(one == other)


@contextmanager
def unchanged(
    watched: Sequence[tuple[Holder, str]], refusal: Callable[[Holder, str], Exception]
) -> Iterator[None]:
    """Run code that must leave Python state as it is.

    Args:
        watched: The state, each with the line of other code that can reach it too.
        refusal: The error for one that has changed, with its line.
    """
    for holder, _ in watched:
        holder.note()
    yield
    for holder, line in watched:
        if holder.has_changed():
            raise refusal(holder, line)
