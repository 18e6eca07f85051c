"""The scheduler of a job: who takes part, which generation runs, and how it ends."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``serve``, as it was imported before it had a file; for one version."""
    # Asked for only: the state machine is imported without the server.
    if name != "serve":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from graphsplit.cluster.scheduler.server import serve

    return serve
