"""The record of a construction, from which any part of it can be computed later.

Each tensor built under `deferred_init` lies on a *hollow* storage: an ordinary CPU storage of the
right size with no memory behind it. Shapes, strides, aliases and views are thus those of plain
construction, and torch itself keeps them. What would have written into it is kept as a list of
calls. To *fill* some storages:

1. backwards through the calls, find those that the wanted contents depend on;
2. forwards, execute them on memory of their own, dropping each content after its last use;
3. swap that memory into the hollow storages, in place.

In step 3 nothing is replaced but the memory: a `Parameter` stays the object that the optimizer
holds, and every view, tie and saved tensor sees the values.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import torch

from graphsplit.deferred.calls import (
    RecordedCall,
    TensorSpec,
    hollow_storage,
    user_line,
)
from graphsplit.errors import DeferredInitError, InvariantError
from graphsplit.optimizers.freed_memory import note_dropped
from graphsplit.torch_ext.attributes import storage_key, storage_of, swap_memory
from graphsplit.torch_ext.private import has_storage, storage_use_count
from graphsplit.torch_ext.stand_ins import plain_torch

# Where in its generator's sequence each recorded random call stands.
#
# A random call is executed while the construction is recorded, into memory that is dropped at
# once. The generator is thus at every moment in the state of plain construction: after the
# context, and also where the construction itself saves, restores or seeds it. To draw the same
# numbers again, later and perhaps only those of one parameter, states of the generator are kept:
#
#   calls      a      b      c      d      e        c alone: set state S1, drop a draw of b, draw c
#   states   S0            (S1 at b)     S2         (S1: many numbers since S0; S2: the user seeded)
ELEMENTS_PER_STATE = 1 << 20
"""A state takes 5 KB. One per million numbers costs 0.1 % of float32 parameters' memory."""


def _checksum(state: torch.Tensor) -> int:
    return zlib.crc32(state.numpy().tobytes())


class DrawChain:
    """All recorded random calls of one generator, in program order."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._calls: list[RecordedCall] = []
        self._sizes: list[int] = []
        self._states: dict[int, torch.Tensor] = {}
        self._checksums: list[int] = []
        self._positions: dict[RecordedCall, int] = {}
        self._num_since_state = 0
        self._end: torch.Tensor | None = None

    def before_draw(self, num_elements: int) -> None:
        """Keeps the generator's state for the next call, if the chain needs it."""
        state = self.generator.get_state()
        moved = self._end is None or not torch.equal(state, self._end)
        if moved or self._num_since_state + num_elements > ELEMENTS_PER_STATE:
            self._states[len(self._calls)] = state
            self._num_since_state = 0
        self._num_since_state += num_elements

    def after_draw(self, call: RecordedCall, size_bytes: int) -> None:
        """Appends a call that was just executed after `before_draw`, its result dropped."""
        self._end = self.generator.get_state()
        self._positions[call] = len(self._calls)
        self._calls.append(call)
        self._sizes.append(size_bytes)
        self._checksums.append(_checksum(self._end))
        note_dropped(size_bytes)

    def go_to(self, call: RecordedCall, here: int) -> int:
        """Brings the generator to where it stood before the call; returns the position after it.

        ``here`` is the position up to which the sequence was drawn again, -1 for none.
        """
        start = target = self._positions[call]
        while start not in self._states:
            start -= 1
        # At a kept state the sequence may jump: the user seeded, or restored a state.
        if not start < here <= target:
            self.generator.set_state(self._states[start])
            here = start
        for position in range(here, target):  # drawn into memory that is dropped
            self._calls[position].run(scratch_or_shape)
            note_dropped(self._sizes[position])
            self.check(self._calls[position])
        return target + 1

    def check(self, call: RecordedCall) -> None:
        """Raises unless the generator is where the recording left it after this call."""
        if _checksum(self.generator.get_state()) != self._checksums[self._positions[call]]:
            raise DeferredInitError(
                f"replaying {call.func} took other random numbers than were recorded\n"
                f"  {call.where}\n"
                "  Fix: build this network without gs.deferred_init()."
            )

    def __contains__(self, call: RecordedCall) -> bool:
        return call in self._positions


class DrawReplay:
    """Executes some calls of some chains again; leaves the generators as it found them."""

    def __init__(self, chains: list[DrawChain]) -> None:
        self._chains = chains
        self._next: dict[int, int] = {}
        self._saved: dict[int, torch.Tensor] = {}

    def prepare(self, call: RecordedCall) -> DrawChain:
        """Brings the call's generator to where it stood before the call."""
        index, chain = next((i, chain) for i, chain in enumerate(self._chains) if call in chain)
        if index not in self._saved:
            self._saved[index] = chain.generator.get_state()
        self._next[index] = chain.go_to(call, self._next.get(index, -1))
        return chain

    def restore(self) -> None:
        """Gives every generator the state it had before the replay."""
        for index, state in self._saved.items():
            self._chains[index].generator.set_state(state)


