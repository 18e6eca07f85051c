"""``run.sh`` with tiny scripts in the place of ``train.py``."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(90)]

RUN_SH = Path(__file__).parents[2] / "examples" / "lenet_mnist" / "run.sh"
PREFACE = (
    "import os, sys\nrole, rank = os.environ['MS_ROLE'], os.environ.get('MS_NODE_ID')\n"
    "print(role, rank, os.getcwd(), sys.argv[1:], os.environ['DATA_PATH'], flush=True)\n"
)

Process = subprocess.Popen[str]
Launch = Callable[..., Process]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[Process] = []

    def start(script: str, *arguments: str, **variables: str) -> Process:
        path = tmp_path / "script.py"
        path.write_text(PREFACE + script)
        environ = {key: value for key, value in os.environ.items() if key != "DATA_PATH"}
        run_dir = tmp_path / "run"
        environ |= {"PYTHON": sys.executable, "SCRIPT": str(path), "RUN_DIR": str(run_dir)}
        shell = subprocess.Popen(
            ["bash", str(RUN_SH), *arguments],
            env=environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(shell)
        return shell

    yield start
    for shell in started:
        if shell.poll() is None:
            shell.terminate()
        shell.communicate()


def test_each_process_has_its_role_folder_and_log(launch: Launch, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    shell = launch("print('Accuracy is:', rank)", str(data), "--epochs", "2")
    out, err = shell.communicate()
    assert shell.returncode == 0, err
    run = tmp_path / "run"
    for name, role, rank in [("sched", "MS_SCHED", None), ("worker_4", "MS_WORKER", "4")]:
        expected = f"{role} {rank} {run / name} ['--epochs', '2'] {data}"
        assert (run / name / "log").read_text().splitlines()[0] == expected
    assert [line for line in out.splitlines() if line.startswith("worker_")] == [
        f"worker_{rank}: Accuracy is: {rank}" for rank in range(5)
    ]


def test_a_failure_gives_its_status_and_the_end_of_its_log(launch: Launch) -> None:
    shell = launch("if rank == '1':\n    print('boom'); sys.exit(7)", MS_WORKER_NUM="2")
    _, err = shell.communicate()
    assert shell.returncode == 7
    assert "worker_1 failed with status 7" in err
    assert err.rstrip().endswith("boom")


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_shell_ends_all(
    launch: Launch, tmp_path: Path, signum: signal.Signals, status: int
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = f"import signal\nopen({str(fifo)!r}, 'a').write(f'{{os.getpid()}}\\n')\nsignal.pause()"
    # Open for writing, too: the end of one writer is then not the end of the file.
    with os.fdopen(os.open(fifo, os.O_RDWR)) as ready:
        shell = launch(script, MS_WORKER_NUM="2")
        processes = [os.pidfd_open(int(ready.readline())) for _ in range(3)]
    shell.send_signal(signum)
    shell.communicate()
    assert shell.returncode == status
    for process in processes:
        poller = select.poll()
        poller.register(process, select.POLLIN)
        assert poller.poll(0), "a process outlived run.sh"
        os.close(process)


def test_a_path_without_a_folder_is_refused_before_anything_starts(launch: Launch) -> None:
    shell = launch("", "absent")
    _, err = shell.communicate()
    assert shell.returncode == 2
    assert "'absent'" in err and "--download" in err


def test_a_python_without_torch_is_refused_before_anything_starts(
    launch: Launch, tmp_path: Path
) -> None:
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without installed packages
    other.chmod(0o755)
    shell = launch("", PYTHON=str(other))
    _, err = shell.communicate()
    assert shell.returncode == 2
    assert "Fix: activate its environment (. .venv/bin/activate), or set PYTHON=" in err
    assert not (tmp_path / "run").exists()
