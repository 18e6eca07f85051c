"""A scheduler that strangers without the job's token flood, from the machine of its workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from graphsplit.cluster.member.member import Member, NodeIdentity
from graphsplit.cluster.status.client import fetch_status
from graphsplit.failure import AbortSignal
from graphsplit.launchers.ports import find_free_port, holder_of, is_free
from graphsplit.security.names import WORKER
from graphsplit.security.protection import load_protection
from graphsplit.settings import ClusterSettings

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(240)]
RECOVERING = Path(__file__).parents[1] / "system" / "jobs" / "recovering.py"
JOB_FLOOD_S = 200.0
FLOOD_S = 5.0
DEADLINE_S = 60.0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_kib(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


def test_a_flood_costs_little_and_members_come_in_and_finish(tmp_path: Path) -> None:
    port = find_free_port("127.0.0.1")
    environ = {
        **os.environ,
        "MS_ROLE": "MS_SCHED",
        "MS_WORKER_NUM": "1",
        "MS_SCHED_PORT": str(port),
        "GS_JOB_TOKEN": "a token that strangers do not know",
    }
    settings = ClusterSettings.from_environ(environ)
    assert settings is not None
    command = [sys.executable, "-m", "graphsplit.cluster.scheduler"]
    log = tmp_path / "log"
    with (
        log.open("wb") as file,
        subprocess.Popen(command, env=environ, stdout=file) as scheduler,
        ExitStack() as stack,
    ):
        stack.callback(scheduler.kill)  # nobody ends it where something fails
        end_s = time.monotonic() + DEADLINE_S
        while b"listening" not in log.read_bytes():
            assert time.monotonic() < end_s
            time.sleep(0.05)
        cpu_before_s, peak_before_kib = cpu_s(scheduler.pid), peak_kib(scheduler.pid)
        flooder = [sys.executable, str(Path(__file__).with_name("flooder.py"))]
        with subprocess.Popen([*flooder, str(port), str(FLOOD_S)]) as flood:
            time.sleep(1.0)
            own = load_protection(settings.security, role=WORKER)
            assert fetch_status("127.0.0.1", port, own, timeout_s=DEADLINE_S).num_workers == 1
            member = Member.join(
                replace(settings, role="MS_WORKER"),
                endpoints={},
                identity=NodeIdentity(),
                abort=AbortSignal(),
                log=lambda line: None,
            )
            flood.wait(DEADLINE_S)
        assert cpu_s(scheduler.pid) - cpu_before_s < FLOOD_S / 2
        assert peak_kib(scheduler.pid) - peak_before_kib < 16 << 10
        member.finish()
        member.close()
        assert scheduler.wait(DEADLINE_S) == 0
    assert log.stat().st_size < 100_000
    assert "one in 2 is let in" in log.read_text() or "proved nothing" in log.read_text()


# GS_TEST_LONG=<minutes> floods for about so long, in which a worker dies every few seconds.
LONG_MINUTES = float(os.environ.get("GS_TEST_LONG") or 0)
DEATHS = 1 + round(8 * LONG_MINUTES)
JOBS = {"wait_rejoin": ("--epochs", str(8 * DEATHS))}
if LONG_MINUTES:  # a job goes on long enough to be joined
    JOBS["go_on"] = ("--replicated", "--late", "0.5", "--epochs", str(300 + 60 * DEATHS))


@pytest.mark.timeout(240 + 600 * LONG_MINUTES)
@pytest.mark.parametrize("policy", JOBS)
def test_a_job_that_is_flooded_loses_workers_takes_them_in_and_has_the_bits(
    policy: str, tmp_path: Path
) -> None:
    """Strangers at the scheduler's port and a worker's, from before the first step to the end."""
    script = [str(RECOVERING), *JOBS[policy]]
    alone = subprocess.run(
        [sys.executable, *script], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    first, port = find_free_port("127.0.0.1"), find_free_port("127.0.0.1")
    own = {"GS_TRANSPORT": "grpc", "GS_WORKER_PORTS": f"{first}-{first + 9}"}
    own |= {"GS_RECOVERY": policy, "GS_SNAPSHOT_EVERY": "2", "OMP_NUM_THREADS": "1"}
    options = ["-n", "3", "--restarts", str(DEATHS), "--port", str(port)]
    moments = ",".join(f"{1 + n % 2}:BACKWARD:{5 + 8 * n}" for n in range(DEATHS))
    command = [sys.executable, "-m", "graphsplit", "run", *options, *script]
    flooder = [sys.executable, str(Path(__file__).with_name("flooder.py"))]
    with subprocess.Popen(
        [*command, "--die", moments, "--marks", str(tmp_path)], env={**os.environ, **own},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as job:  # fmt: skip
        assert job.stdout is not None
        said = []
        while "all 3 workers registered" not in "".join(said[-1:]):
            said.append(job.stdout.readline())
            assert said[-1], "".join(said)
        scheduler = int(holder_of(port).split()[1])
        before_kib = peak = peak_kib(scheduler)
        taken = next(one for one in range(first, first + 10) if not is_free("127.0.0.1", one))
        floods = [
            subprocess.Popen([*flooder, str(one), str(JOB_FLOOD_S * (1 + LONG_MINUTES))])
            for one in (port, taken)
        ]
        began = time.monotonic()
        try:
            for line in job.stdout:
                said.append(line)
                with suppress(OSError):
                    peak = peak_kib(scheduler)
            assert all(flood.poll() is None for flood in floods), "they have left before the job"
        finally:
            for flood in floods:
                flood.kill()
                flood.wait()
    output, seconds = "".join(said), time.monotonic() - began
    sys.stdout.write(f"{seconds:.1f} s, {peak - before_kib} KiB more, {len(output)} B said\n")
    assert job.returncode == 0, output
    assert len(list(tmp_path.iterdir())) == DEATHS
    assert output.count("starting it again (") == DEATHS
    for rank in range(3):
        lines = re.findall(rf"^\[worker {rank}\] (.*)$", output, re.MULTILINE)
        assert [line for line in lines if line in alone][-len(alone) :] == alone, output
    assert len(output) < 100_000 and peak - before_kib < 16 << 10


EPOCH = re.compile(r"\[worker ([01])\] epoch ([\d.]+) ([\d.]+)")
AT_MOST = 1.5
EPOCHS = 12


def epochs_of(job: subprocess.Popen[str], said: list[str], count: int) -> dict[int, list[float]]:
    """The next epochs of each worker: seconds of each, without those in which it had no core."""
    assert job.stdout is not None
    found: dict[int, list[float]] = {0: [], 1: []}
    while min(len(times) for times in found.values()) < count:
        line = job.stdout.readline()
        assert line, "".join(said)
        said.append(line)
        if match := EPOCH.search(line):
            found[int(match[1])].append(float(match[2]) - float(match[3]))
    return found


@pytest.mark.parametrize("whom", ["a worker", "the scheduler"])
def test_an_epoch_takes_little_longer_while_a_port_is_flooded(whom: str) -> None:
    """The same job's epochs before and meanwhile, each without the time in which it had no core."""
    first, port = find_free_port("127.0.0.1"), find_free_port("127.0.0.1")
    own = {"GS_TRANSPORT": "grpc", "GS_WORKER_PORTS": f"{first}-{first + 9}"}
    own |= {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "graphsplit", "run", "-n", "2", "--port", str(port)]
    script = str(Path(__file__).with_name("flooded_job.py"))
    said: list[str] = []
    with subprocess.Popen(
        [*command, script], env={**os.environ, **own}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as job:  # fmt: skip
        try:
            epochs_of(job, said, 3)  # warms up
            quiet = epochs_of(job, said, EPOCHS)
            pids = {int(pid) for pid in re.findall(r"pid (\d+)", "".join(said))}
            peaks = {pid: peak_kib(pid) for pid in pids}
            taken = [one for one in range(first, first + 10) if not is_free("127.0.0.1", one)]
            target = taken[0] if whom == "a worker" else port
            flooder = [sys.executable, str(Path(__file__).with_name("flooder.py"))]
            with subprocess.Popen([*flooder, str(target), str(JOB_FLOOD_S)]) as flood:
                try:
                    epochs_of(job, said, 3)  # it begins
                    flooded = epochs_of(job, said, EPOCHS)
                    assert flood.poll() is None
                finally:
                    flood.kill()
            grown = {pid: peak_kib(pid) - before for pid, before in peaks.items()}
        finally:
            job.send_signal(signal.SIGINT)
            said.append(job.communicate(timeout=DEADLINE_S)[0])
    assert len(pids) >= 2 and max(grown.values()) < 16 << 10, grown
    assert sum(len(line) for line in said if "epoch" not in line) < 100_000
    times = {rank: (median(quiet[rank]), median(flooded[rank])) for rank in quiet}
    assert all(there <= AT_MOST * before for before, there in times.values()), times
