"""The schedules that there are, by name, and what users give in their place."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType

from graphsplit.program.lower import Policy
from graphsplit.schedule.auto import auto
from graphsplit.schedule.named import NAMED

POLICIES: Mapping[str, Policy] = MappingProxyType({"gpipe": NAMED["gpipe"], **NAMED, "auto": auto})
# With one microbatch these are one and the same.
_WHOLE = ("gpipe", "1f1b", "interleaved_1f1b")


def policy_of(schedule: str | Policy, num_microbatches: int) -> Policy:
    """The policy that a name stands for, or the user's own."""
    if not isinstance(schedule, str):
        return schedule
    return POLICIES["gpipe" if num_microbatches == 1 and schedule in _WHOLE else schedule]


def takes_costs(schedule: str | Policy) -> bool:
    """Whether a policy asks, by a parameter ``costs``, for what steps were found to cost."""
    policy = POLICIES[schedule] if isinstance(schedule, str) else schedule
    return "costs" in inspect.signature(policy).parameters
