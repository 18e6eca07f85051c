"""``graphsplit doctor``: what it finds on this machine, between sockets, and on hosts by SSH."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import click
import pytest
import ssh_hosts
from click.testing import CliRunner
from launched_jobs import LIMIT_S, SCRIPT, assert_nothing_is_left, environment
from matrix.network.namespaces import why_not as why_not_namespaces
from quiet_time import quiet_time
from ssh_hosts import ROOT, Cluster, cluster, networked, of_the_test, run_command

from graphsplit.cli.commands import main
from graphsplit.cli.doctor import environment_findings
from graphsplit.cli.ssh import facts
from graphsplit.cli.ssh.facts import own_facts
from graphsplit.cli.ssh.links import answer_one, measure, reserve
from graphsplit.launchers.ports import address_of

needs_sshd = pytest.mark.skipif(bool(ssh_hosts.why_not()), reason=ssh_hosts.why_not())
FOUND_WITHIN_S = 10.0
SECRET = "0123456789abcdef"


def test_a_machine_with_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MS_", "GS_"))]:
        monkeypatch.delenv(name)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MS_SCHED_PORT", str(probe.getsockname()[1]))
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "nothing is wrong" in result.output and "CPU capability" in result.output


def test_a_port_that_is_taken_is_said_and_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MS_SCHED_PORT", str(port))
        result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert f"port {port}, which the scheduler has by default, is taken by process" in result.output


def test_variables_and_token_files_are_judged_as_a_job_does(tmp_path: Path) -> None:
    token = tmp_path / "job-token"
    token.write_text("a token that everybody on this machine can read")
    token.chmod(0o644)
    (problem,) = environment_findings({"GS_JOB_TOKEN_FILE": str(token)})
    assert "its mode is 0644" in problem and f"Fix: chmod 600 {token}" in problem
    token.chmod(0o600)
    assert environment_findings({"GS_JOB_TOKEN_FILE": str(token)}) == []
    (problem,) = environment_findings({"MS_NODE_TIMEOUT": "soon"})
    assert "MS_NODE_TIMEOUT" in problem


def test_where_workers_listen_is_an_address_an_interface_or_found() -> None:
    assert address_of("10.0.0.7", "127.0.0.1", 8118) == "10.0.0.7"
    assert address_of("lo", "10.0.0.1", 8118) == "127.0.0.1"
    assert address_of("auto", "127.0.0.1", 8118) == "127.0.0.1"
    with pytest.raises(OSError):
        address_of("auto", "no-such-host.invalid", 8118)
    assert environment_findings({"MS_WORKER_IP": "lo"}) == []
    (problem,) = environment_findings({"MS_WORKER_IP": "192.0.2.7"})
    assert "cannot listen on 192.0.2.7, their MS_WORKER_IP (Cannot assign" in problem
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (problem,) = environment_findings({"GS_WORKER_PORTS": f"{port}-{port}"})
    assert f"no port from {port} to {port} is free on 127.0.0.1" in problem


def test_folders_that_are_missing_or_full_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    usage = shutil._ntuple_diskusage(1 << 20, 1 << 20, 0)
    monkeypatch.setattr(facts.shutil, "disk_usage", lambda folder: usage)
    found = own_facts({})
    (problem,) = found.problems
    assert problem.startswith("temporary files cannot be written (") and "TMPDIR" in problem
    home, memory = found.remarks
    assert home.startswith(f"there is no home folder {tmp_path / 'none'}\n  Fix: ")
    assert memory.startswith("/dev/shm has 0 MiB left") and "--shm-size" in memory


def test_a_link_is_measured_only_for_who_knows_the_secret() -> None:
    with reserve("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=answer_one, args=(listener, SECRET))
        thread.start()
        latency_s, bytes_per_s = measure("127.0.0.1", port, SECRET)
        thread.join()
        assert 0 < latency_s < 1 and bytes_per_s > 1e6
        thread = threading.Thread(target=answer_one, args=(listener, SECRET))
        thread.start()
        with pytest.raises(click.ClickException, match="but the connection breaks"):
            measure("127.0.0.1", port, SECRET[::-1])
        thread.join()
    with pytest.raises(click.ClickException, match=r"it cannot reach 127.0.0.1:\d+ \(.*refused"):
        measure("127.0.0.1", port, SECRET)


def doctor(hosts: Cluster, names: str, *options: str, namespace: str = "") -> tuple[int, str]:
    """The exit status of a command, and all that it has printed."""
    return _called(hosts, namespace, "doctor", "--ssh", hosts.ssh, "-H", names, *options)


def job(hosts: Cluster, names: str, *options: str, namespace: str = "") -> tuple[int, str]:
    command = run_command(hosts, "-H", names, *options, str(SCRIPT))[3:]
    return _called(hosts, namespace, *command)


def _called(hosts: Cluster, namespace: str, *command: str) -> tuple[int, str]:
    inside = ["ip", "netns", "exec", namespace] if namespace else []
    folder = hosts.folder.parent
    begun_s = quiet_time()
    done = subprocess.run(
        [*inside, sys.executable, "-m", "graphsplit", *command],
        env=environment(folder, PYTHONPATH=str(ROOT), STEPS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert quiet_time() - begun_s < FOUND_WITHIN_S, done.stdout
    assert_nothing_is_left(folder)
    return done.returncode, done.stdout


def findings(output: str) -> set[str]:
    """What is said of hosts, each with its fix."""
    lines = output.removeprefix("Error: ").splitlines()
    return {
        f"{line}\n{fix}"
        for line, fix in itertools.pairwise(lines)
        if line.startswith("host ") and fix.startswith("  Fix: ")
    }


@needs_sshd
@pytest.mark.real_processes
@pytest.mark.timeout(240)
def test_what_keeps_a_job_from_running_is_told_by_both_in_the_same_words(tmp_path: Path) -> None:
    own = of_the_test(tmp_path)
    other = tmp_path / "other" / "torch-1.0.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Name: torch\nVersion: 1.0.0\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} $WITHOUT_PACKAGES "$@"\n')
    python.chmod(0o755)
    with cluster(
        tmp_path,
        a=own,
        b={**own, "PYTHONPATH": f"{other.parent}:{ROOT}"},
        c={**own, "PYTHONPATH": "", "WITHOUT_PACKAGES": "-S"},
    ) as hosts:
        options = ("--python", str(python))
        status, found = doctor(hosts, "a,b,c,no-such-host.invalid", *options)
        assert status == 1 and "found: 3 that keep a job from running" in found, found
        for pair in ("a     b", "b     a"):
            assert re.search(rf"^{pair} +\d+\.\d+ ms +\d+ MB/s$", found, re.MULTILINE), found
        told = findings(found)
        assert len(told) == 3
        status, output = job(hosts, "a,b,c,no-such-host.invalid", *options)
    assert status == 1 and findings(output) == told
    assert any("host b has torch 1.0.0, but host a has torch" in one for one in told)
    assert any(f"host c: its {python} has no graphsplit" in one for one in told)
    assert any("host no-such-host.invalid: its name is not known here" in one for one in told)


@needs_sshd
@pytest.mark.real_processes
@pytest.mark.timeout(240)
def test_what_a_job_stands_is_told_by_both_in_the_same_words(tmp_path: Path) -> None:
    """A clock that is an hour slow, and no home folder; with root, a full /dev/shm too."""
    own = of_the_test(tmp_path)
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(
        "import time\nnow = time.time\ntime.time = lambda: now() - 3600\n"
    )
    with cluster(
        tmp_path, a=own, b={**own, "HOME": "/no/such/home", "PYTHONPATH": f"{slow}:{ROOT}"}
    ) as hosts:
        status, found = doctor(hosts, "a,b")
        assert status == 0 and "that a job stands" in found, found
        with_env = ("--env", "STEPS")
        folder = hosts.folder.parent
        done = subprocess.run(
            [*run_command(hosts, "-H", "a,b", *with_env), str(SCRIPT)],
            env=environment(folder, PYTHONPATH=str(ROOT), STEPS="3"),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert done.returncode == 0, done.stderr
    said = findings(done.stderr.replace("graphsplit: host", "host"))
    for what in (
        "host b: there is no home folder /no/such/home",
        "host b: its clock is 3600 s behind this machine's",
    ):
        assert any(one.startswith(what) for one in findings(found)), found
        assert any(one.startswith(what) for one in said), done.stderr
    assert_nothing_is_left(tmp_path)


@needs_sshd
@pytest.mark.real_processes
@pytest.mark.timeout(240)
def test_ports_that_are_closed_one_way_are_named_by_both(tmp_path: Path) -> None:
    """A host that may answer by SSH, and reaches no port of the other one."""
    if why_not_namespaces():
        pytest.skip(f"left out: {why_not_namespaces()}")
    own = of_the_test(tmp_path)
    with networked(tmp_path, a=own, b=own) as (hosts, namespaces):
        for ports in ("1024-32767", "61000-65534"):  # the others are those of who dials
            rule = f"rule add to 10.118.0.1 ipproto tcp dport {ports} unreachable"
            command = ["ip", "-n", namespaces[1], *rule.split()]
            subprocess.run(command, check=True, timeout=LIMIT_S)
        status, found = doctor(hosts, "a,b", namespace=namespaces[0])
        assert status == 1 and "\na     b " in found and "\nb     a " not in found, found
        job_status, output = job(hosts, "a,b", namespace=namespaces[0])
    closed = r"host b: it cannot reach the scheduler on host a, 10\.118\.0\.1:\d+ \(Network is unr"
    for text in (found, output):
        assert re.search(closed, text), text
        assert "Fix: open the ports between the two in firewalls" in text
    assert job_status == 1


@needs_sshd
@pytest.mark.real_processes
@pytest.mark.timeout(240)
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="left out: a /dev/shm of a host's own needs root and the command unshare",
)
def test_a_full_shared_memory_is_found(tmp_path: Path) -> None:
    own = of_the_test(tmp_path)
    mount = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    with cluster(tmp_path) as hosts:
        hosts.add("a", "127.0.0.2", own, "unshare", "-m", "sh", "-c", mount, "sh")
        status, found = doctor(hosts, "a")
    assert status == 0 and "host a: /dev/shm has 0 MiB left" in found, found
