"""``graphsplit run`` with tiny scripts that do not import torch."""

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

Process = subprocess.Popen[str]
Launch = Callable[..., Process]
NAME = 'import os; name = os.environ["MS_ROLE"] + os.environ.get("MS_NODE_ID", "")\n'
TAKES_PART = """import os
with open(os.environ["GS_REPORT_FILE"].replace(".json", ".begun"), "w"):
    pass  # what gs.init() leaves
"""
OUTSIDE = 'os.unlink(os.environ["GS_REPORT_FILE"].replace(".json", ".begun"))\n'
WAIT = "import signal\nprint('ready', os.getpid(), flush=True)\nsignal.pause()\n"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[Process] = []

    def start(script: str, *arguments: str, options: tuple[str, ...] = ("-n", "2")) -> Process:
        path = tmp_path / "script.py"
        path.write_text(NAME + TAKES_PART + script)
        command = [sys.executable, "-m", "graphsplit.cli", "run", *options, str(path), *arguments]
        launcher = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(launcher)
        return launcher

    yield start
    for launcher in started:
        if launcher.poll() is None:
            launcher.kill()
        launcher.communicate()


def read_pids(launcher: Process, *, count: int) -> list[int]:
    """Wait until ``count`` processes have said that they are ready."""
    assert launcher.stdout is not None
    pids: list[int] = []
    while len(pids) < count:
        line = launcher.stdout.readline()
        assert line, "the launcher ended too early"
        if " ready " in line:
            pids.append(int(line.split()[-1]))
    return pids


def all_are_there(folder: Path, count: int) -> str:
    """What a script does to wait for all processes; each leaves a file with its pid."""
    return (
        f"file = open({str(folder)!r} + '/' + name + '~', 'w')\n"
        f"file.write(str(os.getpid())); file.close()\n"
        f"os.rename(file.name, file.name[:-1])\n"
        f"def there(): return [one for one in os.listdir({str(folder)!r}) if one[:3] == 'MS_']\n"
        f"while len([one for one in there() if one[-1] != '~']) < {count}: os.sched_yield()\n"
    )


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_every_line_is_prefixed_and_the_script_gets_its_arguments(launch: Launch) -> None:
    script = "import sys; print(name, sys.argv[1:])\nprint('note', file=sys.stderr)"
    launcher = launch(script, "-n", "7", "--epochs=3")
    out, err = launcher.communicate()
    assert launcher.returncode == 0
    assert sorted(out.splitlines()) == [
        "[scheduler] MS_SCHED ['-n', '7', '--epochs=3']",
        "[worker 0] MS_WORKER0 ['-n', '7', '--epochs=3']",
        "[worker 1] MS_WORKER1 ['-n', '7', '--epochs=3']",
    ]
    said, *notes = err.splitlines()
    assert said == "graphsplit: starting 2 workers"
    assert sorted(notes) == ["[scheduler] note", "[worker 0] note", "[worker 1] note"]


def test_the_status_is_that_of_the_first_failure(launch: Launch, tmp_path: Path) -> None:
    # Worker 1 fails as soon as the launcher has collected worker 0.
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = (
        f"import sys; fifo = {str(fifo)!r}\n"
        "if name == 'MS_WORKER0':\n    open(fifo, 'w').write(str(os.getpid())); sys.exit(7)\n"
        "if name == 'MS_WORKER1':\n    first = '/proc/' + open(fifo).read()\n"
        "    while os.path.exists(first): pass\n    sys.exit(3)\n"
    )
    launcher = launch(script)
    _, err = launcher.communicate()
    assert launcher.returncode == 7
    assert err.splitlines()[-1] == "graphsplit: worker 0 ended with status 7; exit status 7"


def test_a_killed_worker_gives_128_plus_the_signal(launch: Launch) -> None:
    launcher = launch("if name == 'MS_WORKER1': os.kill(os.getpid(), 9)")
    _, err = launcher.communicate()
    assert launcher.returncode == 137
    assert err.splitlines()[-1] == "graphsplit: worker 1 was killed by SIGKILL; exit status 137"


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_to_the_launcher_ends_all(
    launch: Launch, signum: signal.Signals, status: int
) -> None:
    launcher = launch(WAIT)
    pids = read_pids(launcher, count=3)
    launcher.send_signal(signum)
    out, _ = launcher.communicate()
    assert launcher.returncode == status
    assert not any(is_running(pid) for pid in pids), out


