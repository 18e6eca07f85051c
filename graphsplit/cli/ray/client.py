"""The way to an agent through its actor. Threads carry what is said, as Ray's calls wait."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any

_READ_BYTES = 1 << 16


class RayClient:
    """Three pipes to the agent of an actor.

    Args:
        ray: The library.
        find: Gives a handle of an ``AgentActor``; may wait for it.
        where: The actor, for people.
    """

    what = "actor"

    def __init__(self, ray: Any, find: Callable[[], Any], where: str) -> None:
        self._ray, self._find, self._where = ray, find, where
        self._actor: Any = None
        (orders, to), (out, answers), (err, words) = (os.pipe() for _ in range(3))
        self.stdin: IO[bytes] | None = os.fdopen(to, "wb", 0)
        self.stdout: IO[bytes] | None = os.fdopen(out, "rb", 0)
        self.stderr: IO[bytes] | None = os.fdopen(err, "rb", 0)
        self._ended = threading.Event()
        self._begin(self._carry, orders, answers, words)

    def _begin(self, carry: Callable[..., None], *files: int) -> None:
        threading.Thread(target=carry, args=files, name="graphsplit-ray", daemon=True).start()

    def kill(self) -> None:
        """See ``AgentClient``. Who has ended by itself may still be asked."""
        if not self._ended.is_set() and self._actor is not None:
            with contextlib.suppress(Exception):  # Ray may have gone by itself
                self._ray.kill(self._actor)

    def wait(self, timeout: float | None = None) -> int:
        """See ``AgentClient``."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("ray", timeout or 0.0)
        return 1

    def why_not(self, status: int, said: Sequence[str]) -> str:
        """See ``AgentClient``."""
        last = next((line.strip() for line in reversed(said) if line.strip()), "no word")
        return (
            f"{self._where}: its agent did not start ({last})\n"
            f"  Fix: install the same graphsplit on every node of the cluster"
        )

    def _carry(self, orders: int, answers: int, words: int) -> None:
        try:
            self._actor = self._find()
        except Exception as error:  # Ray's own, or it has gone: there will be no actor
            for number in (orders, answers):
                os.close(number)
            with os.fdopen(words, "wb", 0) as err, contextlib.suppress(BrokenPipeError):
                _write(err, _first_line(error))
            self._ended.set()
            return
        self._begin(self._send, orders)
        self._receive(answers, words)

    def _send(self, orders: int) -> None:
        with os.fdopen(orders, "rb", 0) as file, contextlib.suppress(Exception):
            while data := file.read(_READ_BYTES):
                self._ray.get(self._actor.write.remote(data))
            self._ray.get(self._actor.write.remote(b""))

    def _receive(self, answers: int, words: int) -> None:
        with (
            os.fdopen(answers, "wb", 0) as out,
            os.fdopen(words, "wb", 0) as err,
            contextlib.suppress(BrokenPipeError),
        ):
            try:
                while any(said := self._ray.get(self._actor.read.remote())):
                    _write(out, said[0])
                    _write(err, said[1])
            except self._ray.exceptions.RayError as error:  # the actor or its node is gone
                _write(err, _first_line(error))
        self._ended.set()


def _first_line(error: Exception) -> bytes:
    return f"{str(error).strip().partition(chr(10))[0]}\n".encode()


def _write(file: IO[bytes], data: bytes) -> None:
    while data:
        data = data[file.write(data) :]
