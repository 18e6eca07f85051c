"""Jobs on a real Ray cluster of two nodes on this machine, where Ray is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from launched_jobs import (
    LIMIT_S,
    SCRIPT,
    TOKEN,
    assert_recovers_as_alone,
    environment,
    interrupt,
    kill_launcher,
    kill_worker,
    learned_alone,
    parent_of,
    pids_of_workers,
    processes_of,
    started,
)

ROOT = Path(__file__).parents[2]
WHY_NOT = "Ray is not installed here: pip install 'graphsplit[ray]', or make test-launchers"

pytestmark = [
    pytest.mark.real_processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason=WHY_NOT),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of the cluster are marked with."""
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Any]:
    """Two nodes: each has something that the other one has not."""
    own = {"MARK": str(folder), "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        found = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"first": 3}}
        )
        found.add_node(num_cpus=2, resources={"second": 3})
        yield found
        found.shutdown()


@pytest.fixture
def resources(tmp_path: Path) -> Path:
    """Worker 0 on one node, all others on the other one."""
    path = tmp_path / "resources.yaml"
    path.write_text("all: {CPU: 0, second: 1}\n0: {first: 1, second: 0}\n")
    return path


def running(
    cluster: Any, folder: Path, *options: str, script: tuple[str, ...] = (str(SCRIPT),), **own: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "graphsplit", "run", "--ray", cluster.address, *options]
    return started([*command, *script], environment(folder, GS_JOB_TOKEN=TOKEN, **own))


def assert_only_the_cluster_is_left(folder: Path) -> None:
    end_s = time.monotonic() + LIMIT_S
    words = ("ssh.agent", "lenet_job", "recovering", "launching.worker", "cluster.scheduler")
    while left := [one for one in processes_of(folder) if any(word in one for word in words)]:
        assert time.monotonic() < end_s, left
        time.sleep(0.05)


def test_lenet_learns_the_same_as_by_itself(
    cluster: Any, folder: Path, tmp_path: Path, resources: Path
) -> None:
    learned = learned_alone(STEPS="5")
    given = ("-n", "2", "--resources", str(resources), "--log-dir", str(tmp_path / "logs"))
    with running(cluster, folder, *given, "--env", "STEPS", STEPS="5") as job:
        pids_of_workers(job.stdout, count=1)
        commands = "\n".join(processes_of(folder))
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, output
    assert output.count(learned) == 2, output
    assert commands.count("graphsplit.cli.ssh.agent") == 2 and TOKEN not in commands + output
    assert learned in (tmp_path / "logs" / "worker_1.log").read_text()
    assert_only_the_cluster_is_left(folder)


def kill_actor(job: subprocess.Popen[str], pid: int) -> None:
    agent = parent_of(pid)
    os.kill(parent_of(agent), signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "status", "told"),
    [
        (interrupt, 130, "interrupted by SIGINT; exit status 130"),
        (kill_worker, 137, r"worker 1 was killed by SIGKILL on host [\d.]+/1; .*status 137"),
        (kill_launcher, -9, ""),
        (kill_actor, 129, r"worker 1 was lost with its host [\d.]+/1: its actor has ended"),
    ],
    ids=["Ctrl-C", "worker", "launcher", "actor"],
)
def test_an_ended_job_leaves_nothing_behind(
    cluster: Any, folder: Path, resources: Path, end: Callable[..., None], status: int, told: str
) -> None:
    given = ("-n", "2", "--resources", str(resources), "--env", "STEPS")
    with running(cluster, folder, *given, STEPS="1000000") as job:
        pids = pids_of_workers(job.stdout, count=2)
        end(job, pids[1])
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode == status, output
    assert re.search(told, (output.splitlines() or [""])[-1] if told else ""), output
    assert_only_the_cluster_is_left(folder)


WORKER, ACTOR = (), ("--above", "2")
KILLED = r"worker 1 was killed by SIGKILL on host [\d.]+/1; "
LOST = r"worker 1 was lost with its host [\d.]+/1: its actor has ended .*; "


