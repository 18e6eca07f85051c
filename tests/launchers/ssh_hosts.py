"""Hosts that SSH reaches: each a daemon of Debian's openssh-server at an address of loopback."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
ROOT = Path(__file__).parents[2]
_START_S = 20.0


def why_not() -> str:
    """Why there can be no such host here; empty if there can."""
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        return "there is no sshd here: apt-get install openssh-server, or make test-launchers"
    return ""


@dataclass(frozen=True)
class Cluster:
    """Hosts by SSH, and a client that knows them.

    Attributes:
        folder: A folder of the test, with all files of theirs.
        daemons: The daemons by host.
        addresses: Address and port by host.
    """

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]]
    addresses: dict[str, tuple[str, int]]

    @property
    def ssh(self) -> str:
        """What ``--ssh`` is given."""
        return f"ssh -F {self.folder / 'config'}"

    def add(self, name: str, address: str, variables: Mapping[str, str], *prefix: str) -> None:
        """One more host, whose processes get these variables."""
        own = self.folder / name
        own.mkdir()
        _make_key(own / "host_key")
        port = 22 if address.startswith("10.") else _free_port(address)
        given = " ".join(f'{key}="{value}"' for key, value in variables.items())
        (own / "sshd_config").write_text(
            f"ListenAddress {address}\nPort {port}\nHostKey {own / 'host_key'}\n"
            f"PidFile {own / 'pid'}\nAuthorizedKeysFile {self.folder / 'user_key.pub'}\n"
            f"StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
            f"MaxStartups 100\nSetEnv {given}\n"
        )
        log = (own / "log").open("wb")
        command = [*prefix, SSHD, "-D", "-e", "-f", str(own / "sshd_config")]
        self.daemons[name] = subprocess.Popen(command, stderr=log, start_new_session=True)
        log.close()
        self.addresses[name] = (address, port)
        self.write_config()
        known = (own / "host_key.pub").read_text().split()[:2]
        with (self.folder / "known_hosts").open("a") as file:
            file.write(f"{name} {' '.join(known)}\n")
        _wait_for_log(own / "log", "Server listening")

    def write_config(self) -> None:
        """The client's own configuration."""
        lines = [
            f"IdentityFile {self.folder / 'user_key'}",
            "IdentitiesOnly yes",
            f"UserKnownHostsFile {self.folder / 'known_hosts'}",
            "GlobalKnownHostsFile /dev/null",
            "StrictHostKeyChecking yes",
            f"User {getpass.getuser()}",
        ]
        for name, (address, port) in self.addresses.items():
            lines.append(f"Host {name}\n  HostName {address}\n  Port {port}\n  HostKeyAlias {name}")
        lines.sort(key=lambda line: not line.startswith("Host "))
        hosts = [line for line in lines if line.startswith("Host ")]
        others = [line for line in lines if not line.startswith("Host ")]
        (self.folder / "config").write_text("\n".join([*hosts, "Host *", *others]) + "\n")

    def stop(self) -> None:
        """End the daemons, and sessions whose client cannot be reached any more."""
        sessions = [pid for name in self.daemons for pid in self.sessions_of(name)]
        for daemon in self.daemons.values():
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons.values():
            daemon.wait(_START_S)
        for pid in sessions:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.daemons.clear()

    def sessions_of(self, name: str) -> list[int]:
        """The processes of a host's daemon that each serve one connection."""
        parent = self.daemons[name].pid
        with suppress(OSError):
            text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
            return [int(pid) for pid in text.split()]
        return []


@contextmanager
def networked(folder: Path, **hosts: Mapping[str, str]) -> Iterator[tuple[Cluster, list[str]]]:
    """As ``cluster``, each host a network namespace with an address of its own.

    The names of the namespaces come with it; the cable of each, to a switch, ends at its ``eth0``.
    """
    switch = f"gs-{os.getpid()}-switch"
    names = [f"gs-{os.getpid()}-{host}" for host in hosts]
    inside = [("ip", "netns", "exec", name) for name in names]
    with cluster(folder) as found:
        try:
            for name in (switch, *names):
                _ip("netns", "add", name)
            _ip("-n", switch, "link", "add", "wires", "type", "bridge")
            _ip("-n", switch, "link", "set", "wires", "up")
            for number, (name, prefix) in enumerate(zip(hosts, inside, strict=True), start=1):
                _ip("link", "add", f"p{number}", "netns", switch, "type", "veth",
                    "peer", "name", "eth0", "netns", names[number - 1])  # fmt: skip
                _ip("-n", switch, "link", "set", f"p{number}", "master", "wires", "up")
                _ip("-n", names[number - 1], "addr", "add", f"10.118.0.{number}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _ip("-n", names[number - 1], "link", "set", device, "up")
                found.add(name, f"10.118.0.{number}", hosts[name], *prefix)
            yield found, names
        finally:
            found.stop()
            for name in (*names, switch):
                _ip("netns", "del", name, check=False)


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True, timeout=_START_S)


@contextmanager
def cluster(folder: Path, **hosts: Mapping[str, str]) -> Iterator[Cluster]:
    """Hosts at 127.0.0.2 and on, whose processes get the given variables by host."""
    folder = folder / "hosts"
    folder.mkdir()
    _make_key(folder / "user_key")
    found = Cluster(folder, {}, {})
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    try:
        for number, (name, variables) in enumerate(hosts.items(), start=2):
            found.add(name, f"127.0.0.{number}", variables)
        yield found
    finally:
        found.stop()


def of_the_test(folder: Path, **variables: str) -> dict[str, str]:
    """What a host's processes need to find this graphsplit, and to be told from others."""
    own = {"PYTHONPATH": str(ROOT), "MARK": str(folder), "XDG_RUNTIME_DIR": str(folder)}
    return {**own, "PATH": os.environ["PATH"], **variables}


def run_command(cluster_: Cluster, *options: str) -> list[str]:
    """The launcher's command line, up to the script."""
    return [sys.executable, "-m", "graphsplit", "run", "--ssh", cluster_.ssh, *options]


def _make_key(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True, timeout=_START_S)


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _wait_for_log(path: Path, text: str) -> None:
    end_s = time.monotonic() + _START_S
    while text not in path.read_text():
        assert time.monotonic() < end_s, path.read_text()
        time.sleep(0.01)
