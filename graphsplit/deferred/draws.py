"""Where in its generator's sequence each recorded random call stands.

A random call is executed while the construction is recorded, into memory that is dropped at
once. The generator is thus at every moment in the state of plain construction: after the
context, and also where the construction itself saves, restores or seeds it. To draw the same
numbers again, later and perhaps only those of one parameter, states of the generator are kept:

    calls      a      b      c      d      e        c alone: set state S1, drop a draw of b, draw c
    states   S0            (S1 at b)     S2         (S1: many numbers since S0; S2: the user seeded)
"""

from __future__ import annotations

import zlib

import torch

from graphsplit.deferred.calls import RecordedCall, TensorSpec
from graphsplit.errors import DeferredInitError
from graphsplit.optimizers.freed_memory import note_dropped

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

    def __contains__(self, call: RecordedCall) -> bool:
        return call in self._positions

    def start_of(self, position: int) -> int:
        """Returns the last position up to this one whose state was kept."""
        while position not in self._states:
            position -= 1
        return position

    def rewind(self, position: int) -> None:
        """Puts the generator into the state kept for this position."""
        self.generator.set_state(self._states[position])

    def position_of(self, call: RecordedCall) -> int:
        """Returns the call's place in the sequence."""
        return self._positions[call]

    def drop(self, position: int) -> None:
        """Executes the call at this position into memory that is dropped."""
        call = self._calls[position]
        call.run(scratch_or_shape)
        note_dropped(self._sizes[position])
        self.check(position)

    def check(self, position: int) -> None:
        """Raises unless the generator is where the recording left it after this position."""
        if _checksum(self.generator.get_state()) != self._checksums[position]:
            call = self._calls[position]
            raise DeferredInitError(
                f"replaying {call.func} took other random numbers than were recorded\n"
                f"  {call.where}\n"
                "  Fix: build this network without gs.deferred_init()."
            )


class DrawReplay:
    """Executes some calls of some chains again; leaves the generators as it found them."""

    def __init__(self, chains: list[DrawChain]) -> None:
        self._chains = chains
        self._next: dict[int, int] = {}
        self._saved: dict[int, torch.Tensor] = {}

    def prepare(self, call: RecordedCall) -> DrawChain:
        """Brings the call's generator to where it stood before the call."""
        index = next(i for i, chain in enumerate(self._chains) if call in chain)
        chain = self._chains[index]
        target = chain.position_of(call)
        start = chain.start_of(target)
        if index not in self._saved:
            self._saved[index] = chain.generator.get_state()
        here = self._next.get(index, -1)
        # At a kept state the sequence may jump: the user seeded, or restored a state.
        if not start < here <= target:
            chain.rewind(start)
            here = start
        for position in range(here, target):
            chain.drop(position)
        self._next[index] = target + 1
        return chain

    def restore(self) -> None:
        """Gives every generator the state it had before the replay."""
        for index, state in self._saved.items():
            self._chains[index].generator.set_state(state)


def scratch_or_shape(spec: TensorSpec) -> torch.Tensor:
    """Returns what a random call may be executed on when its result is not wanted."""
    return spec.like_nothing() if spec.storage < 0 else spec.scratch()
