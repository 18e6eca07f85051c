"""The actor of a worker: starts the agent on its node, and carries what goes there and comes back.

Ray runs it on a node of the cluster. The worker is no process of Ray's: it has a main thread, and
signal handlers, of its own.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from typing import Any

_READ_BYTES = 1 << 16
_AGENT = "graphsplit.cli.ssh.agent"


class AgentActor:
    """Starts an agent; lives until that has ended.

    Args:
        call: The function to call, for a worker that runs no script; empty for one that does.
    """

    def __init__(self, call: bytes) -> None:
        import ray

        self._files: list[int] = []
        if call:
            self._files = [os.memfd_create("graphsplit-call") for _ in range(2)]
            with open(self._files[0], "wb", closefd=False) as file:
                file.write(call)
        # Ray sets the number of threads by the cores that it gives; the bits depend on it.
        environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        self._agent = subprocess.Popen(
            [sys.executable, "-m", _AGENT, ray.util.get_node_ip_address(), *map(str, self._files)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=self._files,
            start_new_session=True,  # what is for Ray's processes is not for this one
        )
        self._selector = selectors.DefaultSelector()
        for stream in (self._agent.stdout, self._agent.stderr):
            assert stream is not None
            self._selector.register(stream, selectors.EVENT_READ)

    def write(self, data: bytes) -> None:
        """Hand on what the launcher says; nothing means that it says no more."""
        assert self._agent.stdin is not None
        try:
            if data:
                self._agent.stdin.write(data)
                self._agent.stdin.flush()
            else:
                self._agent.stdin.close()
        except OSError:
            pass  # it has ended, and who reads finds out

    def read(self) -> tuple[bytes, bytes]:
        """Wait for what the agent says, to the launcher and besides; nothing when it has ended."""
        said = {self._agent.stdout: b"", self._agent.stderr: b""}
        while self._selector.get_map() and not any(said.values()):
            for key, _ in self._selector.select():
                stream: Any = key.fileobj
                said[stream] = os.read(stream.fileno(), _READ_BYTES)
                if not said[stream]:
                    self._selector.unregister(stream)
        return said[self._agent.stdout], said[self._agent.stderr]

    def result(self) -> bytes:
        """All that the worker has left of the call."""
        with open(self._files[1], "rb", closefd=False) as file:
            file.seek(0)
            return file.read()