def scratch_or_shape(spec: TensorSpec) -> torch.Tensor:
    """Returns what a random call may be executed on when its result is not wanted."""
    return spec.like_nothing() if spec.storage < 0 else spec.scratch()


WARN_FROM_BYTES = 1 << 20
"""Smaller contents are filled on demand without a word."""


def warn_if_large(size_bytes: int, because: str) -> None:
    """Says that memory is taken before the plan is known, why, and at which line of the user's."""
    if size_bytes >= WARN_FROM_BYTES:
        warnings.warn(
            f"gs.deferred_init: {size_bytes / 2**20:.1f} MB take memory already now, because "
            f"{because}\n  {user_line()}",
            stacklevel=3,
        )


class InitRecording:
    """Hollow storages and the calls that tell their contents. Not thread-safe.

    Attributes:
        calls: operations that were not executed, or whose result was dropped.
        hollow: the hollow storages, by number.
        sizes: the size of each storage in bytes.
        unset: storages without a content of their own: those of ``torch.empty``.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.on_filled: Callable[[set[int]], None] = lambda _: None
        self.calls: list[RecordedCall] = []
        self._chains: list[DrawChain] = []
        self.hollow: dict[int, torch.UntypedStorage] = {}
        self._by_address: dict[int, int] = {}
        self.sizes: list[int] = []
        self.unset: set[int] = set()
        # Contents as of the call at this position, kept from one read to the next.
        self._recent: tuple[int, dict[int, torch.UntypedStorage]] = (0, {})

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Returns the number of the hollow storage that the tensor lies on, None if it is real."""
        if tensor.layout != torch.strided or not has_storage(tensor):
            return None
        try:
            return self._by_address.get(storage_of(tensor))
        except (NotImplementedError, RuntimeError):
            return None  # A wrapper of another library's: none of ours.

    def new_storage(self, size_bytes: int) -> int:
        """Adds a hollow storage and returns its number."""
        number = len(self.sizes)
        storage = hollow_storage(size_bytes)
        self.sizes.append(size_bytes)
        self.hollow[number] = storage
        self._by_address[storage_key(storage)] = number
        return number

    def chain_of(self, generator: torch.Generator) -> DrawChain:
        """Returns the chain of the random calls of this generator."""
        for chain in self._chains:
            if chain.generator is generator:
                return chain
        self._chains.append(DrawChain(generator))
        return self._chains[-1]

    def alive(self) -> set[int]:
        """Returns the hollow storages on which some tensor outside of the recording lies."""
        # One count is that of the recording's own reference.
        return {n for n, held in self.hollow.items() if storage_use_count(storage_key(held)) > 1}

    def close(self) -> None:
        """Ends the recording; forgets what nothing alive depends on."""
        self.is_open = False
        self._forget()

    def fill(self, numbers: Iterable[int], *, because: str | None = None) -> None:
        """Gives the storages their memory and contents, in place.

        With ``because`` a warning says why memory is taken before the plan is known.
        """
        wanted = {number for number in numbers if number in self.hollow}
        if not wanted:
            return
        size_bytes = sum(self.sizes[number] for number in wanted)
        if because is not None:
            warn_if_large(size_bytes, because)
        with plain_torch():
            contents = self._compute(wanted)
            for number in wanted:
                self._swap_in(number, contents.pop(number))
        self.on_filled(wanted)
        if not self.is_open:
            self._forget()

    def _swap_in(self, number: int, content: torch.UntypedStorage) -> None:
        storage = self.hollow.pop(number)
        del self._by_address[storage_key(storage)]
        if content.nbytes() != storage.nbytes():
            raise DeferredInitError(
                f"a replayed tensor takes {content.nbytes()} bytes, recorded were "
                f"{storage.nbytes()}\n  Fix: build this network without gs.deferred_init()."
            )
        swap_memory(storage, content)

    def _forget(self) -> None:
        """Drops hollow storages that nobody holds, and the calls that no other needs."""
        alive = self.alive()
        for number in set(self.hollow) - alive:
            del self._by_address[storage_key(self.hollow.pop(number))]
        self._recent = (0, {})
        self.calls, _ = _needed_for(self.calls, alive)

    def _compute(self, wanted: set[int]) -> dict[int, torch.UntypedStorage]:
        """Returns the wanted contents on new memory.

        A construction that reads in a loop (rejection sampling in ``trunc_normal_``) would start
        from nothing each time: contents that are still alive are kept for the next read.
        """
        position, known = self._recent
        self._recent = (0, {})
        since = self.calls[position:]
        newer, needed = _needed_for(since, wanted)
        known = {number: known[number] for number in needed if number in known}
        older, _ = _needed_for(self.calls[:position], needed - set(known))
        contents: dict[int, torch.UntypedStorage] = {}
        replay = DrawReplay(self._chains)
        try:
            self._run(older, contents, replay, keep=needed - set(known))
            contents.update(known)
            known.clear()
            keep = set(wanted)
            if self.is_open:
                keep |= self.alive() & _up_to_date(since, newer, contents)
            self._run(newer, contents, replay, keep=keep)
        finally:
            replay.restore()
        for number in wanted - set(contents):
            contents[number] = self._unset_content(number, ())
        if self.is_open:
            self._recent = (len(self.calls), self._worth_keeping(contents, keep - wanted))
        return contents

    def _worth_keeping(
        self, contents: dict[int, torch.UntypedStorage], alive: set[int]
    ) -> dict[int, torch.UntypedStorage]:
        """Returns the latest contents, bounded by what one initialiser works on at a time."""
        candidates = [number for number in reversed(contents) if number in alive]
        room = 4 * max((self.sizes[number] for number in candidates), default=0)
        kept = {}
        for number in candidates:
            room -= self.sizes[number]
            if room >= 0:
                kept[number] = contents[number]
        return kept

    def _resolve(
        self,
        contents: dict[int, torch.UntypedStorage],
        overwritten: Collection[int],
        spec: TensorSpec,
    ) -> torch.Tensor:
        """Returns an operand of a call that is about to be executed."""
        if spec.storage < 0:
            return spec.like_nothing()
        if spec.storage not in contents:
            contents[spec.storage] = self._unset_content(spec.storage, overwritten)
        return spec.on(contents[spec.storage])

    def _unset_content(self, number: int, allowed: Collection[int]) -> torch.UntypedStorage:
        """Returns new memory for what plain construction, too, would not have set yet."""
        if number not in self.unset and number not in allowed:
            raise InvariantError(f"no content for storage {number}")
        return torch.UntypedStorage(self.sizes[number])

    def _run(
        self,
        calls: Sequence[RecordedCall],
        contents: dict[int, torch.UntypedStorage],
        replay: DrawReplay,
        *,
        keep: Collection[int],
    ) -> None:
        """Executes calls in order, each content dropped when no later call reads it."""
        for call, dead in zip(calls, _dead_after(calls, keep), strict=True):
            chain = replay.prepare(call) if call.is_draw else None
            outputs = call.run(partial(self._resolve, contents, call.overwrites))
            if chain is not None:
                chain.check(call)
            for spec, output in zip(call.created, outputs, strict=True):
                contents[spec.storage] = output.untyped_storage()
            del outputs
            for number in dead & set(contents):
                del contents[number]
                note_dropped(self.sizes[number])


