"""Looks at all worlds that a small cluster can come to."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from membership_model import Model


@dataclass(eq=False)
class Explored:
    """Worlds by their indices, in the order in which they were found.

    Attributes:
        model: What the worlds are of.
        worlds: The index of each world.
        came_from: From which world each was reached first.
        edges: Where each world leads to, one world after the other.
        ends_at: Where the edges of each world end.
    """

    model: Model
    worlds: dict[int, int] = field(default_factory=dict)
    came_from: array[int] = field(default_factory=lambda: array("I"))
    edges: array[int] = field(default_factory=lambda: array("I"))
    ends_at: array[int] = field(default_factory=lambda: array("Q"))

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be looked at."""
        return len(self.ends_at) == len(self.worlds)

    @property
    def ends(self) -> list[int]:
        """The worlds in which the job is over for everybody."""
        return [world for world in self.worlds if self.model.is_end(world)]

    def story(self, index: int) -> str:
        """What happened up to a world, line by line."""
        worlds = list(self.worlds)
        lines = []
        while index:
            earlier = self.came_from[index]
            after = self.model.successors(worlds[earlier]).index(worlds[index])
            lines.append(self.model.names(worlds[earlier])[after])
            index = earlier
        return "\n".join(reversed(lines))

    def without_way(self, is_there: Callable[[int], bool]) -> bytearray:
        """For every world by its index, whether none of certain worlds can be reached from it."""
        edges, ends_at = self.edges, self.ends_at
        is_lost = bytearray(not is_there(world) for world in self.worlds)
        is_news = True
        while is_news:
            is_news = False
            # Most edges lead to a later world.
            for index in range(len(ends_at) - 1, -1, -1):
                if not is_lost[index]:
                    continue
                begin = ends_at[index - 1] if index else 0
                if not all(is_lost[one] for one in edges[begin : ends_at[index]]):
                    is_lost[index] = False
                    is_news = True
        return is_lost


def explore(
    found: Explored,
    *,
    most: int | None = None,
    progress: Callable[[Explored], None] = lambda found: None,
) -> None:
    """Breadth first, so that the story of what goes wrong is a short one.

    Args:
        found: Nothing yet; then all worlds of its model.
        most: End when so many worlds are found.
        progress: Called now and then.

    Raises:
        AssertionError: A world that must not be, and how it came to that.
    """
    model, worlds = found.model, found.worlds
    came_from, edges, ends_at = found.came_from, found.edges, found.ends_at
    worlds[model.start] = 0
    came_from.append(0)
    level = [model.start]
    while level and (most is None or len(worlds) <= most):
        following: list[int] = []
        for index, world in enumerate(level, start=len(ends_at)):
            for after in _successors(found, index, world):
                known = worlds.get(after)
                if known is None:
                    known = worlds[after] = len(worlds)
                    came_from.append(index)
                    following.append(after)
                edges.append(known)
            ends_at.append(len(edges))
        for index, world in enumerate(following, start=len(ends_at)):
            _check(found, index, world)
        level = following
        progress(found)


def _successors(found: Explored, index: int, world: int) -> list[int]:
    try:
        return found.model.successors(world)
    except AssertionError as error:
        raise AssertionError(f"{error}, in what follows after:\n{found.story(index)}") from error


def _check(found: Explored, index: int, world: int) -> None:
    try:
        found.model.check(world)
    except AssertionError as error:
        raise AssertionError(f"{error}, after:\n{found.story(index)}") from error


def prove_ends(found: Explored) -> None:
    """From every world an end can be reached.

    Raises:
        AssertionError: That is not so.
    """
    assert found.is_complete
    is_stuck = found.without_way(found.model.is_end)
    if 1 in is_stuck:
        story = found.story(is_stuck.index(1))
        raise AssertionError(f"{sum(is_stuck)} worlds have no way to an end:\n{story}")


def prove_good_ends(found: Explored) -> None:
    """From every world in which nothing speaks against it the job can finish.

    Raises:
        AssertionError: That is not so.
    """
    assert found.is_complete
    cannot_finish = found.without_way(found.model.has_finished)
    for index, world in enumerate(found.worlds):
        if cannot_finish[index] and found.model.may_finish(world):
            raise AssertionError(f"the job can only fail now, after:\n{found.story(index)}")
