"""``graphsplit check`` with tiny scripts that do not import torch: they write what is compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from graphsplit.cli.commands import main

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(60)]

NOTING = """
import json, os, sys
role = os.environ.get("MS_ROLE", "") + os.environ.get("MS_NODE_ID", "")
request = json.load(open(os.path.join(os.path.dirname(os.environ["GS_CHECK_FILE"]),
                                      "request.json"))) if role != "MS_SCHED" else {}
with open(os.environ["GS_REPORT_FILE"].replace(".json", ".begun"), "w"):
    pass  # what gs.init() leaves
def note(number, loss):
    value = {"kind": "LOSS", "name": "", "form": "float32[]", "digest": loss, "elements": [loss]}
    noted = {"what": "STEP", "model": 1, "number": number, "values": [value]}
    with open(os.environ["GS_CHECK_FILE"], "a") as file:
        file.write(json.dumps(noted) + "\\n")
def notes(losses):
    for number, loss in enumerate(losses[:request.get("num_steps", 0)], start=1):
        note(number, loss)
"""


class Checking:
    """Starts the command in a folder of its own; what it leaves there would be found."""

    def __init__(self, folder: Path) -> None:
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self._script = folder / "script.py"

    def start(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        self._script.write_text(NOTING + script)
        before, _, after = " ".join(arguments).partition("SCRIPT")
        command = [sys.executable, "-m", "graphsplit.cli", "check", "-n", "2"]
        name = self._script.stem if "-m" in arguments else str(self._script)
        return subprocess.Popen(
            [*command, *before.split(), name, *after.split()],
            cwd=self._script.parent,
            env={**os.environ, "TMPDIR": str(self.temporary), "MS_NODE_ID": "left behind"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, script: str, *arguments: str) -> tuple[int, str, str]:
        out, err = (started := self.start(script, *arguments)).communicate()
        assert list(self.temporary.iterdir()) == []
        return started.returncode, out, err


@pytest.fixture
def checking(tmp_path: Path) -> Checking:
    return Checking(tmp_path)


def test_the_same_notes_of_all_processes_are_a_success(checking: Checking) -> None:
    status, out, _ = checking.run("if role != 'MS_SCHED': notes(['a', 'b', 'c'])", "--steps 2")
    assert status == 0
    assert "graphsplit check: the same bits. Compared 2 training steps" in out


def test_the_plain_loop_has_the_jobs_environment_without_the_job(checking: Checking) -> None:
    script = (
        "names = ('MS_ROLE', 'MS_NODE_ID', 'MS_WORKER_NUM', 'MS_SCHED_PORT', 'GS_RECOVERY',"
        " 'OMP_NUM_THREADS')\nprint([os.environ.get(name) for name in names])"
    )
    _, out, _ = checking.run(script)
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    assert f"[plain] [None, None, None, None, None, '{threads}']" in out
    assert "'fail_fast'" in out


def test_a_difference_is_looked_at_again_in_silence(checking: Checking) -> None:
    script = (
        "print('hello')\n"
        "if role != 'MS_SCHED': notes(['a', 'c' if role == 'MS_WORKER1' else 'b', 'd'])"
    )
    status, out, err = checking.run(script, "--steps 3")
    assert status == 1
    assert "not the same: first at training step 2 of Model 1" in err
    assert "loss: float32[] b in the plain loop" in err
    assert "float32[] c on worker 1" in err
    assert out.count("hello") == 4


def test_a_plain_loop_that_is_different_each_time_is_told(checking: Checking) -> None:
    script = "if role != 'MS_SCHED': notes([str(os.getpid())])"
    status, _, err = checking.run(script, "--steps 1")
    assert status == 1
    assert "the plain loop gives other bits each time it runs" in err


def test_a_script_that_notes_nothing_has_nothing_to_compare(checking: Checking) -> None:
    status, _, err = checking.run("")
    assert status == 1
    assert "built no gs.Model" in err


def test_a_script_that_fails_in_one_process_too_is_told_as_such(checking: Checking) -> None:
    status, _, err = checking.run("if role != 'MS_SCHED': sys.exit(3)")
    assert status == 1
    assert "the script fails by itself, without a cluster (exit status 3" in err


def test_a_job_that_fails_gives_all_refusals(checking: Checking) -> None:
    script = (
        "if role == 'MS_WORKER1': sys.exit(4)\n"
        "if not role and request['survey_for']:\n"
        "    path = os.environ['GS_CHECK_FILE'].replace('.jsonl', '.refusals')\n"
        "    open(path, 'w').write(json.dumps('no such worker') + '\\n')\n"
    )
    status, _, err = checking.run(script)
    assert status == 1
    assert "a cluster does not run this script to its end (exit status 4" in err
    assert "  1. no such worker" in err


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ("SCRIPT a --steps 1 b", ["a", "b"]),
        ("SCRIPT a --steps=1", ["a"]),
        ("--steps 1 SCRIPT a -- --steps 7", ["a", "--steps", "7"]),
        ("--steps 1 -- SCRIPT --steps 7 -- b", ["--steps", "7", "--", "b"]),
    ],
)
def test_steps_may_stand_on_both_sides_of_the_script(
    checking: Checking, arguments: str, seen: list[str]
) -> None:
    script = "print(sys.argv[1:])\nif role != 'MS_SCHED': notes(['a', 'b'])"
    status, out, _ = checking.run(script, arguments)
    assert status == 0
    assert "Compared 1 training step," in out
    assert f"[plain] {seen}" in out


@pytest.mark.parametrize("behind", ["", " --"])
def test_a_module_is_checked_too(checking: Checking, behind: str) -> None:
    status, out, err = checking.run(
        "notes(['1']); print(__spec__.name, sys.argv[1:])", f"--steps 1{behind}", "-m", "SCRIPT a"
    )
    assert status == 0, err
    assert "[plain] script ['a']" in out and "[worker 1] script ['a']" in out
    assert "Compared 1 training step," in out


@pytest.mark.parametrize(
    "arguments",
    [["-n", "2"], ["-n", "0", __file__], ["-n", "2", "--steps", "0", __file__],
     ["-n", "2", __file__, "--steps"], ["-n", "2", __file__, "--steps", "many"],
     ["-n", "2", "--restarts", "1", __file__]],
)  # fmt: skip
def test_a_wrong_command_line_has_status_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, ["check", *arguments]).exit_code == 2


@pytest.mark.parametrize(
    ("in_plain", "signum", "status"),
    [(False, signal.SIGINT, 130), (True, signal.SIGINT, 130), (True, signal.SIGTERM, 143)],
)
def test_a_signal_leaves_no_process_and_no_file(
    checking: Checking, in_plain: bool, signum: signal.Signals, status: int
) -> None:
    waits = "not role" if in_plain else "role"
    script = (
        "import signal\n"
        f"if {waits}:\n    print('ready', os.getpid(), flush=True)\n    signal.pause()\n"
    )
    started = checking.start(script)
    assert started.stdout is not None
    pids = [int(started.stdout.readline().split()[-1]) for _ in range(1 if in_plain else 3)]
    started.send_signal(signum)
    started.communicate()
    assert started.returncode == status
    assert list(checking.temporary.iterdir()) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_run_that_takes_too_long_is_ended(checking: Checking) -> None:
    script = "import signal\nif role == 'MS_WORKER1': signal.pause()"
    status, _, err = checking.run(script, "--timeout 1")
    assert status == 1
    assert "not over after 1 s; exit status 124" in err


def test_a_process_with_a_file_and_no_request_says_what_is_wrong(tmp_path: Path) -> None:
    from graphsplit.check.request import NoteRequest, read_request, write_request
    from graphsplit.errors import ConfigurationError

    with pytest.raises(ConfigurationError, match="GS_CHECK_FILE"):
        read_request(tmp_path / "worker_0.jsonl")
    write_request(tmp_path, NoteRequest(3, ("STEP", 2), ("loss", "")))
    assert read_request(tmp_path / "worker_0.jsonl") == NoteRequest(3, ("STEP", 2), ("loss", ""))
    (tmp_path / "request.json").write_text(json.dumps({"num_steps": "3"}))
    with pytest.raises(ConfigurationError, match="Fix: unset GS_CHECK_FILE"):
        read_request(tmp_path / "worker_0.jsonl")
