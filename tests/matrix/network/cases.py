"""The cases of the network matrix."""

from __future__ import annotations

from collections.abc import Iterator

from matrix.network.faults import (
    CUT,
    DEAF,
    FAIL_FAST,
    FOR_GOOD,
    HARMLESS,
    MUTE,
    SCHEDULER,
    VANISHED,
    WAIT_REJOIN,
    Case,
)
from matrix.table import PHASES

_SOME = ("planning", "forward", "eval", "finishing")
_OTHERS = ("first step", "backward", "optimizer", "snapshot")


def cases(seed: int) -> Iterator[Case]:
    """All of one seed. A job that does not recover takes no snapshots."""
    for policy in (FAIL_FAST, WAIT_REJOIN):
        for case in _of_policy(policy, seed):
            if case.phase != "snapshot" or policy == WAIT_REJOIN:
                yield case
    yield Case("link 1-2", "forward", FOR_GOOD, WAIT_REJOIN, seed)


def _of_policy(policy: str, seed: int) -> Iterator[Case]:
    yield from (Case("worker 1", phase, CUT, policy, seed) for phase in PHASES)
    yield from (Case("worker 1", phase, MUTE, policy, seed) for phase in _SOME)
    yield from (Case("worker 1", phase, DEAF, policy, seed) for phase in _SOME)
    yield from (Case("worker 1", phase, VANISHED, policy, seed) for phase in _OTHERS)
    yield from (Case(SCHEDULER, phase, CUT, policy, seed) for phase in _SOME)
    yield from (Case("link 1-2", phase, CUT, policy, seed) for phase in (*_SOME[:3], *_OTHERS))
    yield Case("link 1-2", "forward", MUTE, policy, seed)
    for fault in sorted(HARMLESS):
        for phase in ("registering", "forward", "snapshot"):
            yield Case("worker 1", phase, fault, policy, seed)
