"""The launcher and the scheduler that it started tell each other what each alone can know.

The scheduler here is a script of a few lines, and so are the workers: none imports torch.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(60)]

COMMON = """
import os, select, signal, sys
from pathlib import Path
sys.argv[0] = "graphsplit"  # as for the command, which does without torch's seconds
from graphsplit.launcher_line import Beat, Ended, GivenUp, Line, Over
from graphsplit.reports import note_init
note_init(os.environ)  # as gs.init() does
folder = Path(sys.argv[1])
role, rank = os.environ["MS_ROLE"], os.environ.get("MS_NODE_ID")
line = Line.of(os.environ)
def told():
    select.select([line], [], [])
    return list(line.read())
"""


def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, *, restarts: int = 0, workers: int
) -> subprocess.CompletedProcess[str]:
    if restarts:
        monkeypatch.setenv("GS_RECOVERY", "wait_rejoin")
    path = tmp_path / "script.py"
    path.write_text(COMMON + script)
    command = [sys.executable, "-m", "graphsplit.cli", "run", "-n", str(workers)]
    command += ["--restarts", str(restarts), str(path), str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50)


def test_the_scheduler_hears_of_a_process_that_it_never_knew(tmp_path, monkeypatch) -> None:
    script = """
import time
there = folder / "there"  # whoever has not called gs.init() when a worker fails is only ended
if role == "MS_WORKER":
    while not there.exists():
        time.sleep(0.01)
    sys.exit(3)
there.write_text("")
[note] = told()
print(note.rank, note.how, note.pid > 0, "GS_LAUNCHER_LINE" in os.environ)
"""
    done = run(tmp_path, monkeypatch, script, workers=1)
    assert "[scheduler] 0 ended with status 3 True True" in done.stdout, done
    assert done.returncode == 3


def test_a_worker_that_is_given_up_is_ended_and_started_again(tmp_path, monkeypatch) -> None:
    script = """
pid = folder / "pid"
if role == "MS_WORKER":
    if pid.exists():
        (folder / "came").write_text("")
    else:
        pid.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
else:
    import time
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.01)
    line.send(GivenUp(0, int(pid.read_text()), "it is frozen"))
    line.send(GivenUp(0, 1, "of another life"))
    while not (folder / "came").exists():
        time.sleep(0.01)
"""
    done = run(tmp_path, monkeypatch, script, restarts=1, workers=1)
    assert done.returncode == 0, done
    assert "worker 0 was given up: it is frozen; starting it again (0 restarts left)" in done.stderr


def test_a_scheduler_that_falls_silent_is_ended_and_named(tmp_path, monkeypatch) -> None:
    script = """
if role == "MS_SCHED":
    line.send(Beat(0.2))
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    done = run(tmp_path, monkeypatch, script, workers=1)
    why = "nothing was heard from it for 0.2 s (see MS_NODE_TIMEOUT)"
    assert done.stderr.splitlines()[-1] == (
        f"graphsplit: scheduler was given up: {why}; exit status 1"
    )
    assert done.returncode == 1


def test_a_worker_that_is_killed_when_the_job_is_over_is_not_started_again(
    tmp_path, monkeypatch
) -> None:
    script = """
if role == "MS_WORKER":
    import time
    while not (folder / "over").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
line.send(Over())
line.send(Beat(60))
(folder / "over").write_text("")
told()
"""
    done = run(tmp_path, monkeypatch, script, restarts=2, workers=1)
    assert done.stderr.splitlines()[-1] == (
        "graphsplit: worker 0 was killed by SIGKILL; exit status 137"
    )
