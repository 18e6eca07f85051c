"""Jobs on hosts that SSH reaches: real daemons of openssh-server, where it is installed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest
import ssh_hosts
from launched_jobs import (
    LIMIT_S,
    RECOVERING,
    SCRIPT,
    TOKEN,
    assert_nothing_is_left,
    assert_recovers_as_alone,
    environment,
    interrupt,
    kill_launcher,
    kill_worker,
    learned_alone,
    parent_of,
    pids_of_workers,
    processes_of,
    said_alone,
    started,
)
from matrix.network.namespaces import why_not as why_not_namespaces
from quiet_time import quiet_time
from ssh_hosts import ROOT, Cluster, cluster, networked, of_the_test, run_command

from graphsplit.cli.launch.cores import cores_of, in_order

pytestmark = [
    pytest.mark.real_processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(ssh_hosts.why_not()), reason=ssh_hosts.why_not()),
]
REFUSED_WITHIN_S = 10.0
NODE_TIMEOUT_S = 15.0
NOTICED_WITHIN_S = 10.0 + 20.0  # a launcher's shortest patience, and a busy machine
COUNTED_CLIENT = Path(__file__).with_name("counted_client.py")
OF_HERE = (" graphsplit run ", "counted_client", "ssh -F")
UNASKED = (">Alive", "<Alive", "<Wrote", "<Beat", "<Over", "<GivenUp", ">Ended", ">Signal")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Cluster]:
    own = of_the_test(tmp_path)
    with cluster(tmp_path, a=own, b=own) as found:
        yield found


def running(
    hosts: Cluster,
    *options: str,
    script: tuple[str, ...] = (str(SCRIPT),),
    namespace: str = "",
    **own: str,
) -> AbstractContextManager[subprocess.Popen[str]]:
    """A launcher, with one worker on each of two hosts if nothing else is said."""
    folder = hosts.folder.parent
    variables = environment(folder, GS_JOB_TOKEN=TOKEN, PYTHONPATH=str(ROOT), **own)
    given = ("-H", "a,b", *options) if "-H" not in options else options
    inside = ["ip", "netns", "exec", namespace] if namespace else []
    return started([*inside, *run_command(hosts, *given), *script], variables)


def argv_of_all() -> str:
    """The command lines of all processes of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return "\n".join(found)


def test_lenet_learns_the_same_as_by_itself(hosts: Cluster, tmp_path: Path) -> None:
    learned = learned_alone(STEPS="5")
    logs = tmp_path / "logs"
    with running(
        hosts, "-H", "a:2,b:1", "--log-dir", str(logs), "--env", "STEPS=5", STEPS="6"
    ) as job:
        pids_of_workers(job.stdout, count=1)
        commands = argv_of_all()
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, output
    assert output.count(learned) == 3, output
    assert "graphsplit.cli.ssh.agent" in commands and TOKEN not in commands
    assert sorted(path.name for path in logs.iterdir()) == [
        "scheduler.log", "worker_0.log", "worker_1.log", "worker_2.log"
    ]  # fmt: skip
    assert learned in (logs / "worker_2.log").read_text()
    assert TOKEN not in output + "".join(path.read_text() for path in logs.iterdir())
    assert_nothing_is_left(tmp_path)


