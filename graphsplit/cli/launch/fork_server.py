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
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Sequence
from pathlib import Path

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
    "graphsplit.recovery.install",
    "graphsplit.capture.export",
    "graphsplit.torch_ext.private_symbolic",
    "graphsplit.transport.grpc.transport",
    "grpc",
)
_NOT_OF_THE_SCRIPT = (__file__, runpy.__file__, "<frozen runpy>")
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
    gc.freeze()  # what is shared with the children is not touched by their collections
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
        gc.unfreeze()
        _reseed()
        _refuse_late_variables()
        status = _run(arguments)
    finally:
        _leave(status)


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
    put = os.putenv

    def putenv(name: bytes, value: bytes) -> None:
        key = os.fsdecode(name)
        if key.startswith(_READ_AT_IMPORT) and os.environ.get(key) != os.fsdecode(value):
            from graphsplit.errors import ConfigurationError

            raise ConfigurationError(
                f"{key}={os.fsdecode(value)} comes too late: torch was imported before the script\n"
                f"  Fix: set {key} before `graphsplit run`, or start with `graphsplit run --fresh`"
            )
        put(name, value)

    os.putenv = putenv  # type: ignore[assignment]


def _run(arguments: list[str]) -> int:
    """The script or module, and what Python does when it is over."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    status = 0
    try:
        if arguments[0] == "-m":
            sys.path[0] = os.getcwd()
            sys.argv = ["-m", *arguments[2:]]
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        else:
            sys.argv = list(arguments)
            _run_file(arguments[0], module)
    except SystemExit as error:
        status = _status_of(error)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _NOT_OF_THE_SCRIPT:
            trace = trace.tb_next
        _tell(error.with_traceback(trace))
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status


def _tell(error: BaseException) -> None:
    """Print what ended the script, once for all processes; after ``gs.init()`` its hook does."""
    if sys.excepthook is not sys.__excepthook__ or not isinstance(error, Exception):
        sys.excepthook(type(error), error, error.__traceback__)
        return
    from graphsplit.reports import who_failed_alike, write_report
    from graphsplit.root_cause import FailureCause

    text = "".join(traceback.format_exception(error))
    first, last = who_failed_alike(os.environ, text), text.strip().rpartition("\n")[2]
    same = f"[graphsplit] the same error as {first.replace('_', ' ')}: {last}\n"
    sys.stderr.write(same if first else text)
    write_report(os.environ, FailureCause("exception", f"{type(error).__name__}: {error}"))


def _run_file(path: str, module: types.ModuleType) -> None:
    from importlib.machinery import SourceFileLoader

    sys.path[0] = os.path.dirname(os.path.realpath(path))
    module.__file__ = os.path.abspath(path)
    module.__loader__ = SourceFileLoader("__main__", module.__file__)
    vars(module).update(__builtins__=sys.modules["builtins"], __cached__=None, __annotations__={})
    with open(path, "rb") as file:
        code = compile(file.read(), module.__file__, "exec", dont_inherit=True)
    exec(code, vars(module))


def _status_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _leave(status: int) -> None:
    """Leave without taking the interpreter apart, which takes a second."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
