"""A process that imports torch and graphsplit once, and becomes a worker as often as it is asked.

Importing takes each process seconds, a fork milliseconds. It is a program of its own, so that the
launcher imports nothing. A child is what a fresh ``python train.py`` would be: environment,
arguments, streams, ``__main__``, signals, random generators, and the same end. It is forked twice,
so that it becomes the launcher's own child. No thread is there when it is forked: that is checked.

The one difference, variables that torch reads when it is imported, is an error where a script sets
them later; where the script's own text speaks of its environment, nothing is forked.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from graphsplit.cli.launch import script_process
from graphsplit.cli.launch.script_process import leave, run

_PR_SET_PDEATHSIG = 1
_REPARENTED_WITHIN_S = 10.0
_MOST_BYTES = 1 << 20
_READ_AT_IMPORT = ("OMP_", "MKL_", "GOMP_", "ATEN_", "DNNL_", "ONEDNN_")
_OWN_STATUS = 70  # EX_SOFTWARE
_NEEDED = (
    "torch",
    "torch.export",
    "graphsplit.api",
    "graphsplit.train.model",
    "graphsplit.recovery.script",
    "graphsplit.capture.export",
    "graphsplit.torch_ext.exporting",
    "graphsplit.transport.grpc.transport",
    "graphsplit.transport.shm.transport",
    "grpc",
)
# Importing them starts no thread, opens nothing, and looks at no variable of a job's.
_STAND_A_FORK = frozenset(("numpy", "pandas", "scipy", "sklearn", "torch", "torchvision", "PIL"))


def main() -> None:
    """Serve the launcher, on the socket whose number is the first argument."""
    line = socket.socket(fileno=int(sys.argv[1]))
    launcher, script = int(sys.argv[2]), sys.argv[3]
    sys.path[0] = (script and os.path.dirname(os.path.realpath(script))) or os.getcwd()
    import_all()
    _import_known(script)
    serve(line, launcher)


def serve(line: socket.socket, launcher: int) -> None:
    """Fork for the launcher whenever it asks, until it has closed the line."""
    line.send(_told_of_threads("importing it starts") or b"ready")
    # What is shared with the children is not touched by their collections.
    if _recovers():
        importlib.import_module("graphsplit.guards.classes").freeze_all()
    gc.freeze()
    while True:
        data, numbers, _, _ = socket.recv_fds(line, _MOST_BYTES, 2)
        if not data:
            return
        if why := _told_of_threads("it has started"):  # by itself, since it was asked last
            line.send(why)
            return
        pid = os.fork()
        if pid == 0:
            # The one in between ends, and the launcher adopts its child.
            if os.fork() == 0:
                _become(line, launcher, json.loads(data), numbers)
            os._exit(0)
        os.waitpid(pid, 0)
        for number in numbers:
            os.close(number)


def _told_of_threads(how: str) -> bytes:
    """Why nothing can be forked; empty where this process has one thread."""
    others = len(os.listdir("/proc/self/task")) - 1
    return f"{how} {others} threads".encode() if others else b""


def _recovers() -> bool:
    """Whether workers may be lost: then what was imported is not looked through for cycles."""
    is_enabled = os.environ.get("MS_ENABLE_RECOVERY")
    return os.environ.get("GS_RECOVERY", is_enabled or "fail_fast") != "fail_fast"


def import_all() -> None:
    """Import what every worker needs sooner or later, and let torch set itself up for captures."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # By name: the launcher's own modules import none of them.
    for name in _NEEDED:
        importlib.import_module(name)
    torch = sys.modules["torch"]
    torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(2, 2),), strict=False)


def _import_known(script: str) -> None:
    """Import what the script will import first, of packages that are known to stand a fork."""
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        for name in known_imports(Path(script).read_text()):
            with contextlib.suppress(Exception):  # the script will meet it, and say so
                importlib.import_module(name)


def known_imports(text: str) -> list[str]:
    """The modules of known packages that a script's first level imports, in order."""
    found: dict[str, None] = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Import):
            found |= dict.fromkeys(alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
            found[statement.module] = None
    return [name for name in found if name.partition(".")[0] in _STAND_A_FORK]


def _become(
    line: socket.socket, launcher: int, wanted: dict[str, object], numbers: Sequence[int]
) -> None:
    """Run the script. Never returns: the frames below are another process's."""
    status = _OWN_STATUS
    try:
        _be_adopted(launcher)
        line.send(str(os.getpid()).encode())
        line.close()
        for number, target in zip(numbers, (1, 2), strict=True):
            os.dup2(number, target)
            os.close(number)
        variables, arguments = wanted["environ"], wanted["arguments"]
        assert isinstance(variables, dict) and isinstance(arguments, list)
        os.environ.clear()
        os.environ.update(variables)
        # A worker of a loop that begins anew starts this program in its own place.
        sys.orig_argv = [sys.executable, script_process.__file__, *arguments]
        if not _recovers():
            gc.unfreeze()
        _reseed()
        _refuse_late_variables()
        status = run(arguments)
    finally:
        leave(status)


def _be_adopted(launcher: int) -> None:
    """Wait until the launcher is the parent, and die with it."""
    end_s = time.monotonic() + _REPARENTED_WITHIN_S
    while os.getppid() != launcher:
        if time.monotonic() > end_s:
            os._exit(_OWN_STATUS)
        time.sleep(0.0005)
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(_OWN_STATUS)


def _reseed() -> None:
    """Python's own generator reseeds itself; torch's and numpy's would be the same in all."""
    importlib.import_module("torch").default_generator.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(None)


def _refuse_late_variables() -> None:
    put, known = os.putenv, dict(os.environ)  # libraries clear it, and put back what was there

    def putenv(name: bytes, value: bytes) -> None:
        key = os.fsdecode(name)
        if key.startswith(_READ_AT_IMPORT) and known.get(key) != os.fsdecode(value):
            from graphsplit.errors import ConfigurationError

            raise ConfigurationError(
                f"{key}={os.fsdecode(value)} comes too late: torch was imported before the script\n"
                f"  Fix: set {key} before `graphsplit run`, or start with `graphsplit run --fresh`"
            )
        put(name, value)

    os.putenv = putenv  # type: ignore[assignment]


if __name__ == "__main__":
    main()