def test_a_start_takes_three_round_trips_and_one_process_more_on_each_host(
    hosts: Cluster, tmp_path: Path
) -> None:
    """The third one is the start itself; the process is the agent, beside its client here."""
    counting = f"{sys.executable} {COUNTED_CLIENT} {tmp_path} {hosts.ssh}"
    found = {}
    given = ("run", "--ssh", counting, "-H", "a:1,b:2", "--env", "STEPS"), ("run", "-n", "3")
    for options in given:
        command = [sys.executable, "-m", "graphsplit", *options, str(SCRIPT)]
        own = environment(tmp_path, STEPS="endless", PYTHONPATH=str(ROOT))
        with started(command, own) as job:
            pids_of_workers(job.stdout, count=3)
            found[options[1]] = [
                one for one in processes_of(tmp_path) if not any(word in one for word in OF_HERE)
            ]
            interrupt(job, 0)
            job.communicate(timeout=LIMIT_S)
        assert_nothing_is_left(tmp_path)
    agents = [one for one in found["--ssh"] if "graphsplit.cli.ssh.agent" in one]
    assert len(agents) == 2 and len(found["--ssh"]) - 2 == len(found["-n"]) == 4, found
    clients = [path.read_text().split() for path in tmp_path.glob("*.client")]
    orders = sorted([f for f in one if f[0] == ">" and f not in UNASKED] for one in clients)
    of_a, of_b = ([">Setup", ">Reach", ">ChildSpec", ">ChildSpec"],) * 2  # a has the scheduler, too
    assert orders == [of_a, of_b], clients
    for one in clients:
        answers = [frame for frame in one if frame not in UNASKED]
        assert answers[:6] == ["<Facts", ">Setup", "<HostReady", ">Reach", "<Dialed", ">ChildSpec"]


NAMED = """
import os
import torch
from torch import nn
import graphsplit as gs
from graphsplit.marks.annotations import annotations_of

gs.init()
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
network[0].place("MS_WORKER", "a:1")
network[2].place("MS_WORKER", "b")
model = gs.Model(network, nn.MSELoss(), torch.optim.SGD(network.parameters(), lr=0.1))
model.train_step(torch.randn(2, 4), torch.randn(2, 1))
placed = {path: one.where for path, one in annotations_of(network).items()}
cores = sorted(os.sched_getaffinity(0))
print(f"rank {gs.get_rank()} has placed {placed}, and runs on {cores}", flush=True)
"""


