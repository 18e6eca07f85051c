"""Which transport reaches which worker, decided from what the workers registered.

A worker registers a map from transport to address::

    {"token": "9f…", "shm": "<host identity>/<socket name>", "grpc": "127.0.0.1:40123"}
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from graphsplit.errors import ConfigurationError

Mode = Literal["auto", "shm", "grpc"]
MODES: tuple[Mode, ...] = ("auto", "shm", "grpc")


def host_identity() -> str | None:
    """What two processes must have in common to share memory; None where it cannot be shared.

    The boot names the running kernel, the network namespace decides which sockets are seen, and
    the user decides whom a process trusts.
    """
    if sys.platform != "linux":
        return None
    from graphsplit.transport import _doorbell

    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None
    return f"{boot}.{namespace}.{os.geteuid()}" if _doorbell.is_available() else None


def shm_endpoint(identity: str, socket_name: str) -> str:
    """The address of a worker's shared memory."""
    return f"{identity}/{socket_name}"


def shm_socket_name(endpoints: Mapping[str, str]) -> str | None:
    """The socket name in a worker's endpoints, if it offers shared memory."""
    return endpoints["shm"].rpartition("/")[2] if "shm" in endpoints else None


def _why_not_shm(a: Mapping[str, str], b: Mapping[str, str]) -> str | None:
    if "shm" not in a or "shm" not in b:
        return "shared memory is not offered by both workers"
    first = a["shm"].rpartition("/")[0].split(".")
    second = b["shm"].rpartition("/")[0].split(".")
    parts = ("host", "network namespace", "user")
    for name, mine, theirs in zip(parts, first, second, strict=False):
        if mine != theirs:
            return f"not on one machine: {name} {mine} and {theirs}"
    return None if first == second else "not on one machine"


def choose(a: Mapping[str, str], b: Mapping[str, str], mode: Mode) -> tuple[str, str]:
    """The transport between two workers, and the reason in words.

    Args:
        a: What one worker registered.
        b: What the other one registered.
        mode: ``"auto"``, or the only transport that is allowed.

    Raises:
        ConfigurationError: The transport that was asked for cannot connect these two.
    """
    why_not = _why_not_shm(a, b)
    if mode != "grpc" and why_not is None:
        return "shm", "both run as one user on one host"
    if mode == "shm":
        raise ConfigurationError(
            f"GS_TRANSPORT=shm is impossible: {why_not}\n"
            f"  Fix: run all workers on one Linux host as one user, or set GS_TRANSPORT=auto"
        )
    if "grpc" not in a or "grpc" not in b:
        raise ConfigurationError(
            "no transport connects the two: gRPC is not offered by both workers\n"
            "  Fix: set GS_TRANSPORT to the same value for all workers"
        )
    return "grpc", "GS_TRANSPORT=grpc" if mode == "grpc" else str(why_not)
