"""The faults of a network of hosts: each named with its fix, by a job and by ``graphsplit doctor``.

SSH is a script here that runs what it is given on this machine, after a few lines of shell or
Python that seed the host's fault; the agent that then answers is the real one. ``test_ssh.py`` and
``test_doctor.py`` have real daemons of SSH, and networks that are cut.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner
from quiet_time import quiet_time
from security_helpers import expired, worker_name

from graphsplit.cli.commands import main
from graphsplit.cli.ssh import connection, run
from graphsplit.security.issue import fill_folder

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "faults.md"
NAMED_WITHIN_S = 10.0
SSH = """\
#!/bin/sh
while [ "$1" != -- ]; do shift; done
number=${2#h}
export SSH_CONNECTION="127.0.0.1 1 127.0.0.$((number + 2)) 22" PYTHONPATH="$FAULTS/$2:$ROOT"
cd "$FAULTS/$2" && . ./seed && exec sh -c "$3"
"""
REFUSES = "echo '{}' >&2; exit {}"


@dataclass(frozen=True)
class Fault:
    """One fault of one host.

    Attributes:
        what: As the page has it.
        said: What both say of the host.
        fix: What both advise.
        shell: Lines of shell that seed it, before the agent starts.
        python: The same in Python, inside the agent.
        folder: Whether the host has the job's folder.
        script: The script that it has.
        stands: Whether the job runs all the same.
    """

    what: str
    said: str
    fix: str
    shell: str = ""
    python: str = ""
    folder: bool = True
    script: str | None = "import graphsplit\n"
    stands: bool = field(default=False, kw_only=True)


SOUND = Fault("", "", "")
NOT_ASKED = (
    SOUND,
    Fault(
        "no DNS: the host's name is not known here",
        "its name is not known here (ssh: Could not resolve hostname",
        "mend the name, or give it a HostName in ~/.ssh/config",
        REFUSES.format("ssh: Could not resolve hostname h1: Name or service not known", 255),
    ),
    Fault(
        "a host key that changed",
        "its host key is another one than it was",
        "ask who runs it whether that is meant; then `ssh-keygen -R",
        REFUSES.format("WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!", 255),
    ),
    Fault(
        "a host key that nobody has confirmed",
        "its host key is not known here",
        "run `ssh ",
        REFUSES.format("Host key verification failed.", 255),
    ),
    Fault(
        "no key that lets this user in",
        "it does not let this user in without a password",
        "run `ssh-copy-id",
        REFUSES.format("me@b: Permission denied (publickey).", 255),
    ),
    Fault(
        "a host that is down, or a closed SSH port",
        "SSH cannot reach it",
        "look whether the host runs, and its sshd",
        REFUSES.format("ssh: connect to host b port 22: Connection refused", 255),
    ),
    Fault(
        "no such interpreter",
        "it has no {python} that can be run",
        "name the interpreter that has graphsplit on every host: --python PATH",
        REFUSES.format("sh: 1: exec: python: not found", 127),
    ),
    Fault(
        "no graphsplit",
        "its {python} has no graphsplit",
        "install graphsplit",
        REFUSES.format("/usr/bin/python3: No module named graphsplit", 1),
    ),
    Fault(
        "another graphsplit",
        "has graphsplit 9.9, but host h0 has graphsplit",
        "install the same version of graphsplit for every worker",
        python="import graphsplit.version as module; module.__version__ = '9.9'",
    ),
    Fault(
        "no torch",
        "there is no torch for its Python",
        "install it there, or name another interpreter: --python PATH",
        python="import importlib.metadata as found\n"
        "def missing(name): raise found.PackageNotFoundError(name)\n"
        "found.version = missing",
    ),
    Fault(
        "another torch",
        "has torch 1.0.0, but host h0 has torch",
        "install the same version of torch for every worker",
        python="import importlib.metadata as found; found.version = lambda name: '1.0.0'",
    ),
    Fault(
        "another Python",
        "has python 2.7, but host h0 has python",
        "install the same version of python for every worker",
        python="import platform; platform.python_version = lambda: '2.7.18'",
    ),
    Fault(
        "a full disk: no room for temporary files",
        "temporary files cannot be written",
        "make room in /tmp, or set TMPDIR on that host to a folder that can be written",
        "ulimit -f 0",
    ),
    Fault(
        "too few open files",
        "a process may have only 40 open files, and a worker has one for each connection",
        "let it have more (ulimit -n 4096, or limits.conf on that host)",
        "ulimit -n 40",
    ),
)
NOT_READY = (
    Fault(
        "the scheduler's port is taken",
        "the scheduler cannot listen on localhost:{port} (Address already in use): process",
        "name another port (--port)",
    ),
    SOUND,
    Fault(
        "no such folder",
        "there is no folder job (No such file or directory)",
        "make or mount it, or name one that every host has: --workdir DIR",
        folder=False,
    ),
    Fault(
        "no home folder, and the job's folder is in it",
        "there is no home folder {home}, and so no folder job",
        "make or mount it, or name one that every host has: --workdir DIR",
        "HOME=$FAULTS/$2/none; export HOME",
        "from pathlib import Path; Path.is_relative_to = lambda path, other: True",
        folder=False,
    ),
    Fault(
        "no script",
        "there is no file",
        "copy it there, or name the folder that has it on every host: --workdir DIR",
        script=None,
    ),
    Fault(
        "another script",
        "its train.py is another one than that of host h1",
        "copy the same file to every host",
        script="import graphsplit as gs\n",
    ),
    Fault(
        "the wrong interface for values",
        "its workers cannot listen on 192.0.2.7, their MS_WORKER_IP (Cannot assign requested",
        "set MS_WORKER_IP on that host to one of its own addresses, or unset it there",
        "MS_WORKER_IP=192.0.2.7; export MS_WORKER_IP",
    ),
    Fault(
        "no DNS on the host for the scheduler's name",
        "the scheduler's host localhost is not known here, or out of reach (Name or service",
        "make it known (DNS, /etc/hosts), or name it by an IP address",
        python="import socket\n"
        "def unknown(*_, **__): raise socket.gaierror(-2, 'Name or service not known')\n"
        "socket.getaddrinfo = unknown",
    ),
)
WRONG_CERTIFICATES = (
    SOUND,
    Fault("a certificate that has expired", "is valid from", "make new ones by `graphsplit certs`"),
    Fault("no certificate", "cannot be read: No such file", "mend the path; `graphsplit certs`"),
    Fault("a key that others can read", "its mode is 0644", "chmod 600"),
)
NO_HOME = 3
CLOSED = (
    "import socket\ndial = socket.create_connection\n"
    "def closed(address, *rest, **more):\n"
    "    if {} == {!r}: raise OSError(113, 'No route to host')\n"
    "    return dial(address, *rest, **more)\n"
    "socket.create_connection = closed"
)
NOT_REACHED = (
    SOUND,
    Fault(
        "the scheduler's port is closed, one way",
        "it cannot reach the scheduler on host h0, 127.0.0.2:",
        "open the ports between the two in firewalls",
        "MS_WORKER_IP=127.0.0.9; export MS_WORKER_IP",
        CLOSED.format("address[0]", "127.0.0.2"),
    ),
    Fault(
        "ports of workers are closed, one way",
        "it cannot reach workers of host h1, 127.0.0.9:",
        "open the ports between the two in firewalls",
        python=CLOSED.format("address[0]", "127.0.0.9"),
    ),
)
STOOD = (
    SOUND,
    Fault(
        "a clock that is an hour off",
        "its clock is 3600 s behind this machine's",
        "let it follow a time server (timedatectl set-ntp true)",
        python="import time; now = time.time; time.time = lambda: now() - 3600",
        stands=True,
    ),
    Fault(
        "no home folder",
        "there is no home folder",
        "mount or make it, as caches of libraries go there",
        "HOME=/no/such/home; export HOME",
        stands=True,
    ),
    Fault(
        "a full /dev/shm",
        "/dev/shm has 0 MiB left",
        "take away what is in it, or make it larger",
        python="import shutil; usage = shutil._ntuple_diskusage(1, 1, 0)\n"
        "shutil.disk_usage = lambda folder: usage",
        stands=True,
    ),
    Fault(
        "another instruction set",
        "its CPU capability is DEFAULT, that of h0 is",
        "set the same ATEN_CPU_CAPABILITY for every worker",
        "ATEN_CPU_CAPABILITY=default; export ATEN_CPU_CAPABILITY",
        stands=True,
    ),
)
LATE = Fault(
    "a host that hangs",
    "its agent has not answered within 0.4 s",
    "look whether the host is overloaded, or its disks",
    "sleep 1",
    stands=True,
)
WRONG_ADDRESS = Fault(
    "the wrong interface for the scheduler",
    "the scheduler cannot listen on 192.0.2.7",
    "name another port (--port), or an address of that host that the others reach",
)
LOOPBACK = Fault(
    "a first host that is named localhost",
    "the scheduler would listen on 127.0.0.1, which host h1 cannot reach",
    "name h0 by an address that the others reach, or give it: --host",
    "SSH_CONNECTION='127.0.0.1 1 127.0.0.1 22'",
)
ELSEWHERE = Fault("", "", "", "SSH_CONNECTION='10.0.0.1 1 10.0.0.2 22'")
ALL = [
    one
    for one in (
        *NOT_ASKED,
        *NOT_READY,
        *WRONG_CERTIFICATES,
        *NOT_REACHED,
        *STOOD,
        LATE,
        WRONG_ADDRESS,
        LOOPBACK,
    )
    if one is not SOUND
]


@dataclass
class Hosts:
    """Hosts with faults, h0 and on; what is typed names them all."""

    folder: Path
    patch: pytest.MonkeyPatch

    def seed(self, faults: Sequence[Fault]) -> None:
        self.names = [f"h{number}" for number in range(len(faults))]
        (self.folder / "ssh").write_text(SSH)
        (self.folder / "ssh").chmod(0o755)
        self.patch.setenv("FAULTS", str(self.folder))
        self.patch.setenv("ROOT", str(ROOT))
        for name in [name for name in os.environ if name.startswith(("MS_", "GS_", "ATEN_"))]:
            self.patch.delenv(name)
        for name, fault in zip(self.names, faults, strict=True):
            own = self.folder / name
            own.mkdir()
            (own / "seed").write_text(f"{fault.shell}\n")
            if fault.python:
                (own / "sitecustomize.py").write_text(fault.python)
            if fault.folder:
                (own / "job").mkdir()
                if fault.script is not None:
                    (own / "job" / "train.py").write_text(fault.script)

    def type(self, command: str, *options: str) -> tuple[int, str]:
        """The exit status of a command about these hosts, and all that it has said."""
        begun_s = quiet_time()
        known = ["-H", ",".join(self.names), "--ssh", str(self.folder / "ssh"), "--workdir", "job"]
        result = CliRunner().invoke(main, [command, *known, *options, "train.py"])
        if not isinstance(result.exception, SystemExit | None):
            raise result.exception
        assert quiet_time() - begun_s < NAMED_WITHIN_S, result.output
        return result.exit_code, result.output

    def both(self, *options: str) -> Iterator[tuple[int, str]]:
        yield self.type("doctor", *options)
        yield self.type("run", *options)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(tmp_path, monkeypatch)


def assert_named(output: str, faults: Sequence[Fault], **known: str) -> None:
    """Each of the hosts is named with its fault and the fix, and no other one is."""
    lines = re.sub("^(Error: |graphsplit: )host", "host", output, flags=re.MULTILINE)
    found: defaultdict[str, str] = defaultdict(str)
    for name, text in re.findall(r"^host (h\d+)[: ](.*(?:\n  .*)*)", lines, re.MULTILINE):
        found[name] += text + "\n"
    for number, fault in enumerate(faults):
        text = found.pop(f"h{number}", "")
        if fault.said:
            assert (
                fault.said.format(python=sys.executable, **known) in text
                and f"\n  Fix: {fault.fix}" in text
            ), output
        else:
            assert not text, output
    assert not found, output


@pytest.mark.real_processes
def test_hosts_that_cannot_be_asked_or_have_the_wrong_things(hosts: Hosts) -> None:
    hosts.seed(NOT_ASKED)
    for status, output in hosts.both():
        assert status == 1
        assert_named(output, NOT_ASKED)


@pytest.mark.real_processes
def test_hosts_that_do_not_have_what_a_job_needs(hosts: Hosts) -> None:
    hosts.seed(NOT_READY)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = ("--host", "localhost", "--port", port)
        home = hosts.folder / f"h{NO_HOME}" / "none"
        for status, output in hosts.both(*options):
            assert status == 1
            assert_named(output, NOT_READY, port=port, home=str(home))


@pytest.mark.real_processes
def test_hosts_with_certificates_that_will_not_do(hosts: Hosts) -> None:
    hosts.seed(WRONG_CERTIFICATES)
    certificates = hosts.folder / "certificates"
    fill_folder(certificates, num_workers=len(WRONG_CERTIFICATES), hosts=(), days=1)
    old = expired(worker_name(1)).tls
    assert old is not None
    (certificates / "worker-1.pem").write_bytes(old.chain)
    (certificates / "worker-1.key").write_bytes(old.key)
    (certificates / "worker-2.pem").unlink()
    (certificates / "worker-3.key").chmod(0o644)
    for status, output in hosts.both("--certs", str(certificates)):
        assert status == 1
        assert_named(output, WRONG_CERTIFICATES)


@pytest.mark.real_processes
def test_hosts_that_do_not_reach_each_other(hosts: Hosts) -> None:
    hosts.seed(NOT_REACHED)
    for status, output in hosts.both():
        assert status == 1
        assert_named(output, NOT_REACHED)


@pytest.mark.real_processes
@pytest.mark.parametrize(
    ("faults", "options"),
    [((WRONG_ADDRESS, SOUND), ("--host", "192.0.2.7")), ((LOOPBACK, ELSEWHERE), ())],
)
def test_a_scheduler_that_others_could_not_reach(
    hosts: Hosts, faults: Sequence[Fault], options: Sequence[str]
) -> None:
    hosts.seed(faults)
    for status, output in hosts.both(*options):
        assert status == 1
        assert_named(output, faults)


@pytest.mark.real_processes
@pytest.mark.parametrize("faults", [STOOD, (LATE,)])
def test_what_a_job_stands_is_said_before_it_starts(hosts: Hosts, faults: Sequence[Fault]) -> None:
    hosts.seed(faults)
    if LATE in faults:
        hosts.patch.setattr(connection, "LATE_S", 0.4)
    started = []
    hosts.patch.setattr(run, "supervise", lambda *_, **__: started.append("a job"))
    hosts.patch.setattr(run, "say", lambda *_: 0)
    for status, output in hosts.both():
        assert status == 0, output
        assert_named(output, faults)
    assert started == ["a job"]


def test_what_a_login_shell_prints_is_no_fault(hosts: Hosts) -> None:
    """Not even without an end of its line."""
    greets = Fault("", "", "", "printf 'Welcome!'")
    hosts.seed((greets,))
    status, output = hosts.type("doctor")
    assert status == 0 and "nothing is wrong" in output


def test_a_token_that_others_can_read_is_named_before_anything_starts(hosts: Hosts) -> None:
    hosts.seed(())
    token = hosts.folder / "job-token"
    token.write_text("a token that everybody on this machine can read")
    token.chmod(0o644)
    hosts.patch.setenv("GS_JOB_TOKEN_FILE", str(token))
    hosts.names = ["h0"]
    for status, output in hosts.both():
        assert status == 1
        assert "its mode is 0644" in output and f"Fix: chmod 600 {token}" in output


def test_the_page_of_faults_is_this_table() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    expected = [row_of(one) for one in ALL]
    assert rows[1:] == expected, "\n".join(expected)


def row_of(fault: Fault) -> str:
    said = fault.said.replace("localhost:{port}", "10.0.0.1:8118").replace("0.4 s", "9 s")
    said = said.format(home="/home/me", python="/usr/bin/python3")
    said = re.sub(r"\bh0\b", "a", re.sub(r"\bh1\b", "b", said))
    return f"| {fault.what} | `{said}` | {'runs' if fault.stands else 'is refused'} |"