def test_processes_may_tidy_up_after_an_interrupt(launch: Launch) -> None:
    # The interrupt may come as soon as the line is read: it is caught from before the print.
    script = (
        "import signal\ntry:\n    print('ready', os.getpid(), flush=True)\n    signal.pause()\n"
        "except KeyboardInterrupt:\n    print('tidy', flush=True)\n"
    )
    launcher = launch(script)
    read_pids(launcher, count=3)
    launcher.send_signal(signal.SIGINT)
    out, _ = launcher.communicate()
    assert out.count("tidy") == 3
    assert launcher.returncode == 130


def test_processes_that_have_yet_to_join_end_without_a_word(launch: Launch) -> None:
    """Those that import torch would print its frames."""
    launcher = launch(OUTSIDE + WAIT)
    read_pids(launcher, count=3)
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate()
    assert launcher.returncode == 130
    assert err.splitlines() == [
        "graphsplit: starting 2 workers",
        "graphsplit: interrupted by SIGINT; exit status 130",
    ]


def test_who_has_yet_to_join_is_not_waited_for_when_the_job_has_failed(
    launch: Launch, tmp_path: Path
) -> None:
    script = (
        f"import signal, sys\nif name == 'MS_WORKER1': {OUTSIDE}{all_are_there(tmp_path, 4)}"
        "if name == 'MS_WORKER0': sys.exit(7)\n"
        "if name == 'MS_WORKER1': signal.pause()\n"
        f"first = '/proc/' + open({str(tmp_path)!r} + '/MS_WORKER1').read()\n"
        "while os.path.exists(first): os.sched_yield()\n"
        "print('it has ended first')\n"  # a process that has joined has a grace
    )
    launcher = launch(script, options=("-n", "3"))
    out, err = launcher.communicate()
    assert launcher.returncode == 7
    assert "[worker 2] it has ended first" in out.splitlines(), err


@pytest.mark.parametrize("what", ["raise ValueError('no data')", "import sys; sys.exit('no data')"])
def test_what_every_process_fails_with_is_told_whole_once(
    launch: Launch, tmp_path: Path, what: str
) -> None:
    launcher = launch(f"{all_are_there(tmp_path, 3)}{what}\n")
    _, err = launcher.communicate()
    lines = err.splitlines()
    assert launcher.returncode == 1
    assert sum(line.endswith("no data") for line in lines) == 1, err
    assert lines[-1].endswith(": no data; exit status 1")


def test_repeated_interrupts_end_even_processes_that_ignore_them(launch: Launch) -> None:
    script = "import signal\nsignal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)\n"
    again = "print('ready', os.getpid(), flush=True)\nwhile True: signal.pause()\n"
    launcher = launch(script + again)
    pids = read_pids(launcher, count=3)
    while launcher.poll() is None:
        launcher.send_signal(signal.SIGINT)
        try:
            launcher.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    assert launcher.returncode == 130
    assert not any(is_running(pid) for pid in pids)


def test_a_killed_launcher_leaves_no_orphan(launch: Launch) -> None:
    launcher = launch(WAIT)
    pids = read_pids(launcher, count=3)
    descriptors = [os.pidfd_open(pid) for pid in pids]
    launcher.kill()
    launcher.wait()
    for pid, descriptor in zip(pids, descriptors, strict=True):
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        assert poller.poll(5000), f"{pid} outlived the launcher"
        os.close(descriptor)


def test_the_children_of_a_process_end_with_it(launch: Launch) -> None:
    script = (
        "import subprocess, sys\nif name == 'MS_WORKER0':\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "    print('ready', child.pid, flush=True)\n"
    )
    launcher = launch(script)
    (pid,) = read_pids(launcher, count=1)
    launcher.communicate()
    assert launcher.returncode == 0
    assert not is_running(pid)


def test_logs_hold_each_process_apart(launch: Launch, tmp_path: Path) -> None:
    logs, prey = tmp_path / "logs", tmp_path / "prey"
    logs.mkdir()
    prey.write_text("mine")
    (logs / "scheduler.log").symlink_to(prey)  # planted: to be written through
    os.mkfifo(logs / "worker_0.log")  # and to be waited for
    launcher = launch("print(name)", options=("-n", "1", "--log-dir", str(logs)))
    launcher.communicate(timeout=60)
    assert (logs / "scheduler.log").read_text() == "MS_SCHED\n"
    assert (logs / "worker_0.log").read_text() == "MS_WORKER0\n"
    assert prey.read_text() == "mine"


