"""Starts launchers, and scripts in one process, by fork from one that has imported everything.

A job then begins at once. Launcher, scheduler and workers are processes as always; the process that
forks workers is itself forked, from one that has no thread, instead of importing torch each time.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from graphsplit.cli.launch import fork_server, script_process
from graphsplit.cli.launch.children import make_setup
from graphsplit.cli.launch.environment import ChildSpec, lone_child
from graphsplit.cli.launch.warm import WarmStart

_MOST_BYTES = 1 << 20
_ENDS_WITHIN_S = 20.0
_READ_AT_START = ("OMP_", "MKL_", "MALLOC_", "PYTHON", "LD_")


@dataclass
class _ForkedServer:
    """What ``WarmStart`` uses of ``subprocess.Popen``: it ends as soon as its line is closed."""

    line: socket.socket

    def kill(self) -> None: ...

    def wait(self) -> None:
        assert self.line.recv(64) == b"ended"


class _ForkedStart(WarmStart):
    """The launcher's process that forks was itself forked: before the launcher had begun.

    So it has none of the launcher's files, handlers and finalizers.
    """

    to_server: ClassVar[socket.socket]

    def _new_server(self, spec: ChildSpec, line: socket.socket) -> Any:
        socket.send_fds(self.to_server, [b"line"], [line.fileno()])
        return _ForkedServer(self.to_server)


def _prepare_server() -> None:
    """Fork what will fork this launcher's workers, once it is sent a line to the launcher."""
    launcher, setup = os.getpid(), make_setup()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        _ForkedStart.to_server = ours
        return
    ours.close()
    try:
        setup()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        while numbers := socket.recv_fds(theirs, 64, 1)[1]:
            with socket.socket(fileno=numbers[0]) as line:
                fork_server.serve(line, launcher)
            theirs.send(b"ended")
    finally:
        os._exit(0)


def _serve() -> None:
    """Fork a process for each request; answer with its status when it has ended."""
    line = socket.socket(fileno=int(sys.argv[1]))
    fork_server.import_all()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    from graphsplit.cli import job
    from graphsplit.cli.commands import main

    job.WarmStart = _ForkedStart  # type: ignore[misc]
    line.send(b"ready")
    while True:
        data, numbers, _, _ = socket.recv_fds(line, _MOST_BYTES, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            line.close()
            _become(json.loads(data), numbers[0], main)
        os.close(numbers[0])
        line.send(str(pid).encode())
        line.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _become(wanted: Mapping[str, Any], output: int, main: Callable[..., None]) -> NoReturn:
    status = 1
    try:
        for target in (1, 2):
            os.dup2(output, target)
        os.close(output)
        os.chdir(wanted["folder"])
        os.environ.clear()
        os.environ.update(wanted["environ"])
        command, *arguments = wanted["command"]
        if command != "graphsplit":
            fork_server._reseed()
            script_process.leave(script_process.run(wanted["command"]))
        sys.argv = ["graphsplit", *arguments]
        _prepare_server()
        main(prog_name="graphsplit")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    finally:
        os._exit(status)


class WarmLauncher:
    """The process that forks launchers, one after the other.

    Args:
        environ: Its environment.
        imports: Modules that it imports, too, in place of each worker.
    """

    def __init__(self, environ: Mapping[str, str], imports: Sequence[str] = ()) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environ = environ
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), *imports]
            self._process = subprocess.Popen(command, env=dict(environ), pass_fds=[theirs.fileno()])
        assert self._line.recv(64) == b"ready"

    def serves(self, environ: Mapping[str, str]) -> bool:
        """Whether a job of this environment may begin here: what is read at the start is equal."""
        return _fixed(environ) == _fixed(self._environ)

    def run(
        self, command: Sequence[str], environ: Mapping[str, str], output: int, timeout_s: float
    ) -> int:
        """Run ``graphsplit``, or a script in one process, to its end; its status."""
        wanted = {"command": list(command), "environ": dict(environ), "folder": os.getcwd()}
        self._line.settimeout(timeout_s)
        socket.send_fds(self._line, [json.dumps(wanted).encode()], [output])
        pid = int(self._line.recv(64))
        try:
            return int(self._line.recv(64))
        except BaseException:  # too late, or broken off: no later test may take its answer
            os.kill(pid, signal.SIGKILL)
            self._line.settimeout(_ENDS_WITHIN_S)
            self._line.recv(64)
            raise

    @property
    def pid(self) -> int:
        """The number of the process; it stays until the tests are over."""
        return self._process.pid

    def close(self) -> None:
        self._line.close()
        self._process.wait()


def _fixed(environ: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key.startswith(_READ_AT_START)}


def with_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment with what a job's processes have where nothing else is set."""
    return dict(lone_child(environ, "launcher").variables)


_running: dict[tuple[str, ...], WarmLauncher] = {}


def warm_launcher(imports: tuple[str, ...] = ()) -> WarmLauncher:
    """The one of this run of tests that has imported these modules, beside torch."""
    if imports not in _running:
        environ = with_defaults({**os.environ, "OMP_NUM_THREADS": "1"})
        _running[imports] = WarmLauncher(environ, imports)
    return _running[imports]


def running() -> set[int]:
    """The numbers of processes that stay until the tests are over."""
    return {one.pid for one in _running.values()}


def stop() -> None:
    """The tests are over."""
    while _running:
        _running.popitem()[1].close()


if __name__ == "__main__":
    _serve()
