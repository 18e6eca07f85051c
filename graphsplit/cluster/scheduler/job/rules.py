"""The settings of a job that its scheduler decides by."""

from __future__ import annotations

from dataclasses import dataclass

from graphsplit.failure import FailureCause
from graphsplit.settings import FAIL_FAST, GO_ON, RESTART, WAIT_REJOIN, silence_within

EX_TEMPFAIL = 75
"""The exit status that says: start the job again, from its last snapshot."""


@dataclass(frozen=True)
class JobRules:
    """The settings of the job."""

    num_workers: int
    topo_timeout_s: float
    node_timeout_s: float
    receive_timeout_s: float
    recovery: str = FAIL_FAST
    keeps_journal: bool = False

    @property
    def silence_s(self) -> float:
        """How long a worker may be silent before it counts as lost."""
        return silence_within(self.node_timeout_s)

    @property
    def lets_rejoin(self) -> bool:
        """Whether a lost worker may come back, and the others go on."""
        return self.recovery in (WAIT_REJOIN, GO_ON)

    @property
    def goes_on(self) -> bool:
        """Whether the others go on without a lost worker, until it comes back."""
        return self.recovery == GO_ON

    @property
    def restarts(self) -> bool:
        """Whether a failed job is started again as a whole."""
        return self.recovery == RESTART

    @property
    def workers_reconnect(self) -> bool:
        """Whether a worker whose stream broke opens another one."""
        return self.lets_rejoin or self.keeps_journal

    def failure_status(self, cause: FailureCause) -> int:
        """The scheduler's exit status when the job fails with this cause."""
        if cause.kind == "interrupted":
            return 130
        return EX_TEMPFAIL if self.restarts and cause.is_retryable else 1


@dataclass(frozen=True)
class JobIdentity:
    """The random values of a job: its id, 128 bits in hexadecimal, and a seed."""

    job: str
    seed: int
    generation: int = 1