def test_a_log_that_cannot_be_written_ends_and_the_job_goes_on(tmp_path: Path) -> None:
    script, logs = tmp_path / "script.py", tmp_path / "logs"
    script.write_text(TAKES_PART + "print('x' * 5000)\nprint('the end')")
    run = f"{sys.executable} -m graphsplit.cli run -n 1 --log-dir {logs} {script}"
    limited = ["bash", "-c", f"ulimit -f 1; exec {run}"]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done
    assert "[worker 0] the end" in done.stdout
    assert f"cannot write {logs}/worker_0.log: File too large; the job goes on" in done.stderr
    assert done.stderr.count("worker_0.log") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
def test_output_that_cannot_be_written_ends_the_job_with_the_way_out(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TAKES_PART + "print('x')\n" + WAIT)
    command = [sys.executable, "-m", "graphsplit.cli", "run", "-n", "1", str(script)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1, done
    assert "what the job prints cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_script_is_named(launch: Launch) -> None:
    launcher = launch("", options=("-n", "1", "absent.py"))
    _, err = launcher.communicate()
    assert launcher.returncode == 2
    assert "absent.py" in err


def test_a_module_runs_as_with_python_m(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(
        "import sys\nprint(__name__, __package__, sys.argv[1:])"
    )
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "graphsplit", "run", "-n", "1", "-m", "package.train", "-x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "[worker 0] __main__ package ['-x']" in done.stdout, done


@pytest.mark.parametrize(
    "uses", ["import graphsplit as gs", "import os, graphsplit; os.environ", ""]
)
def test_a_script_that_never_calls_init_fails(tmp_path: Path, uses: str) -> None:
    path = tmp_path / "alone.py"
    path.write_text(f"{uses}\nprint('trains')")
    command = [sys.executable, "-m", "graphsplit", "run", "-n", "2", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "ended without gs.init()" in done.stderr.splitlines()[-1], done
    if uses == "import graphsplit as gs":
        assert "[scheduler] trains" not in done.stdout


def test_a_scheduler_s_process_started_by_hand_does_not_train_before_init(tmp_path: Path) -> None:
    path = tmp_path / "alone.py"
    path.write_text(
        "import torch, graphsplit\n"
        "optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)\n"
        "optimizer.step()\n"
    )
    run = [sys.executable, str(path)]
    own = {**os.environ, "MS_ROLE": "MS_SCHED"}
    done = subprocess.run(run, env=own, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "MS_ROLE=MS_SCHED" in done.stderr and "Fix: call gs.init() first" in done.stderr


def test_an_error_before_init_is_told_whole_once(tmp_path: Path) -> None:
    path = tmp_path / "early.py"
    path.write_text("import graphsplit as gs\n\nopen('/no/such/file')\ngs.init()\n")
    command = [sys.executable, "-m", "graphsplit", "run", "-n", "2", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    error = "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'"
    lines = done.stderr.splitlines()
    assert sum("Traceback (most recent call last)" in line for line in lines) == 1, done
    assert sum(line.endswith('early.py", line 3, in <module>') for line in lines) == 1
    assert sum(error in line for line in lines) == 2 and error in lines[-1]


def test_a_model_before_init_shows_the_users_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "early.py"
    text = "import torch\nimport graphsplit as gs\nnet = torch.nn.Linear(2, 2)\ngs.Model(net)\n"
    path.write_text(text)
    command = [sys.executable, "-m", "graphsplit", "run", "-n", "2", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count("Fix: call gs.init() first in the script, or unset MS_ROLE.") == 1
    assert [line.split("] ")[-1] for line in done.stderr.splitlines() if 'File "' in line] == [
        f'  File "{path}", line 4, in <module>'
    ]
    assert "the same error as worker" not in done.stderr


def test_a_package_may_import_graphsplit_when_it_is_run(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import graphsplit")
    (tmp_path / "package" / "train.py").write_text(
        "import torch\ntorch.nn.Linear(2, 2).place('MS_WORKER', 0)"
    )
    command = [sys.executable, "-m", "package.train"]
    subprocess.run(command, cwd=tmp_path, timeout=60, check=True)


def test_a_shell_completes_commands() -> None:
    code = "from graphsplit.cli.main import main; main(prog_name='graphsplit')"
    asked = {"COMP_WORDS": "graphsplit stat", "COMP_CWORD": "1"}
    environ = {**os.environ, **asked, "_GRAPHSPLIT_COMPLETE": "bash_complete"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "plain,status\n", done


def test_the_launcher_does_not_import_torch() -> None:
    # The command is recognised by its name: a script that imports graphsplit needs torch anyway.
    code = (
        "import sys; sys.argv[0] = '/usr/bin/graphsplit'; import graphsplit.cli.commands; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_interrupt_of_the_launchers_imports_is_one_line() -> None:
    code = (
        "import os, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'click': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "sys.argv[0] = 'graphsplit'\n"
        "from graphsplit.cli.main import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, "run", "-n", "2", __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    line = "graphsplit: interrupted by SIGINT; exit status 130\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", line)


def test_a_killed_worker_is_started_again_under_wait_rejoin(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GS_RECOVERY", "wait_rejoin")
    mark = tmp_path / "mark"
    script = (
        "import pathlib, signal, sys, time\n"
        "mark = pathlib.Path(sys.argv[1])\n"
        "done = mark.with_suffix('.done')\n"
        "if name == 'MS_WORKER1':\n"
        "    if not mark.exists():\n"
        "        mark.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    done.touch()\n"
        "while name.startswith('MS_SCHED') and not done.exists():\n"
        "    time.sleep(0.01)  # a job without its scheduler starts nothing again\n"
        "print('done')\n"
    )
    launcher = launch(script, str(mark), options=("-n", "2", "--restarts", "1"))
    out, err = launcher.communicate()
    assert launcher.returncode == 0
    assert "[worker 1] done" in out.splitlines()
    assert "worker 1 was killed by SIGKILL; starting it again (0 restarts left)" in err


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_launcher_keeps_nothing_open_of_processes_that_are_gone(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GS_RECOVERY", "wait_rejoin")
    script = (
        "import pathlib, signal, sys\n"
        "mark = pathlib.Path(sys.argv[1])\n"
        "if name == 'MS_WORKER0':\n"
        "    lives = len(mark.read_text()) if mark.exists() else 0\n"
        "    mark.write_text('x' * (lives + 1))\n"
        "    print(len(os.listdir(f'/proc/{os.getppid()}/fd')), flush=True)\n"
        "    if lives < 6:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "while not mark.exists() or len(mark.read_text()) < 7:\n"  # the scheduler stays
        "    os.sched_yield()\n"
    )
    options = ("-n", "1", "--restarts", "6")
    out, err = launch(script, str(tmp_path / "mark"), options=options).communicate()
    lines = [line.split() for line in out.splitlines() if line.startswith("[worker 0]")]
    counts = [int(line[-1]) for line in lines]
    assert len(counts) == 7, err
    # Those of the last life may still be there, not those of all.
    assert counts[-1] <= counts[0] + 4, counts


def test_a_job_that_asks_for_it_is_started_again_under_restart(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GS_RECOVERY", "restart")
    mark = tmp_path / "mark"
    script = (
        "import pathlib, sys\n"
        "mark = pathlib.Path(sys.argv[1])\n"
        "ran = mark.with_suffix('.ran')\n"
        "if name == 'MS_SCHED' and not mark.exists():\n"
        "    while not ran.exists(): os.sched_yield()\n"
        "    mark.touch()\n"
        "    sys.exit(75)\n"
        "print('done', flush=True)\n"
        "ran.touch()\n"
    )
    launcher = launch(script, str(mark), options=("-n", "1", "--restarts", "2"))
    out, err = launcher.communicate()
    assert launcher.returncode == 0
    assert out.splitlines().count("[worker 0] done") == 2
    assert "starting the job again; 1 more tries after this" in err


def test_restarts_without_recovery_are_refused(launch: Launch) -> None:
    launcher = launch("", options=("-n", "1", "--restarts", "1"))
    _, err = launcher.communicate()
    assert launcher.returncode == 2
    assert "GS_RECOVERY=wait_rejoin" in err
