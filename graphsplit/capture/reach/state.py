"""The Python state that a piece of code can reach: looked at, noted, put back.

What is kept whole runs while plans are made, and once more at every step. A counter that it keeps
must not know of the first::

    calls = {"n": 0}                        reached by its name, which the code of `f` holds
    def f(x): calls["n"] += 1; ...          noted before `f` runs on fake tensors, put back after
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphsplit.capture.reach.holders import OF_THE_PROCESS, Holder
from graphsplit.capture.reach.reach import Walk
from graphsplit.capture.reach.writes import may_write
from graphsplit.guards.changes import containers_in
from graphsplit.guards.places import Place
from graphsplit.guards.values import freeze, holder_of
from graphsplit.torch_ext.attributes import storage_of
from graphsplit.torch_ext.private import disable_current_modes, has_storage
from graphsplit.torch_ext.stand_ins import StandIn


class Reached:
    """The state that code can reach, and what of it was seen to change.

    Attributes:
        holders: All of it, by key.
        changed: Keys of what changed.
        left: What was found there after the change, where it was changed in forward.
        left_late: Where it was changed in backward.
        in_forward: Keys of what it can reach when it is called.
        in_backward: Keys of what its hooks on gradients and functions' own backwards can reach.
        read_outside: Places of it that code around it reads.
        constants: Tensors of it that code around it reads, and that are neither parameters nor
            buffers.
        may_write: Whether it may change some of it, also where it was not seen to.
        uses_gradients: Whether it reads gradients of parameters, or adds to them.
        at_call: What is to stand in places while it runs, as snapshots; and whether it may change
            that, since the code around it sets the place behind it.
    """

    def __init__(self) -> None:
        self.holders: dict[Any, Holder] = {}
        self.changed: set[Any] = set()
        self.left: dict[Any, Any] = {}
        self.left_late: dict[Any, Any] = {}
        self.in_forward: frozenset[Any] = frozenset()
        self.in_backward: frozenset[Any] = frozenset()
        self.read_outside: tuple[Place, ...] = ()
        self.constants: tuple[torch.Tensor, ...] = ()
        self.may_write = self.uses_gradients = False
        self.at_call: tuple[tuple[Place, Any, bool], ...] = ()

    def look(
        self, roots: Iterable[Any], backward: Iterable[Any] = (), apart: Iterable[Any] = ()
    ) -> tuple[Holder, ...]:
        """Find what code can reach, and hold it as it is now.

        Args:
            roots: What is called.
            backward: What runs in backward, besides what is found on the way.
            apart: What backward leads to but does not run.
        """
        late: dict[Any, Holder] = {}
        with disable_current_modes():
            walk = Walk(())
            now, code = walk.run(roots)
            self.may_write |= may_write(walk.seen.values())
            code, followed = [*backward, *code], set()
            while code:
                followed |= set(map(id, code))
                walk = Walk(apart)
                found, more = walk.run(code)
                self.may_write |= may_write(walk.seen.values())
                late.update((holder.key, holder) for holder in found)
                code = [function for function in more if id(function) not in followed]
        self.in_forward = frozenset(holder.key for holder in now)
        self.in_backward = frozenset(late)
        return tuple({**late, **{holder.key: holder for holder in now}}.values())

    def may_draw_from_process(self) -> bool:
        """Whether it can reach Python's or NumPy's generator of the whole process."""
        return not OF_THE_PROCESS.isdisjoint(self.holders)

    def drew_from_process(self) -> bool:
        """Whether it was seen to draw from one of these."""
        return not OF_THE_PROCESS.isdisjoint(self.changed)

    def own_generators(self) -> dict[Any, Holder]:
        """The generators of random numbers that it can reach, but for those of the process."""
        found = self.holders.items()
        return {k: one for k, one in found if one.is_generator and k not in OF_THE_PROCESS}

    def has_changed_python(self) -> bool:
        """Whether something other than the values of tensors was seen to change."""
        return any(not self.holders[key].is_tensor for key in self.changed)

    def may_go_another_way(self) -> bool:
        """Whether it may branch otherwise next time: it draws numbers, or changes what it reads."""
        return self.may_draw_from_process() or self.has_changed_python()

    @contextmanager
    def leaving_no_trace(
        self, roots: Iterable[Any], backward: Iterable[Any] = (), apart: Iterable[Any] = ()
    ) -> Iterator[None]:
        """Run code that some values lead to, and put back what it changes; see ``look``."""
        with self._restored(self.look(roots, backward, apart)):
            yield

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Run the code once more on fake tensors, and put back what it changes."""
        holders = tuple(self.holders.values())
        with disable_current_modes():
            for holder in holders:
                holder.note()
        with self._restored(holders):
            yield

    @contextmanager
    def _restored(self, found: Iterable[Holder]) -> Iterator[None]:
        try:
            yield
        finally:
            with disable_current_modes():
                self._put_back(found)

    def _put_back(self, found: Iterable[Holder]) -> None:
        for holder in found:
            self.holders.setdefault(holder.key, holder)
            if holder.has_changed():
                self.changed.add(holder.key)
                self.left[holder.key] = holder.held()
                holder.put_back()
            holder.forget()

    def tensors(self) -> frozenset[int]:
        """The tensors among it, by number (``id``)."""
        return frozenset(key for key, holder in self.holders.items() if holder.is_tensor)

    def changed_tensors(self) -> list[torch.Tensor]:
        """The tensors among what was seen to change, with values here."""
        return _with_values(self.holders[key] for key in self.changed)

    def note_constants(self, constants: Iterable[torch.Tensor]) -> None:
        """Note which tensors, that are read by other code, it can reach."""
        own = set(map(storage_of, _with_values(self.holders.values())))
        dense = filter(has_storage, constants)
        self.constants = tuple([one for one in dense if storage_of(one) in own])

    def note_read_outside(self, places: Iterable[Place]) -> None:
        """Note which places, that are read by other code, it can reach."""
        self.read_outside = tuple([p for p in places if self._holds_any(p, [p.read()])])

    def reaches(self, place: Place) -> bool:
        """Whether the code can reach what a place holds, or a container in it."""
        value = place.read()
        return self._holds_any(place, [value, *containers_in(freeze(value))])

    def _holds_any(self, place: Place, values: Iterable[Any]) -> bool:
        """Whether some of this is state of it, which may decide."""
        held = [id(holder_of(value)) for value in values]
        keys = id(place.holder), ("global", id(place.holder), place.key), *held
        found = (self.holders[key] for key in keys if key in self.holders)
        return any(holder.is_value or holder.is_stepped for holder in found)

    def note_backward(self, seen: Reached) -> None:
        """Note what a trial run of its backward has changed."""
        self.left_late = {key: seen.left[key] for key in self.in_backward & seen.left.keys()}
        self.changed |= self.left_late.keys()

    @contextmanager
    def as_left(self, key: Any, left: Any) -> Iterator[None]:
        """Let state be as it was found after a change of it."""
        holder = self.holders[key]
        before = holder.held()
        holder.hold(left)
        try:
            yield
        finally:
            holder.hold(before)

    def note_changed(self, changed: Iterable[Holder]) -> None:
        """Note what was seen to change in another way."""
        for holder in changed:
            self.holders.setdefault(holder.key, holder)
            self.changed.add(holder.key)


def _with_values(holders: Iterable[Holder]) -> list[torch.Tensor]:
    tensors = (holder.tensor for holder in holders)
    there = (one for one in tensors if one is not None and not isinstance(one, StandIn))
    return [*filter(has_storage, there)]
