"""A forked worker is what a fresh process would be, and nothing is forked beside a thread."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphsplit.cli.launch import fork_server
from graphsplit.cli.launch.children import start_child
from graphsplit.cli.launch.environment import ChildSpec
from graphsplit.cli.launch.warm import WarmStart, may_fork

pytestmark = pytest.mark.real_processes

TELLS = """from __future__ import annotations
import atexit, random, sys
import helper
import torch, graphsplit
print(__name__, __file__, __spec__, __package__, __cached__, sorted(globals())[:12])
print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals(), sys.stdin.read())
print(torch.get_num_threads(), sys.flags, __doc__)
print("random", random.random(), torch.rand(2), file=sys.stderr)
def annotated(value: not_there): pass
atexit.register(print, "at exit")
if sys.argv[1] == "raises":
    raise ValueError("no")
sys.exit({"seven": 7, "text": "a reason", "none": None}[sys.argv[1]])
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(TELLS)
    path.with_name("helper.py").write_text("")
    return path


@pytest.fixture(scope="module")
def warm(script: Path) -> Iterator[WarmStart]:
    """It has started one already, so its server is there before a test begins."""
    start = WarmStart(script, print)
    ended(start.start(spec(), [sys.executable, str(script), "none"], ()))
    yield start
    start.close()


def spec(rank: int = 0, **variables: str) -> ChildSpec:
    return ChildSpec(f"worker {rank}", {**os.environ, "PYTHONUNBUFFERED": "1", **variables})


def ended(child) -> tuple[int, str, str]:
    with child.stdout, child.stderr:
        out, err = child.stdout.read().decode(), child.stderr.read().decode()
    return child.wait(), out, err


def test_a_forked_script_sees_what_a_fresh_one_sees(warm: WarmStart, script: Path):
    commands = [[sys.executable, str(script), how] for how in ("seven", "text", "none", "raises")]
    fresh = [start_child(spec(), command, ()) for command in commands]  # they import side by side
    for command, child in zip(commands, [ended(child) for child in fresh], strict=True):
        assert_alike(warm, command, child)


def assert_alike(warm: WarmStart, command: list[str], fresh: tuple[int, str, str]) -> None:
    status, out, err = ended(warm.start(spec(), command, ()))
    fresh_status, fresh_out, fresh_err = fresh
    assert (status, out) == (fresh_status, fresh_out)
    assert err.splitlines()[0] != fresh_err.splitlines()[0]  # Python's own generator
    assert err.splitlines()[1:] == fresh_err.splitlines()[1:]
    _, _, another = ended(warm.start(spec(), command, ()))
    assert another.splitlines()[0] != err.splitlines()[0]


def test_a_forked_process_is_the_launchers_child_and_torch_has_read_its_variables(
    warm: WarmStart, script: Path
):
    child = warm.start(spec(), [sys.executable, str(script), "none"], ())
    stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    assert (int(stat[1]), int(stat[2])) == (os.getpid(), child.pid)
    with child.stdout, child.stderr:
        child.stdout.read()
        while child.collect_if_ended() is None:
            pass
    assert child.returncode == 0

    late = script.with_name("late.py")
    late.write_text(
        "import os, torch, graphsplit\n"
        "kept = dict(os.environ); os.environ.clear(); os.environ.update(kept)  # as libraries do\n"
        "os.environ['OMP_NUM_THREADS'] = '7'"
    )
    status, _, err = ended(warm.start(spec(), [sys.executable, str(late)], ()))
    assert status == 1 and "OMP_NUM_THREADS=7 comes too late" in err and "--fresh" in err


def test_a_process_of_a_job_that_recovers_looks_through_its_own_objects_alone(
    warm: WarmStart, script: Path
):
    own = script.with_name("own.py")
    own.write_text(
        "import gc, graphsplit, torch\n"
        "net = torch.nn.Linear(2, 2)\n"
        "found = gc.get_objects()\n"
        "print(len(found) < gc.get_freeze_count(), any(one is net for one in found))"
    )
    for policy, expected in (("restart", "True True\n"), ("fail_fast", "False True\n")):
        child = warm.start(spec(GS_RECOVERY=policy), [sys.executable, str(own)], ())
        assert ended(child)[:2] == (0, expected)


def test_nothing_is_forked_where_a_thread_is_there(script: Path, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    said: list[str] = []
    start = WarmStart(script, said.append)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    (tmp_path / "one.py").write_text("print(1)")
    child = start.start(spec(PYTHONPATH=path), [sys.executable, str(tmp_path / "one.py")], ())
    try:
        assert isinstance(child, subprocess.Popen) and ended(child)[:2] == (0, "1\n")
        assert len(said) == 1 and "each worker imports torch for itself" in said[0]
        assert "starts 1 threads" in said[0]
    finally:
        start.close()


def test_a_thread_that_comes_later_ends_forking(monkeypatch: pytest.MonkeyPatch):
    forks: list[int] = []
    monkeypatch.setattr(os, "fork", lambda: forks.append(1) or os.getpid())
    monkeypatch.setattr(os, "waitpid", lambda pid, options: (pid, 0))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    threads = iter([1, 1, 2])  # as it says «ready», and at each of two requests
    monkeypatch.setattr(os, "listdir", lambda path: ["task"] * next(threads))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.send(b"{}")
        ours.send(b"{}")
        fork_server.serve(theirs, os.getpid())
        assert ours.recv(256) == b"ready"
        assert ours.recv(256) == b"it has started 1 threads"
    assert len(forks) == 1


@pytest.mark.parametrize(
    ("text", "may"),
    [
        ("import graphsplit as gs  # alone without MS_ROLE", True),
        ("import torch, graphsplit as gs", True),
        ("from graphsplit import Model", True),
        ("import torch", False),
        ("import os, graphsplit\nos.environ['OMP_NUM_THREADS'] = '2'", False),
        ("import graphsplit, dotenv", False),
    ],
)
def test_what_a_script_says_decides_whether_it_is_forked(tmp_path: Path, text: str, may: bool):
    path = tmp_path / "script.py"
    path.write_text(text)
    assert may_fork(path) is may
