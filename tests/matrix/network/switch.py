"""A switch in user space: forwards frames between hosts, as well or as badly as it is told to.

It is a process of its own, so that nothing of a job holds it up::

    with Switch(hosts, socket_path) as switch:
        ask(socket_path, {"links": [[1, 2, {"loss": 1.0}]]})    # nothing from host 1 reaches 2

Whoever knows the path of its socket may ask it, from any namespace, and has an answer when the
change has been made: so a process of the job can break the network at an exact moment of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from matrix.network.namespaces import MAC_PREFIX, Hosts, inside

_ALL_PROTOCOLS = 0x0003
_SOL_PACKET, _IGNORE_OUTGOING = 263, 23
_SO_RCVBUFFORCE = 33
_BUFFER_BYTES = 16 << 20
_BATCH = 256
START_S = 20.0


@dataclass(frozen=True)
class Quality:
    """What happens to frames on one direction of a link.

    Attributes:
        loss: Part of the frames that vanish; 1 cuts it.
        delay_s: How much later they arrive.
        copies: Part of the frames that arrive twice.
    """

    loss: float = 0.0
    delay_s: float = 0.0
    copies: float = 0.0


PERFECT = Quality()


@dataclass
class Counts:
    """What a switch has done."""

    forwarded: int = 0
    lost: int = 0
    delayed: int = 0
    doubled: int = 0


@dataclass(order=True)
class _Late:
    due: float
    number: int
    destination: int = field(compare=False)
    frame: bytes = field(compare=False)


class Forwarding:
    """What is done with each frame. Sends through ``send``; reads no clock of its own."""

    def __init__(self, send: Any, *, seed: int) -> None:
        self._send = send
        self._random = random.Random(seed)
        self._links: dict[tuple[int, int], Quality] = {}
        self._late: list[_Late] = []
        self._done: set[str] = set()
        self._first_at: float | None = None
        self.counts = Counts()

    def take(self, source: int, frame: bytes, now: float) -> None:
        """A frame has come from a host."""
        if frame[: len(MAC_PREFIX)] != MAC_PREFIX:
            return  # to everybody: hosts know each other, and have nothing to announce
        destination = frame[len(MAC_PREFIX)] - 1
        quality = self._links.get((source, destination), PERFECT)
        if quality.loss and self._random.random() < quality.loss:
            self.counts.lost += 1
            return
        copies = 1 + (quality.copies > 0 and self._random.random() < quality.copies)
        self.counts.doubled += copies - 1
        for _ in range(copies):
            self.counts.forwarded += 1
            if quality.delay_s:
                self.counts.delayed += 1
                number = self.counts.delayed
                heapq.heappush(self._late, _Late(now + quality.delay_s, number, destination, frame))
            else:
                self._send(destination, frame)

    def release(self, now: float) -> float | None:
        """Send what is due; the seconds until more is, None if nothing waits."""
        while self._late and self._late[0].due <= now:
            late = heapq.heappop(self._late)
            self._send(late.destination, late.frame)
        return max(0.0, self._late[0].due - now) if self._late else None

    def obey(self, request: dict[str, Any], now: float) -> dict[str, Any]:
        """Do what was asked. What has a name in ``once`` is done the first time only.

        The answer says since when, if ever, something has been wrong with some link.
        """
        name = request.get("once", "")
        if name and name in self._done:
            return {"done": False}
        self._done.add(name)
        if request.get("heal"):
            self._links.clear()
        for source, destination, quality in request.get("links", ()):
            self._links[source, destination] = Quality(**quality)
            self._first_at = now if self._first_at is None else self._first_at
        return {"done": True, "first_at": self._first_at, "counts": vars(self.counts)}


def ask(path: str | Path, request: dict[str, Any]) -> dict[str, Any]:
    """Have a switch do something; its answer, once that is done."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(START_S)
        link.connect(str(path))
        link.sendall(json.dumps(request).encode() + b"\n")
        with link.makefile() as answers:
            answer: dict[str, Any] = json.loads(answers.readline())
    return answer


class Switch:
    """The process of a switch. A context manager."""

    def __init__(self, hosts: Hosts, path: Path, *, seed: int = 0) -> None:
        command = [sys.executable, __file__, hosts.switch, str(len(hosts.names)), str(path)]
        self._process = subprocess.Popen(
            [*command, "--seed", str(seed)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self.close()
            raise OSError("the switch did not start")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(device: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    with contextlib.suppress(OSError):
        port.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    port.bind((device, 0))
    port.setblocking(False)
    return port


class _Running:
    """The loop of a switch's process."""

    def __init__(self, namespace: str, number: int, path: str, *, seed: int) -> None:
        self._ports = inside(namespace, lambda: [_open(f"p{n}") for n in range(number)])
        self._forwarding = Forwarding(self._send, seed=seed)
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(path)
        self._door.listen(16)
        self._poll = select.poll()
        for one in (*self._ports, self._door):
            self._poll.register(one, select.POLLIN)
        self._sources = {port.fileno(): n for n, port in enumerate(self._ports)}

    def _send(self, destination: int, frame: bytes) -> None:
        if destination < len(self._ports):
            with contextlib.suppress(OSError):  # a full queue drops, as every switch does
                self._ports[destination].send(frame)

    def run(self) -> None:
        parent = os.getppid()
        while os.getppid() == parent:
            wait_s = self._forwarding.release(time.monotonic())
            ready = self._poll.poll(1_000 if wait_s is None else min(1_000.0, wait_s * 1_000 + 0.5))
            for descriptor, _ in ready:
                source = self._sources.get(descriptor)
                if source is None:
                    self._answer()
                else:
                    self._drain(source)

    def _drain(self, source: int) -> None:
        port, now = self._ports[source], time.monotonic()
        with contextlib.suppress(BlockingIOError, OSError):
            for _ in range(_BATCH):
                self._forwarding.take(source, port.recv(65_536), now)

    def _answer(self) -> None:
        link, _ = self._door.accept()
        with link, contextlib.suppress(OSError, ValueError):
            link.settimeout(1)
            request = json.loads(link.makefile().readline())
            answer = self._forwarding.obey(request, time.monotonic())
            link.sendall(json.dumps(answer).encode() + b"\n")


def main() -> None:
    """Forward until whoever started this ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("namespace")
    parser.add_argument("number", type=int)
    parser.add_argument("path")
    parser.add_argument("--seed", type=int, default=0)
    found = parser.parse_args()
    running = _Running(found.namespace, found.number, found.path, seed=found.seed)
    print("ready", flush=True)
    running.run()


if __name__ == "__main__":
    main()
