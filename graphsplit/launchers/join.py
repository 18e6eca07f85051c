"""Makes a process that another launcher has started a worker of a job; rank 0 has the scheduler.

All that is decided goes into the environment, in graphsplit's own variables, and the launcher's go
out of it: what comes after ``gs.init()`` is as under ``graphsplit run``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from graphsplit.errors import ConfigurationError
from graphsplit.launchers.environment import (
    IN_WORDS,
    LOOPBACK,
    PMI,
    TORCHRUN,
    Found,
    find_launcher,
    left_to_others,
)
from graphsplit.launchers.ports import address_towards, find_free_port, holder_of, is_free
from graphsplit.launchers.rendezvous import (
    OwnFile,
    RendezvousPlace,
    SharedFolder,
    TorchStore,
    Whereabouts,
    wait_for,
)
from graphsplit.security.options import names_protection
from graphsplit.security.private_files import NEW_TOKEN
from graphsplit.security.protection import is_loopback
from graphsplit.settings import SCHEDULER_ROLE, WORKER_ROLE, ClusterSettings

DEFAULT_PORT = 8118
_LISTEN_S = 120.0
_LOOK_AGAIN_S = 0.02
_END_S = 10.0
_PROXY = "hydra_pmi_proxy"


@dataclass
class Joined:
    """The part in a job of a process that another launcher started.

    Attributes:
        line: Says which launcher it is; empty but for rank 0.
        scheduler: The child that is the scheduler; None but for rank 0.
        place: Where rank 0 has left the port.
    """

    line: str
    scheduler: subprocess.Popen[bytes] | None = None
    place: RendezvousPlace | None = None

    def forget_place(self) -> None:
        """Take away what rank 0 has left for the others."""
        place, self.place = self.place, None
        if place is not None:
            place.close()

    def close(self) -> None:
        """Leave nothing behind: the scheduler ends when all workers have gone."""
        self.forget_place()
        if self.scheduler is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.scheduler.wait(_END_S)
            self.end()

    def end(self) -> None:
        """End the scheduler at once."""
        if self.scheduler is not None and self.scheduler.poll() is None:
            self.scheduler.kill()
            self.scheduler.wait()


def join_launcher(environ: MutableMapping[str, str]) -> Joined | None:
    """Write into the environment which worker this is, where another launcher has started it.

    Raises:
        ConfigurationError: The launcher's variables contradict each other; several hosts have no
            secret; the port is taken, and no other one can be told; rank 0 says nothing.
    """
    found = find_launcher(environ)
    if found is None:
        return None
    if _is_local(found, environ):
        found = replace(found, host=LOOPBACK[0], is_one_host=True)
    if found.launcher == PMI and found.is_one_host and not found.job:
        found = replace(found, job=_proxy())
    own = {
        "MS_ROLE": WORKER_ROLE,
        "MS_WORKER_NUM": str(found.num_workers),
        "MS_NODE_ID": str(found.rank),
        "MS_SCHED_HOST": _host(found, environ),
        "MS_SCHED_PORT": environ.get("MS_SCHED_PORT", "").strip() or str(DEFAULT_PORT),
    }
    # What else is wrong with the variables is said before anything is started.
    settings = ClusterSettings.from_environ({**environ, **own})
    assert settings is not None
    _require_secret(found, environ)
    if not found.is_one_host and not environ.get("MS_WORKER_IP", "").strip():
        own["MS_WORKER_IP"] = _own_address(settings)
    place = _place(found, environ)
    joined = Joined("")
    if found.rank == 0:
        said = _chosen(found, environ, settings, is_told=place is not None)
        own |= _variables(said)
        others = left_to_others(environ)
        base = {name: value for name, value in environ.items() if name not in others}
        joined = _start_scheduler(found, {**base, **own}, said.port)
        if place is not None:
            place.tell(said)
            joined.place = place
    elif place is not None:
        own |= _variables(wait_for(place, found, limit_s=settings.topo_timeout_s))
    for name in left_to_others(environ):
        del environ[name]
    environ.update(own)
    return joined


def _variables(said: Whereabouts) -> dict[str, str]:
    variables = {"MS_SCHED_PORT": str(said.port)}
    return {**variables, "GS_JOB_TOKEN": said.token} if said.token else variables


def _is_local(found: Found, environ: Mapping[str, str]) -> bool:
    """Whether all workers run on this host, as far as anybody says so."""
    host = environ.get("MS_SCHED_HOST", "").strip()
    # By its letters: a name may be loopback on its own host, and another address on others.
    return (found.is_one_host and not host) or (host or found.host) in LOOPBACK


def _proxy() -> str:
    """Tells this start of MPICH's ``mpiexec`` on this host, which sets no variable for that.

    It has one proxy on each host, above all processes there; others that set PMI's variables are
    taken for the parent.
    """
    process = os.getpid()
    with contextlib.suppress(OSError):
        while process > 1:
            before, _, after = Path(f"/proc/{process}/stat").read_text().rpartition(")")
            if before.endswith(f"({_PROXY}"):
                return str(process)
            process = int(after.split()[1])
    return str(os.getppid())


def _host(found: Found, environ: Mapping[str, str]) -> str:
    host = environ.get("MS_SCHED_HOST", "").strip() or found.host
    if host:
        return host
    raise ConfigurationError(
        f"{IN_WORDS[found.launcher]} does not say on which host rank 0 runs\n"
        f"  Fix: set MS_SCHED_HOST to an address of that host, in every process"
    )


def _require_secret(found: Found, environ: Mapping[str, str]) -> None:
    if found.is_one_host or names_protection(environ):
        return
    raise ConfigurationError(
        f"{found.num_workers} workers of {IN_WORDS[found.launcher]} on several hosts have no "
        f"secret by which they know each other\n"
        f"  Fix: add two lines where you submit the job, in a folder that all hosts see:\n"
        f"    {NEW_TOKEN}\n"
        f"    export GS_JOB_TOKEN_FILE=$PWD/job-token"
    )


def _place(found: Found, environ: Mapping[str, str]) -> RendezvousPlace | None:
    """Where rank 0 can tell the others which port it is; None if there is no such place."""
    if found.is_one_host:
        return OwnFile(found)
    folder = environ.get("GS_RENDEZVOUS_DIR", "").strip()
    if folder and found.job:
        return SharedFolder(found, folder)
    has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TorchStore(found) if found.launcher == TORCHRUN and has_store else None


def _chosen(
    found: Found, environ: Mapping[str, str], settings: ClusterSettings, *, is_told: bool
) -> Whereabouts:
    """The port of the scheduler, which runs on this host; and a secret, where there is none."""
    host, port = settings.scheduler_host, settings.scheduler_port
    if found.is_one_host and not environ.get("MS_SCHED_PORT", "").strip():
        port = find_free_port(host)  # all are told; and a second job may start at this moment
    if not found.is_one_host and is_loopback(host):
        raise _no_address(host, "it is this host's loopback, which others cannot reach")
    try:
        if not is_free(host, port):
            if not is_told:
                raise ConfigurationError(
                    f"the scheduler's port {port} on {host} (MS_SCHED_PORT) is taken by "
                    f"{holder_of(port)}\n"
                    f"  Fix: end that one; or set MS_SCHED_PORT to a free port in every process; "
                    f"or GS_RENDEZVOUS_DIR to a folder that all hosts see, to be told a free one"
                )
            port = find_free_port(host)
    except socket.gaierror as error:
        raise _no_address(host, str(error)) from None
    except OSError as error:
        raise _no_address(host, error.strerror or str(error)) from None
    has_own = names_protection(environ)
    return Whereabouts(port, "" if has_own or not found.is_one_host else secrets.token_urlsafe(32))


def _no_address(host: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"rank 0 cannot be reached at {host}: {why}\n"
        f"  Fix: set MS_SCHED_HOST to an address of rank 0's host, in every process"
    )


def _own_address(settings: ClusterSettings) -> str:
    host, port = settings.scheduler_host, settings.scheduler_port
    try:
        return address_towards(host, port)
    except OSError as error:
        raise ConfigurationError(
            f"the scheduler's host {host} is not known here, or out of reach: {error}\n"
            f"  Fix: set MS_SCHED_HOST to an address of rank 0's host, in every process"
        ) from None


def _start_scheduler(found: Found, variables: Mapping[str, str], port: int) -> Joined:
    """Start the scheduler beside rank 0, and wait until workers can connect to it."""
    variables = {**variables, "MS_ROLE": SCHEDULER_ROLE}
    del variables["MS_NODE_ID"]
    child = subprocess.Popen(
        [sys.executable, "-m", "graphsplit.cluster.scheduler"],
        env=variables,
        stdin=subprocess.DEVNULL,
    )
    host = variables["MS_SCHED_HOST"]
    line = (
        f"started by {IN_WORDS[found.launcher]}: {found.num_workers} workers, the scheduler is a "
        f"child of worker 0 (pid {child.pid}, port {port})"
    )
    joined = Joined(line, child)
    end_s = time.monotonic() + _LISTEN_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), _LISTEN_S):
            return joined
        status = child.poll()
        if status is not None or time.monotonic() >= end_s:
            joined.end()
            how = "does not listen" if status is None else f"ended with status {status}"
            raise ConfigurationError(f"the scheduler {how}\n  Fix: see what it has said above.")
        time.sleep(_LOOK_AGAIN_S)
