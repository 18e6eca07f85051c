"""What can go wrong with a network, as directions of links and what happens on them. Pure.

Hosts are numbered: 0 is the scheduler's, r + 1 that of worker r.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SCHEDULER = "scheduler"
FAIL_FAST, WAIT_REJOIN = "fail_fast", "wait_rejoin"

_CUT = {"loss": 1.0}
_QUALITIES: dict[str, dict[str, float]] = {
    "delay 200 ms": {"delay_s": 0.2},
    "loss 5 %": {"loss": 0.05},
    "duplication": {"copies": 0.5},
}
HARMLESS = frozenset(_QUALITIES)
CUT = "cut"
"""Nothing passes, in either direction."""
FOR_GOOD = "cut, for good"
"""The same, and nobody mends it: under ``wait_rejoin`` the job must not go on trying for ever."""
MUTE, DEAF = "half-open, mute", "half-open, deaf"
"""Nothing that the victim sends arrives; nothing arrives at the victim."""
VANISHED = "half-open, vanished"
"""The victim's process is gone, and no packet has said so: a power cut."""


@dataclass(frozen=True)
class Case:
    """One run of the matrix.

    Attributes:
        victim: ``"scheduler"``, ``"worker 1"``, or ``"link 1-2"``: that between two workers.
        phase: Where the job is when the fault begins.
        fault: What begins.
        policy: What the job does about a lost worker.
        seed: Which of the runs of one cell. An even one runs gRPC under TLS, an odd one Gloo with
            a job token.
    """

    victim: str
    phase: str
    fault: str
    policy: str
    seed: int = 0

    @property
    def heals(self) -> bool:
        """Whether the network is mended, once the job has given the victim up and waits for it."""
        return self.policy == WAIT_REJOIN and self.fault != FOR_GOOD

    @property
    def ends_the_job(self) -> bool:
        """Whether the job must fail, with a cause."""
        return not (self.is_harmless or self.heals)

    @property
    def may_finish(self) -> bool:
        """Whether the job may be over for all others before they miss the victim.

        It has said that it is done, and does not hear the answer. That both know how it ended
        cannot be had: whatever is said last may be lost.
        """
        return self.phase == "finishing" and self.fault == DEAF

    @property
    def is_harmless(self) -> bool:
        """Whether the job must not notice."""
        return self.fault in HARMLESS

    @property
    def uses_tls(self) -> bool:
        """Whether certificates protect the job; else a token does."""
        return self.seed % 2 == 0

    @property
    def is_replaced(self) -> bool:
        """Whether another process takes the victim's place."""
        return self.fault == VANISHED and self.policy == WAIT_REJOIN

    @property
    def name(self) -> str:
        """As a file name."""
        words = (self.victim, self.phase, self.fault, self.policy, f"{self.seed}")
        return "-".join(words).replace(" ", "_").replace(",", "").replace("%", "")


def host_of(process: str) -> int:
    """The host of a process."""
    return 0 if process == SCHEDULER else 1 + int(process.split()[1])


def asker_of(victim: str) -> int:
    """The rank of the worker in which the fault begins, at a moment of its own."""
    return 0 if victim == SCHEDULER else int(victim.split()[1].partition("-")[0])


def links_of(case: Case, num_hosts: int) -> list[list[Any]]:
    """What to ask the switch for when the fault begins."""
    quality = _QUALITIES.get(case.fault, _CUT)
    return [[*link, quality] for link in _directions(case, num_hosts)]


def _directions(case: Case, num_hosts: int) -> Iterator[tuple[int, int]]:
    kind, _, name = case.victim.partition(" ")
    if kind == "link":
        one, other = (1 + int(rank) for rank in name.split("-"))
        pairs = [(one, other)]
    else:
        mine = host_of(case.victim)
        pairs = [(mine, other) for other in range(num_hosts) if other != mine]
    for mine, other in pairs:
        if case.fault != DEAF:
            yield mine, other
        if case.fault != MUTE:
            yield other, mine
