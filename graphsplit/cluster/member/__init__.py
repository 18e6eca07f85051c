"""A worker's part in a job, and its stream to the scheduler."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``Member`` and the names beside it, as they were imported before; for one version."""
    # Asked for only: the state machine is imported without gRPC's messages.
    if name not in ("Member", "NodeIdentity", "Peer", "Position"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from graphsplit.cluster.member import member

    return getattr(member, name)