def _needed_for(
    calls: Sequence[RecordedCall], wanted: Iterable[int]
) -> tuple[list[RecordedCall], set[int]]:
    """Returns the calls on which the wanted contents depend, and what must exist before them."""
    needed = set(wanted)
    found: list[RecordedCall] = []
    for call in reversed(calls):
        if not needed:
            break
        if call.writes.isdisjoint(needed):
            continue
        found.append(call)
        needed -= call.overwrites
        needed |= call.reads
    found.reverse()
    return found, needed


def _up_to_date(
    calls: Sequence[RecordedCall], executed: Sequence[RecordedCall], before: Collection[int]
) -> set[int]:
    """Returns the storages whose content is that of after all calls, though not all are executed.

    Of those that no call writes to, the ones that were ``before``.
    """
    last_writer = {number: call for call in calls for number in call.writes}
    done = set(executed)
    written = {number for number, call in last_writer.items() if call in done}
    return written | {number for number in before if number not in last_writer}


def _dead_after(calls: Sequence[RecordedCall], keep: Collection[int]) -> list[set[int]]:
    """Returns for each call the storages whose content no later call, nor the caller, reads."""
    live = set(keep)
    dead: list[set[int]] = []
    for call in reversed(calls):
        dead.append(set(call.reads | call.writes) - live)
        live -= call.overwrites
        live |= call.reads
    dead.reverse()
    return dead
