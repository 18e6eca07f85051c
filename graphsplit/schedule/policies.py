"""The schedules that there are, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from graphsplit.program.lower import Policy
from graphsplit.schedule.gpipe import gpipe
from graphsplit.schedule.one_forward_one_backward import one_forward_one_backward

# Names without a policy are accepted with one microbatch only: then all are the same.
NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "auto")
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_forward_one_backward}
)
