"""The kinds of fields that several messages of the cluster have, each with its bound."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated

from graphsplit.cluster.wire import limits
from graphsplit.encoding.fields import AtMost, choice, integer, number, string
from graphsplit.encoding.records import record
from graphsplit.root_cause import JOINED, FailureCause, Location
from graphsplit.settings import RECOVERY_POLICIES

_MAX_PID = (1 << 31) - 1

Name = Annotated[str, string(limits.MAX_NAME_CHARS)]
NeededName = Annotated[str, string(limits.MAX_NAME_CHARS, required=True)]
NodeId = Annotated[str, string(limits.MAX_NODE_ID_CHARS)]
NeededNodeId = Annotated[str, string(limits.MAX_NODE_ID_CHARS, required=True)]
Incarnation = Annotated[str, string(limits.MAX_INCARNATION_CHARS)]
NeededIncarnation = Annotated[str, string(limits.MAX_INCARNATION_CHARS, required=True)]
Host = Annotated[str, string(limits.MAX_HOST_CHARS)]
NeededHost = Annotated[str, string(limits.MAX_HOST_CHARS, required=True)]
PlaceText = Annotated[str, string(limits.MAX_PLACE_CHARS)]
PositionText = Annotated[str, string(limits.MAX_POSITION_CHARS, lines=True)]
Lines = Annotated[str, string(limits.MAX_MESSAGE_CHARS, lines=True)]
Traceback = Annotated[str, string(limits.MAX_TRACEBACK_CHARS, lines=True)]
Rank = Annotated[int, integer(0, limits.MAX_WORKERS - 1)]
RankOrNone = Annotated[int, integer(-1, limits.MAX_WORKERS - 1)]
Pid = Annotated[int, integer(1, _MAX_PID)]
PidOrNone = Annotated[int, integer(0, _MAX_PID)]
Count = Annotated[int, integer(0, (1 << 64) - 1)]
FromOne = Annotated[int, integer(1, (1 << 32) - 1)]
Seconds = Annotated[float, number(0, sys.float_info.max)]
RecoveryPolicy = Annotated[str, choice(RECOVERY_POLICIES, "recovery policy")]
Endpoints = Annotated[
    Mapping[NeededName, Annotated[str, string(limits.MAX_ENDPOINT_CHARS)]],
    AtMost(limits.MAX_ENDPOINTS),
]
Versions = Annotated[
    Mapping[NeededName, Annotated[str, string(limits.MAX_VERSION_CHARS)]],
    AtMost(limits.MAX_VERSIONS),
]

# Values that are not the cluster's own.
Place = Annotated[
    Location,
    record(
        Location,
        {
            "step": Count | None,
            "microbatch": Count | None,
            "instruction": PlaceText,
            "operation": PlaceText,
            "module": PlaceText,
            "source": PlaceText,
            "edge": Count | None,
            "waits_for": Rank | None,
            "waits_what": PlaceText,
        },
    ),
]
_FAILURES = ("exception", "lost", "refused", "disagreement", "interrupted", "scheduler_lost")
_FAILURE_KIND = choice((*_FAILURES, "timeout", JOINED), "kind of failure")
Cause = Annotated[
    FailureCause,
    record(
        FailureCause,
        {
            "kind": Annotated[str, _FAILURE_KIND],
            "message": Lines,
            "rank": RankOrNone,
            "host": Host,
            "pid": PidOrNone,
            "position": PositionText,
            "traceback": Traceback,
            "location": Place,
        },
    ),
]
