"""Chooses the transport between two workers, from what they registered.

A worker registers a map from transport to address::

    {"token": "9f…", "shm": "<host identity>/<socket name>", "grpc": "127.0.0.1:40123",
     "gloo": "2.13", "nccl": "2.27.3"}

Where ``torch.distributed`` meets its peers is told later, over gRPC; here stands its version.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from graphsplit.errors import ConfigurationError

Mode = Literal["auto", "shm", "grpc", "gloo", "nccl"]
MODES: tuple[Mode, ...] = ("auto", "shm", "grpc", "gloo", "nccl")
TORCH_MODES: tuple[Mode, ...] = ("gloo", "nccl")


def host_identity() -> str | None:
    """The same string in processes that can share memory; None where it cannot be shared.

    The boot names the running kernel, the network namespace decides which sockets are seen, and
    the user decides whom a process trusts.
    """
    if sys.platform != "linux":
        return None
    from graphsplit.transport.shm import doorbell

    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return None
    return f"{boot}.{namespace}.{os.geteuid()}" if doorbell.is_available() else None


def shm_endpoint(identity: str, socket_name: str) -> str:
    """The address of a worker's shared memory."""
    return f"{identity}/{socket_name}"


def shm_socket_name(endpoints: Mapping[str, str]) -> str | None:
    """The socket name in a worker's endpoints, if it offers shared memory."""
    return endpoints["shm"].rpartition("/")[2] if "shm" in endpoints else None


_PARTS_OF_IDENTITY = (
    "not on one machine: host",
    "not in one network namespace:",
    "not of one user: user",
)


def _why_not_shm(a: Mapping[str, str], b: Mapping[str, str]) -> str | None:
    if "shm" not in a or "shm" not in b:
        return "shared memory is not offered by both workers"
    first = a["shm"].rpartition("/")[0].split(".")
    second = b["shm"].rpartition("/")[0].split(".")
    for part, mine, theirs in zip(_PARTS_OF_IDENTITY, first, second, strict=False):
        if mine != theirs:
            return f"{part} {mine} and {theirs}"
    return None if first == second else "not on one machine"


def encrypts(transport: str) -> bool:
    """Whether a transport keeps what it moves from others, where the user asks for that.

    Shared memory belongs to one user of one machine, who could read the private key as well.
    """
    return transport in ("shm", "grpc")


def torch_versions() -> dict[str, str]:
    """The backends of ``torch.distributed`` here, with the version that both ends must share."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return {}
    release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    versions = {"gloo": release} if dist.is_gloo_available() else {}
    if versions and dist.is_nccl_available() and torch.cuda.is_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def _why_not_torch(a: Mapping[str, str], b: Mapping[str, str], name: str) -> str | None:
    needed = ("grpc", "gloo", "nccl") if name == "nccl" else ("grpc", "gloo")
    for part in needed:
        if part not in a or part not in b:
            return f"{part} is not offered by {'the worker' if a is b else 'both workers'}"
        if part != "grpc" and a[part] != b[part]:
            return f"{part} of versions {a[part]} and {b[part]}"
    return None


_FIXES = {
    "shm": "run all workers on one Linux host as one user, or set GS_TRANSPORT=auto",
    "gloo": "run all workers with one build of torch that has Gloo, or set GS_TRANSPORT=auto",
    "nccl": "run all workers on GPUs, with one build of torch, or set GS_TRANSPORT=auto",
}


def choose(
    a: Mapping[str, str], b: Mapping[str, str], mode: Mode, *, encrypted: bool = False
) -> tuple[str, str]:
    """The transport between two workers, and the reason in words.

    Args:
        a: What one worker registered.
        b: What the other one registered.
        mode: ``"auto"``, or the only transport that is allowed.
        encrypted: ``"auto"`` must not choose a transport that cannot encrypt.

    Raises:
        ConfigurationError: The transport that was asked for cannot connect these two.
    """
    why_not_shm = _why_not_shm(a, b)
    why_not = why_not_shm if mode == "shm" else None
    if mode in TORCH_MODES:
        why_not = _why_not_torch(a, b, mode)
    if why_not is not None:
        raise ConfigurationError(
            f"GS_TRANSPORT={mode} is impossible: {why_not}\n  Fix: {_FIXES[mode]}"
        )
    if mode in ("auto", "shm") and why_not_shm is None:
        return "shm", "both run as one user on one host"
    if mode in TORCH_MODES:
        return mode, f"GS_TRANSPORT={mode}"
    if "grpc" not in a or "grpc" not in b:
        raise ConfigurationError(
            "no transport connects the two: gRPC is not offered by both workers\n"
            "  Fix: set GS_TRANSPORT to the same value for all workers"
        )
    if mode == "grpc":
        return "grpc", "GS_TRANSPORT=grpc"
    return _between_hosts(a, b, str(why_not_shm), encrypted)


def _between_hosts(
    a: Mapping[str, str], b: Mapping[str, str], why_not_shm: str, encrypted: bool
) -> tuple[str, str]:
    """Gloo moves values with fewer copies than gRPC; gRPC goes everywhere, and can encrypt."""
    if encrypted:
        return "grpc", f"{why_not_shm}; encrypted"
    why_not_gloo = _why_not_torch(a, b, "gloo")
    # What neither offers is no news; what differs is.
    if why_not_gloo is None:
        return "gloo", why_not_shm
    return "grpc", f"{why_not_shm}; {why_not_gloo}" if "gloo" in a or "gloo" in b else why_not_shm
