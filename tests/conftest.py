"""Settings and fixtures of all tests: one thread, the real MNIST, and nothing left behind."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before torch is imported anywhere: the number of threads changes the order of sums.
os.environ["OMP_NUM_THREADS"] = "1"
if "torch" in sys.modules:
    sys.modules["torch"].set_num_threads(1)
# Before gRPC is: else its handlers may end what a test starts, between fork and exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

sys.path.insert(0, str(Path(__file__).parent))  # for the helpers beside this file
from collected import leave_out_what_is_there
from combinations import left_out

GOLDEN = Path(__file__).parent / "golden"
SETTLE_S = 15.0
SHARED_MEMORY = Path("/dev/shm")
PR_SET_CHILD_SUBREAPER = 36


def pytest_configure(config: pytest.Config) -> None:
    # What captures leave lies in cycles, and much of it: by default it is looked for all the time.
    gc.set_threshold(20_000, 20, 20)
    # pytest listens to every logger that passes nothing on. Each capture would then write torch's
    # own trace of what it does, with the stack of each line, which nobody reads.
    logging.getLogger("torch.__trace").addHandler = lambda handler: None
    # Orphans of a test's processes then become our children, where the check below sees them.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


@pytest.fixture(autouse=True, scope="module")
def _only_what_is_new_is_collected() -> None:
    """Each module imports and captures more, which stays."""
    leave_out_what_is_there()


@pytest.hookimpl(trylast=True)  # what -k and -m leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out combinations of parameters that show nothing new."""
    if out := left_out(items):
        config.hook.pytest_deselected(items=sorted(out, key=lambda item: item.nodeid))
        items[:] = [item for item in items if item not in out]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden/ from what is found"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a file of tests/golden/, or rewrite it; a person reviews the change."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"{text}\n")
        assert f"{text}\n" == path.read_text(), (
            f"{path} differs; if the change is meant: pytest --update-golden, then review the diff"
        )

    return compare


@pytest.fixture(scope="session")
def mnist_path() -> Path:
    """The folder with the real MNIST; without it the test is left out, and says so."""
    path = os.environ.get("DATA_PATH")
    if not path:
        pytest.skip("left out: needs the real MNIST; set DATA_PATH to the folder with its files")
    return Path(path)


@pytest.fixture(autouse=True)
def _distributions_check_their_arguments() -> Iterator[None]:
    """Whoever compiles, ``torch.cond`` included, switches that off for the whole process."""
    yield
    if (distributions := sys.modules.get("torch.distributions")) is not None:
        distributions.Distribution.set_default_validate_args(__debug__)


@pytest.fixture(autouse=True)
def _log_is_as_it_was() -> Iterator[None]:
    """A scheduler or worker in this process sets the log up, and later tests would be told more."""
    log = logging.getLogger("graphsplit")
    handlers, level, propagate = list(log.handlers), log.level, log.propagate
    yield
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves processes, non-daemon threads or shared memory behind."""
    processes, threads, segments = _children(), set(threading.enumerate()), _segments()
    yield
    problems = [
        *_settled("process", lambda: [_describe(pid) for pid in _children() - processes]),
        *_settled("thread", lambda: _new_threads(threads)),
        *_settled("shared memory", lambda: _unowned(_segments() - segments)),
    ]
    for pid in _children() - processes:
        os.kill(pid, signal.SIGKILL)
    if problems:
        pytest.fail("the test left behind:\n  " + "\n  ".join(problems), pytrace=False)


def _settled(kind: str, look: Callable[[], list[str]]) -> list[str]:
    """Look again for a moment: what is about to end is not left behind."""
    deadline = time.monotonic() + SETTLE_S
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [f"{kind}: {what}" for what in found]


def _children() -> set[int]:
    pids: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            pids.update(pid for pid in map(int, path.read_text().split()) if _is_alive(pid))
        except OSError:  # the thread has just ended
            continue
    return pids - _kept()


def _kept() -> set[int]:
    """The process that starts the jobs of all tests."""
    jobs = sys.modules.get("system.warm_jobs")
    return set() if jobs is None else jobs.running()


def pytest_unconfigure() -> None:
    if (jobs := sys.modules.get("system.warm_jobs")) is not None:
        jobs.stop()


def _is_alive(pid: int) -> bool:
    """False for a zombie, and for the helper that Python keeps for itself."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    # The state follows the name, which stands in parentheses and may contain some.
    is_zombie = stat.rpartition(")")[2].split()[0] == "Z"
    return not is_zombie and b"multiprocessing.resource_tracker" not in command


def _describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        command = b""
    return f"{pid}: {command.replace(bytes(1), b' ').decode(errors='replace').strip()}"


def _new_threads(before: set[threading.Thread]) -> list[str]:
    return [
        thread.name
        for thread in threading.enumerate()
        if thread not in before and not thread.daemon
    ]


def _segments() -> set[str]:
    """All but the semaphores of ``multiprocessing``: their own tracker takes them away, later.

    They do not tell whose they are: a test in another process may have been ended meanwhile.
    """
    names = os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else []
    return {name for name in names if not name.startswith("sem.mp-")}


def _unowned(names: set[str]) -> list[str]:
    """Leave out what a process that is not ours has mapped: tests may run side by side."""
    if not names:
        return []
    mapped: set[int] = set()  # inodes: a semaphore is mapped under the name that it had at first
    for path in Path("/proc").glob("[0-9]*/maps"):
        if path.parent.name == str(os.getpid()):
            continue
        try:
            lines = [line.split() for line in path.read_text().splitlines() if "/dev/shm/" in line]
        except OSError:
            continue
        mapped.update(int(inode) for _, _, _, _, inode, *_ in lines)
    return sorted(name for name in names & _segments() if _inode(name) not in mapped | {None})


def _inode(name: str) -> int | None:
    """None if it has gone meanwhile."""
    try:
        return (SHARED_MEMORY / name).stat().st_ino
    except OSError:
        return None
