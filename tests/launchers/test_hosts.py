"""One job by two launchers, as on two hosts, by hand: `graphsplit run --first-rank --scheduler`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from launched_jobs import (
    LIMIT_S,
    SCRIPT,
    assert_nothing_is_left,
    environment,
    learned_alone,
    pids_of_workers,
)

from graphsplit.cli.commands import main
from graphsplit.cli.launch.environment import job_children
from graphsplit.cli.launch.hosts import HostPart, read_part
from graphsplit.launchers.ports import find_free_port

REMOTE = ("10.0.0.1", 8118)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ((4, None, 0, ""), HostPart(4, range(4))),
        ((4, 2, 0, ""), HostPart(4, range(2))),
        ((4, 2, 2, "10.0.0.1:8118"), HostPart(4, range(2, 4), REMOTE)),
        ((4, None, 1, "10.0.0.1:8118"), HostPart(4, range(1, 4), REMOTE)),
        ((None, 2, 2, "10.0.0.1:8118"), HostPart(4, range(2, 4), REMOTE)),
        ((None, 1, 0, "[fe80::1]:8118"), HostPart(1, range(1), ("fe80::1", 8118))),
    ],
)
def test_the_part_of_one_launcher(options: tuple, part: HostPart) -> None:
    assert read_part(*options) == part


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((None, None, 0, ""), "how many workers the job has"),
        ((None, 2, 0, ""), "how many workers the job has"),
        ((4, 3, 2, ""), "workers 2 to 4 of 4"),
        ((4, None, 4, ""), "must stay below -n"),
        ((4, 2, 2, "10.0.0.1"), "expected HOST:PORT"),
        ((4, 2, 2, "10.0.0.1:0"), "expected HOST:PORT"),
    ],
)
def test_options_that_name_no_part(options: tuple, problem: str) -> None:
    with pytest.raises(click.UsageError, match=problem):
        read_part(*options)


def test_only_the_own_workers_are_started() -> None:
    children = job_children(
        {}, num_workers=4, host="10.0.0.1", port=8118, ranks=range(2, 4), has_scheduler=False
    )
    assert [child.name for child in children] == ["worker 2", "worker 3"]
    assert {child.variables["MS_WORKER_NUM"] for child in children} == {"4"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["-n", "2", "--workers", "1"], "have no secret by which its processes know each other"),
        (["--workers", "1", "--scheduler", "10.0.0.1:8118"], "export GS_JOB_TOKEN_FILE="),
        (
            ["--workers", "1", "--scheduler", "10.0.0.1:8118", "--restarts", "1"],
            "only the launcher that starts the scheduler knows what was lost",
        ),
    ],
)
def test_a_job_on_several_hosts_is_refused_before_it_starts(
    options: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GS_JOB_TOKEN", "GS_JOB_TOKEN_FILE", "GS_TLS_CA", "GS_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GS_RECOVERY", "wait_rejoin")
    result = CliRunner().invoke(main, ["run", *options, str(SCRIPT)])
    assert result.exit_code != 0 and problem in result.output


@contextmanager
def two_launchers(
    folder: Path, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    port = str(find_free_port("127.0.0.1"))
    own = environment(folder, GS_JOB_TOKEN="a token that only this job knows", **variables)
    parts = (
        ["-n", "2", "--workers", "1", "--port", port],
        ["--workers", "1", "--first-rank", "1", "--scheduler", f"127.0.0.1:{port}"],
    )
    with ExitStack() as stack:
        jobs = []
        for part in parts:
            command = [sys.executable, "-m", "graphsplit", "run", *part, str(SCRIPT)]
            job = subprocess.Popen(
                command,
                env=own,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.enter_context(job)
            stack.callback(job.kill)
            jobs.append(job)
        yield jobs[0], jobs[1]


@pytest.mark.real_processes
@pytest.mark.timeout(240)
def test_two_launchers_train_one_network(tmp_path: Path) -> None:
    learned = learned_alone(STEPS="5")
    with two_launchers(tmp_path, STEPS="5") as jobs:
        outputs = [job.communicate(timeout=LIMIT_S)[0] for job in jobs]
    for rank, (job, output) in enumerate(zip(jobs, outputs, strict=True)):
        assert job.returncode == 0, output
        assert f"[worker {rank}] {learned}" in output
    assert "starting 1 worker of 2, the first is 1" in outputs[1]
    assert "[scheduler]" not in outputs[1]
    assert_nothing_is_left(tmp_path)


@pytest.mark.real_processes
@pytest.mark.timeout(240)
def test_a_worker_that_is_killed_on_one_host_ends_the_other_one(tmp_path: Path) -> None:
    with two_launchers(tmp_path, STEPS="endless") as (first, second):
        pids_of_workers(first.stdout, count=1)
        pids = pids_of_workers(second.stdout, count=1)
        os.kill(pids[1], signal.SIGKILL)
        told, _ = first.communicate(timeout=LIMIT_S)
        output, _ = second.communicate(timeout=LIMIT_S)
    assert first.returncode != 0 and second.returncode == 128 + signal.SIGKILL
    assert "worker 1" in told
    assert "worker 1 was killed" in output or "SIGKILL" in output
    assert_nothing_is_left(tmp_path)
