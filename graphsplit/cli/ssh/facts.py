"""The facts of a host, and those that several of them must have in common."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from graphsplit.cli.ssh.frames import Facts
from graphsplit.version import __version__, different_versions

_CPUINFO = Path("/proc/cpuinfo")
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_BYTES = 64 << 20
_LEAST_FILES = 128
_CLOCKS_WITHIN_S = 5.0
# What PyTorch looks for before it takes the kernels of that name.
_CPU_FLAGS = {
    "AVX512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"},
    "AVX2": {"avx2", "fma"},
}


def own_facts(environ: Mapping[str, str], address: str = "") -> Facts:
    """The facts of this host; ``address`` where SSH has not reached it."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    return Facts(
        graphsplit=__version__,
        torch=torch,
        python=platform.python_version(),
        address=address or reached_address(environ),
        cpu=cpu_capability(environ),
        num_cores=_num_cores(),
        shared_bytes=_left_in(_SHARED_MEMORY),
        clock_s=time.time(),
        remarks=tuple(filter(None, (_no_home(), _little_shared_memory()))),
        problems=tuple(filter(None, (_no_temporary_files(), _few_open_files()))),
    )


def _num_cores() -> int:
    """Those that this process may use, where the system says."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


def reached_address(environ: Mapping[str, str]) -> str:
    """The own address at which the SSH client has reached this host; empty if there is none."""
    parts = environ.get("SSH_CONNECTION", "").split()
    return parts[2] if len(parts) == 4 else ""


def cpu_capability(environ: Mapping[str, str], cpuinfo: Path = _CPUINFO) -> str:
    """The instruction set of torch's kernels, without torch: as ``get_cpu_capability`` has it."""
    named = environ.get("ATEN_CPU_CAPABILITY", "").strip().upper()
    if named:
        return named
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return platform.machine()
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    found = (name for name, wanted in _CPU_FLAGS.items() if wanted <= flags)
    return next(found, "DEFAULT" if flags else platform.machine())


def _no_home() -> str:
    home = Path("~").expanduser()
    if home.is_dir():
        return ""
    return (
        f"there is no home folder {home}\n  Fix: mount or make it, as caches of libraries go there"
    )


def _no_temporary_files() -> str:
    try:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(4096))
    except OSError as error:
        return (
            f"temporary files cannot be written ({error.strerror or error})\n"
            f"  Fix: make room in /tmp, or set TMPDIR on that host to a folder that can be written"
        )
    return ""


def _few_open_files() -> str:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most >= _LEAST_FILES or most == resource.RLIM_INFINITY:
        return ""
    return (
        f"a process may have only {most} open files, and a worker has one for each connection\n"
        f"  Fix: let it have more (ulimit -n 4096, or limits.conf on that host)"
    )


def _left_in(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _little_shared_memory() -> str:
    free = _left_in(_SHARED_MEMORY)
    if free >= _LEAST_SHARED_BYTES:
        return ""
    return (
        f"{_SHARED_MEMORY} has {free >> 20} MiB left; loaders with workers hand on batches there\n"
        f"  Fix: take away what is in it, or make it larger (docker run --shm-size=1g)"
    )


def problems_of(facts: Mapping[str, Facts]) -> list[str]:
    """Why no job can run on these hosts, by name: each in a line, and its fix in another."""
    found = [f"host {host}: {one}" for host, own in facts.items() for one in own.problems]
    found += [
        f"host {host}: there is no torch for its Python\n"
        f"  Fix: install it there, or name another interpreter: --python PATH"
        for host, own in facts.items()
        if not own.torch
    ]
    first, others = next(iter(facts), ""), list(facts)[1:]
    for host in others:
        for name in ("graphsplit", "torch", "python"):
            mine, theirs = _version(facts[host], name), _version(facts[first], name)
            if mine and theirs and mine != theirs:
                who, other = f"host {host}", f"host {first}"
                found.append(different_versions(name, who, mine, other, theirs))
    return found


def remarks_on(facts: Mapping[str, Facts], *, late_s: Mapping[str, float]) -> list[str]:
    """The differences that a job stands, and its user should know.

    Args:
        facts: By host.
        late_s: By host, how far its clock is behind this machine's, at least.
    """
    found = [f"host {host}: {one}" for host, own in facts.items() for one in own.remarks]
    for host, late in late_s.items():
        if abs(late) > _CLOCKS_WITHIN_S:
            where = "behind" if late > 0 else "ahead of"
            found.append(
                f"host {host}: its clock is {abs(late):.0f} s {where} this machine's: times in its "
                f"log mislead, and certificates may not be valid there\n"
                f"  Fix: let it follow a time server (timedatectl set-ntp true)"
            )
    first, others = next(iter(facts), ""), list(facts)[1:]
    for host in others:
        mine, theirs = facts[host], facts[first]
        if mine.cpu != theirs.cpu:
            found.append(
                f"host {host}: its CPU capability is {mine.cpu}, that of {first} is "
                f"{theirs.cpu}: results may not be those of one process bit for bit\n"
                f"  Fix: set the same ATEN_CPU_CAPABILITY for every worker"
            )
        if mine.python != theirs.python:
            found.append(
                f"host {host}: it has Python {mine.python}, host {first} {theirs.python}, which "
                f"does no harm\n  Fix: none is needed"
            )
    return found


def _version(facts: Facts, name: str) -> str:
    """That of Python without its patch, which may differ."""
    if name == "python":
        return facts.python.rpartition(".")[0]
    return str(getattr(facts, name))
