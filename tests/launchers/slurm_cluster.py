"""A cluster of Slurm on this machine alone: munge, a controller and two nodes, as of Debian."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from graphsplit.launchers.ports import find_free_port

LIMIT_S = 60.0
COMMANDS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE MaxTime=INFINITE State=UP
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN"
NODES = ("n1", "n2")


def why_not() -> str:
    """Why there can be no cluster here; empty if there can."""
    missing = [name for name in COMMANDS if _where(name) is None]
    if missing:
        return f"there is no {', no '.join(missing)} here: make test-launchers installs Slurm"
    return "" if os.geteuid() == 0 else "the daemons of Slurm start tasks as root alone"


def _where(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The variables by which ``srun`` finds a cluster that is there meanwhile."""
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o700)
    host = socket.gethostname().partition(".")[0]
    key, configuration = folder / "munge.key", folder / "slurm.conf"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    configuration.write_text(
        _CONFIGURATION.format(
            folder=folder,
            host=host,
            controller_port=find_free_port("127.0.0.1"),
            nodes="\n".join(
                _NODE.format(name=name, host=host, port=find_free_port("127.0.0.1"))
                for name in NODES
            ),
        )
    )
    found = {**os.environ, "SLURM_CONF": str(configuration)}
    munge = [
        "munged", "--foreground", "--force", f"--key-file={key}",
        f"--socket={folder}/munge/socket", f"--pid-file={folder}/munge/pid",
        f"--log-file={folder}/munge/log", f"--seed-file={folder}/munge/seed",
    ]  # fmt: skip
    daemons = []
    try:
        daemons.append(_started(munge, found, folder))
        _wait_until(lambda: (folder / "munge" / "socket").exists(), "munged")
        daemons.append(_started(["slurmctld", "-D"], found, folder))
        daemons += [_started(["slurmd", "-D", "-N", name], found, folder) for name in NODES]
        _wait_until(lambda: _nodes(found).split() == [b"idle"] * len(NODES), "both nodes")
        yield {"SLURM_CONF": str(configuration)}
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _started(command: list[str], found: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    program = _where(command[0])
    assert program is not None
    with (folder / f"{command[0]}.output").open("ab") as output:
        return subprocess.Popen(
            [program, *command[1:]], env=found, stdout=output, stderr=subprocess.STDOUT
        )


def _nodes(found: dict[str, str]) -> bytes:
    told = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%T"], env=found, capture_output=True, timeout=30
    )
    return told.stdout


def _wait_until(is_there: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not is_there():
        assert time.monotonic() < end_s, f"{what} did not come"
        time.sleep(0.1)