def test_workers_are_named_by_their_hosts_and_kept_on_their_cores(
    hosts: Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "named.py"
    script.write_text(NAMED)
    with running(hosts, "-H", "a:2,b:1", "--bind", script=(str(script),)) as job:
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, output
    cores = in_order(os.sched_getaffinity(0))
    for rank, share in enumerate([(0, 2), (1, 2), (0, 1)]):
        own = sorted(cores_of(cores, share))
        said = f"rank {rank} has placed {{'0': 1, '2': 2}}, and runs on {own}"
        assert said in output, output


def _client_of_b(job: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    (found,) = (
        int(pid) for pid in children if b"\0b\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return found


def kill_client(job: subprocess.Popen[str], pid: int, hosts: Cluster) -> None:
    os.kill(_client_of_b(job), signal.SIGKILL)


def kill_agent(job: subprocess.Popen[str], pid: int, hosts: Cluster) -> None:
    os.kill(parent_of(pid), signal.SIGKILL)


def kill_session(job: subprocess.Popen[str], pid: int, hosts: Cluster) -> None:
    for session in hosts.sessions_of("b"):
        os.kill(session, signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "status", "told"),
    [
        (interrupt, 130, "interrupted by SIGINT; exit status 130"),
        (kill_worker, 137, "worker 1 was killed by SIGKILL on host b"),
        (kill_launcher, -9, ""),
        (kill_client, 129, "worker 1 was lost with its host b: its SSH connection has ended"),
        (kill_agent, 129, "worker 1 was lost with its host b: its SSH connection has ended"),
        (kill_session, 129, "worker 1 was lost with its host b: its SSH connection has ended"),
    ],
    ids=["Ctrl-C", "worker", "launcher", "client", "agent", "session"],
)
def test_an_ended_job_leaves_nothing_behind(
    hosts: Cluster, tmp_path: Path, end: Callable[..., None], status: int, told: str
) -> None:
    with running(hosts, "--env", "STEPS", STEPS="endless") as job:
        pids = pids_of_workers(job.stdout, count=2)
        end(job, pids[1], hosts)
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == status, output
    assert told in (output.splitlines() or [""])[-1] if told else True
    assert_nothing_is_left(tmp_path)


def test_one_that_is_interrupted_while_it_starts_leaves_nothing_behind(
    hosts: Cluster, tmp_path: Path
) -> None:
    with running(hosts, "--env", "STEPS", STEPS="endless") as job:
        assert job.stdout is not None
        while "starting 2 workers: 0 on a, 1 on b" not in (line := job.stdout.readline()):
            assert line
        job.send_signal(signal.SIGINT)
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 130, output
    assert "Traceback" not in output
    assert_nothing_is_left(tmp_path)


def recovered(hosts: Cluster, folder: Path, **variables: str) -> str:
    """The output of a job whose worker 1 is killed on host b, and which ends with the same bits."""
    given, own = ("-H", "a:1,b:2", "--restarts", "1"), {"GS_SNAPSHOT_EVERY": "2", **variables}
    output = assert_recovers_as_alone(
        lambda script: running(hosts, *given, script=script, **own), folder
    )
    assert_nothing_is_left(folder)
    return output


def test_a_worker_that_is_killed_is_started_again_and_the_bits_are_the_same(
    hosts: Cluster, tmp_path: Path
) -> None:
    output = recovered(hosts, tmp_path, GS_RECOVERY="wait_rejoin")
    again = "worker 1 was killed by SIGKILL on host b; starting it again (0 restarts left)"
    assert again in output


def test_the_workers_of_a_lost_host_go_on_on_a_spare_one(hosts: Cluster, tmp_path: Path) -> None:
    hosts.add("c", "127.0.0.4", of_the_test(tmp_path))
    learned = learned_alone(STEPS="60")
    given = ("--spares", "c", "--restarts", "1", "--env", "STEPS")
    with running(hosts, *given, GS_RECOVERY="wait_rejoin", STEPS="60") as job:
        pids = pids_of_workers(job.stdout, count=2)
        kill_session(job, pids[1], hosts)
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0 and output.count(learned) == 2, output
    assert "worker 1 was lost with its host b: its SSH connection has ended" in output
    assert_nothing_is_left(tmp_path)


def test_a_frozen_worker_is_ended_and_named(hosts: Cluster, tmp_path: Path) -> None:
    own = {"STEPS": "endless", "MS_NODE_TIMEOUT": "3"}
    with running(hosts, "--env", "STEPS", **own) as job:
        pids = pids_of_workers(job.stdout, count=2)
        os.kill(pids[1], signal.SIGSTOP)
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode != 0
    assert "worker 1" in output.splitlines()[-1] and "heard from it" in output.splitlines()[-1]
    assert_nothing_is_left(tmp_path)


def test_a_job_that_asks_for_another_try_gets_it_on_the_same_hosts(
    hosts: Cluster, tmp_path: Path
) -> None:
    output = recovered(
        hosts,
        tmp_path,
        GS_RECOVERY="restart",
        GS_SNAPSHOT_DISK_EVERY="2",
        MS_RECOVERY_PATH=str(tmp_path / "kept"),
    )
    assert "worker 1 was killed by SIGKILL on host b" in output
    assert "starting the job again; 0 more tries after this" in output


def test_hosts_end_all_when_the_launcher_is_frozen(hosts: Cluster, tmp_path: Path) -> None:
    """Nothing closes then: they have counted its beats."""
    with running(hosts, "--env", "STEPS", STEPS="endless", MS_NODE_TIMEOUT="5") as job:
        pids_of_workers(job.stdout, count=2)
        job.send_signal(signal.SIGSTOP)
        end_s = time.monotonic() + LIMIT_S
        while any("lenet_job" in one and " run " not in one for one in processes_of(tmp_path)):
            assert time.monotonic() < end_s
            time.sleep(0.1)
        job.send_signal(signal.SIGCONT)
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 129 and "was lost with its host" in output.splitlines()[-1], output
    assert_nothing_is_left(tmp_path)


def refusal(hosts: Cluster, *options: str, script: str = str(SCRIPT)) -> str:
    """What a launcher says that starts nothing."""
    begun_s = quiet_time()
    with running(hosts, *options, script=(script,)) as job:
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 1, output
    assert quiet_time() - begun_s < REFUSED_WITHIN_S
    assert "starting" not in output
    assert_nothing_is_left(hosts.folder.parent)
    return output


def test_hosts_that_let_nobody_in_are_named_with_the_fix(hosts: Cluster, tmp_path: Path) -> None:
    known = (hosts.folder / "known_hosts").read_text()
    (hosts.folder / "known_hosts").write_text(known.replace("b ", "c "))
    output = refusal(hosts)
    assert "host b: its host key is not known here (" in output and "run `ssh b` once" in output
    key_of_a = known.splitlines()[0].split()[2]
    key_of_b = known.splitlines()[1].split()[2]
    (hosts.folder / "known_hosts").write_text(known.replace(key_of_b, key_of_a))
    output = refusal(hosts)
    assert "host b: its host key is another one than it was" in output
    assert "ssh-keygen -R b" in output
    (hosts.folder / "known_hosts").write_text(known)
    (hosts.folder / "user_key.pub").write_text("")
    output = refusal(hosts)
    for host in ("a", "b"):
        assert f"host {host}: it does not let this user in without a password" in output
        assert f"Fix: run `ssh-copy-id {host}`" in output


def test_hosts_out_of_reach_are_named_with_the_fix(hosts: Cluster, tmp_path: Path) -> None:
    hosts.addresses["b"] = ("127.0.0.9", hosts.addresses["b"][1])
    hosts.addresses["c"] = ("no-such-host.invalid", 22)
    hosts.write_config()
    output = refusal(hosts, "-H", "a,b,c")
    assert "host b: SSH cannot reach it (" in output and "refused" in output
    assert "host c: its name is not known here (" in output and "~/.ssh/config" in output


def test_hosts_without_what_a_job_needs_are_named_with_the_fix(
    hosts: Cluster, tmp_path: Path
) -> None:
    output = refusal(hosts, "--python", "/no/such/python")
    assert "host b: it has no /no/such/python that can be run (" in output
    assert "Fix: name the interpreter that has graphsplit on every host: --python PATH" in output
    output = refusal(hosts, "--workdir", "/no/such/folder")
    assert "host a: there is no folder /no/such/folder (" in output and "--workdir DIR" in output
    output = refusal(hosts, script=str(tmp_path / "missing.py"))
    assert f"host a: there is no file {tmp_path}/missing.py" in output
    output = refusal(hosts, "--host", "192.0.2.1")
    assert "host a: the scheduler cannot listen on 192.0.2.1" in output and "(--host)" in output
    output = refusal(hosts, "--port", str(hosts.addresses["a"][1]))
    assert "sshd" in output and "Fix: name another port (--port)" in output


def test_hosts_that_differ_in_versions_are_named_with_the_fix(tmp_path: Path) -> None:
    own = of_the_test(tmp_path)
    other = tmp_path / "other"
    (other / "torch-1.0.0.dist-info").mkdir(parents=True)
    (other / "torch-1.0.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 1.0.0\n")
    older = tmp_path / "older"
    for path in (ROOT / "graphsplit").rglob("*.py"):
        copy = older / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (older / "graphsplit" / "version.py").write_text(
        (ROOT / "graphsplit" / "version.py").read_text().replace('"0.', '"9.')
    )
    with cluster(
        tmp_path,
        a=own,
        b={**own, "PYTHONPATH": f"{other}:{ROOT}"},
        c={**own, "PYTHONPATH": str(older)},
        d={**own, "PYTHONPATH": ""},
    ) as hosts:
        output = refusal(hosts, "-H", "a,b,c")
        assert "host b has torch 1.0.0, but host a has torch" in output
        assert "Fix: install the same version of torch for every worker" in output
        assert re.search(r"host c has graphsplit 9\.\S+, but host a has graphsplit 0\.", output)
        assert "Fix: install the same version of graphsplit for every worker" in output
        bare = tmp_path / "bare"
        bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
        bare.chmod(0o755)
        output = refusal(hosts, "-H", "d", "--python", str(bare))
        assert f"host d: its {bare} has no graphsplit" in output
        assert "Fix: install graphsplit" in output


REPLICATED = (str(RECOVERING), "--replicated", "--epochs", "60")


@pytest.mark.parametrize(
    ("policy", "script", "told"),
    [
        ("wait_rejoin", (str(SCRIPT),), "starting it again (0 restarts left)"),
        ("restart", (str(SCRIPT),), "starting the job again; 0 more tries after this"),
        ("go_on", REPLICATED, "going on with 2 of 3 workers, without workers 2"),
    ],
)
def test_a_job_recovers_from_a_host_that_vanishes(
    tmp_path: Path, policy: str, script: tuple[str, ...], told: str
) -> None:
    """The cable of b is pulled: its worker goes to c, or the others go on, in the same bits."""
    if why_not_namespaces():
        pytest.skip(f"left out: {why_not_namespaces()}")
    own, goes_on = of_the_test(tmp_path), policy == "go_on"
    steps = {"STEPS": "60"}
    learned = said_alone(Path(script[0]), *script[1:], **steps)[-1]
    kept = {"GS_SNAPSHOT_EVERY": "2", "MS_NODE_TIMEOUT": "5", "GS_RECOVERY": policy, **steps}
    if policy == "restart":
        kept |= {"GS_SNAPSHOT_DISK_EVERY": "2", "MS_RECOVERY_PATH": str(tmp_path / "kept")}
    given = ["-H", "a:2,b:1", "--env", "STEPS"]
    given += [] if goes_on else ["--spares", "c", "--restarts", "1"]
    with networked(tmp_path, a=own, b=own, c=own) as (hosts, namespaces):
        with running(hosts, *given, script=script, namespace=namespaces[0], **kept) as job:
            assert job.stdout is not None
            while not re.search(r"planned the train step|worker 2 has pid", job.stdout.readline()):
                assert job.poll() is None
            cable = ["ip", "-n", namespaces[1], "link", "set", "eth0", "down"]
            subprocess.run(cable, check=True, timeout=REFUSED_WITHIN_S)
            cut_s = quiet_time()
            said = []
            while told not in (line := job.stdout.readline()):
                assert line, "".join(said)
                said.append(line)
            assert quiet_time() - cut_s < NOTICED_WITHIN_S, "".join(said)
            output, _ = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 0, output
        assert output.count(learned) == (2 if goes_on else 3), output
        assert_nothing_is_left(tmp_path)


def test_hosts_with_networks_of_their_own_train_and_one_that_vanishes_is_named(
    tmp_path: Path,
) -> None:
    """Two network namespaces: LeNet's bits; then b's cable is pulled."""
    if why_not_namespaces():
        pytest.skip(f"left out: {why_not_namespaces()}")
    learned, own = learned_alone(STEPS="5"), of_the_test(tmp_path)
    with networked(tmp_path, a=own, b=own) as (hosts, namespaces):
        with running(hosts, "--env", "STEPS", namespace=namespaces[0], STEPS="5") as job:
            output, _ = job.communicate(timeout=LIMIT_S)
        assert job.returncode == 0 and output.count(learned) == 2, output
        assert "listening on 10.118.0.1:" in output and "segments, 2 workers" in output
        assert_nothing_is_left(tmp_path)
        endless = {"STEPS": "endless", "MS_NODE_TIMEOUT": f"{NODE_TIMEOUT_S:g}"}
        with running(hosts, "--env", "STEPS", namespace=namespaces[0], **endless) as job:
            pids_of_workers(job.stdout, count=2)
            cable = ["ip", "-n", namespaces[1], "link", "set", "eth0", "down"]
            subprocess.run(cable, check=True, timeout=REFUSED_WITHIN_S)
            cut_s, said = quiet_time(), ""
            assert job.stdout is not None
            while "worker 1" not in said:
                line = job.stdout.readline()
                assert line, said
                said += line
            assert quiet_time() - cut_s < NODE_TIMEOUT_S, said
            output, _ = job.communicate(timeout=LIMIT_S)
        assert job.returncode != 0 and "worker 1" in (said + output).splitlines()[-1], said + output
        assert_nothing_is_left(tmp_path)