@pytest.mark.parametrize(
    ("policy", "restarts", "options", "told"),
    [
        ("wait_rejoin", 1, WORKER, KILLED + "starting it again"),
        ("wait_rejoin", 1, ACTOR, LOST + "starting it again"),
        ("restart", 1, WORKER, KILLED + ".*exit status 137\ngraphsplit: starting the job again"),
        ("restart", 1, ACTOR, LOST + ".*exit status 129\ngraphsplit: starting the job again"),
        ("go_on", 1, WORKER, KILLED + "starting it again"),
        ("go_on", 1, ACTOR, LOST + "starting it again"),
        ("go_on", 0, ACTOR, "going on with 2 of 3 workers, without workers 1"),
    ],
)
def test_a_worker_that_is_lost_is_replaced_and_the_bits_are_the_same(
    cluster: Any,
    folder: Path,
    tmp_path: Path,
    resources: Path,
    policy: str,
    restarts: int,
    options: tuple[str, ...],
    told: str,
) -> None:
    given = ("-n", "3", "--resources", str(resources), "--restarts", str(restarts))
    own = {"GS_RECOVERY": policy, "GS_SNAPSHOT_EVERY": "2"}
    if policy == "restart":
        own |= {"GS_SNAPSHOT_DISK_EVERY": "2", "MS_RECOVERY_PATH": str(tmp_path / "kept")}
    replicated = ("--replicated",) if policy == "go_on" else ()
    output = assert_recovers_as_alone(
        lambda script: running(cluster, folder, *given, script=script, **own),
        tmp_path,
        *(*replicated, *options),
        # Under go_on the others may have finished before another actor is there.
        ranks=(0, 2) if policy == "go_on" and options == ACTOR else (0, 1, 2),
    )
    assert re.search(told, output), output
    assert_only_the_cluster_is_left(folder)


def test_a_node_that_is_lost_is_named(cluster: Any, folder: Path, tmp_path: Path) -> None:
    third = cluster.add_node(num_cpus=1, resources={"third": 1})
    path = tmp_path / "resources.yaml"
    path.write_text("0: {first: 1}\n1: {third: 1}\n")
    given = ("-n", "2", "--resources", str(path), "--env", "STEPS")
    with running(cluster, folder, *given, STEPS="1000000", MS_NODE_TIMEOUT="10") as job:
        pids_of_workers(job.stdout, count=2)
        cluster.remove_node(third, allow_graceful=False)
        output, _ = job.communicate(timeout=LIMIT_S)
    assert job.returncode != 0
    assert re.search(r"^graphsplit: worker 1 was lost with its host", output, re.MULTILINE), output
    assert_only_the_cluster_is_left(folder)


def test_the_worker_of_a_node_that_is_lost_goes_on_on_another_one(
    cluster: Any, folder: Path, tmp_path: Path
) -> None:
    """Ray finds another node for the worker's bundle; the job's bits are those of one process."""
    steps = {"STEPS": "1500"}
    learned = learned_alone(**steps)
    fourth = cluster.add_node(num_cpus=1, resources={"fourth": 1})
    path = tmp_path / "resources.yaml"
    path.write_text("0: {first: 1}\n1: {fourth: 1}\n")
    given = ("-n", "2", "--resources", str(path), "--env", "STEPS", "--restarts", "1")
    own = {"GS_RECOVERY": "wait_rejoin", "GS_SNAPSHOT_EVERY": "20", "MS_NODE_TIMEOUT": "10"}
    with running(cluster, folder, *given, **own, **steps) as job:
        pids_of_workers(job.stdout, count=2)
        other = cluster.add_node(num_cpus=1, resources={"fourth": 1})
        cluster.remove_node(fourth, allow_graceful=False)
        output, _ = job.communicate(timeout=LIMIT_S)
    cluster.remove_node(other)
    assert job.returncode == 0, output
    lost = r"^graphsplit: worker 1 was lost with its host .*; starting it again \(0 restarts left\)"
    assert re.search(lost, output, re.MULTILINE), output
    assert output.count(learned) == 2, output
    assert_only_the_cluster_is_left(folder)


def output_of(folder: Path, *command: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *command],
        env=environment(folder, GS_JOB_TOKEN=TOKEN),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_function_returns_what_a_plain_loop_gives_or_raises(
    cluster: Any, folder: Path, resources: Path
) -> None:
    program = str(Path(__file__).with_name("ray_function.py"))
    status, output = output_of(folder, program, cluster.address, str(resources))
    assert status == 0 and output.count("equal True") == 2, output
    assert "raised no such thing" in output
    assert_only_the_cluster_is_left(folder)


def test_what_the_cluster_has_not_is_said(cluster: Any, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "resources.yaml"
    path.write_text("all: {GPU: 1}\n")
    hurried = (
        "import graphsplit.cli.ray.run as run; run.PLACE_WITHIN_S = 1.0; "
        "from graphsplit.cli.main import main; main()"
    )
    given = ("run", "--ray", cluster.address, "-n", "2", "--resources", str(path), str(SCRIPT))
    status, output = output_of(folder, "-c", hurried, *given)
    assert status == 1
    assert "they want CPU 2, GPU 2, and all of it has CPU 4, first 3" in output
    assert "Fix: ask for less (--resources FILE)" in output
