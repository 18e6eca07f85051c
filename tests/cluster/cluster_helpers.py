"""A live scheduler and members in threads, for tests of the shells."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from quiet_time import quiet_time

import graphsplit.settings
from graphsplit.cluster.member.member import Member, NodeIdentity
from graphsplit.cluster.scheduler.server import serve
from graphsplit.failure import AbortSignal, FailureCause
from graphsplit.security.options import SecurityOptions
from graphsplit.settings import ClusterSettings

DEADLINE_S = 15.0
PACKAGE = Path(graphsplit.settings.__file__).parent
PROCESS = Path(__file__).with_name("cluster_process.py")


def port_of(node_id: str) -> int:
    """The port that a member says that it listens on; nobody dials it."""
    return int(f"1{node_id}") if node_id.isdigit() else 1


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Look often, for as long as the deadline allows: for what has no event of its own."""
    deadline = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not is_true():
        assert time.monotonic() < deadline, what
        pause.wait(0.01)


class Joined:
    """A member with its abort signal, and when that was set."""

    def __init__(self, member: Member, abort: AbortSignal) -> None:
        self.member = member
        self.abort = abort
        self._aborted = threading.Event()
        self.aborted_at = 0.0
        abort.add_waker(self._note)

    def _note(self) -> None:
        self.aborted_at = quiet_time()
        self._aborted.set()

    def wait_aborted(self) -> FailureCause:
        assert self._aborted.wait(DEADLINE_S), "no abort came"
        assert self.abort.cause is not None
        return self.abort.cause


class LiveCluster:
    """A scheduler in a thread, on a free port, and what its tests need around it."""

    def __init__(self, num_workers: int, **changes: Any) -> None:
        self.settings = ClusterSettings(
            role="MS_SCHED",
            num_workers=num_workers,
            scheduler_port=0,
            retry_lower_s=0.1,
            retry_upper_s=0.2,
            **{"topo_timeout_s": DEADLINE_S, **changes},
        )
        self.log: list[str] = []
        self._members: list[Member] = []
        self._processes: list[Process] = []
        self._pool = ThreadPoolExecutor(max_workers=num_workers + 2)
        ports: queue.Queue[int] = queue.Queue()
        self._status = self._pool.submit(
            serve,
            self.settings,
            on_listening=lambda host, port: ports.put(port),
            log=self.log.append,
        )
        self.port = ports.get(timeout=DEADLINE_S)

    def submit(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
        return self._pool.submit(call, *arguments, **named)

    def join(
        self,
        node_id: str = "",
        *,
        identity: NodeIdentity | None = None,
        security: SecurityOptions | None = None,
        endpoint: str = "",
    ) -> Joined:
        settings = replace(
            self.settings,
            role="MS_WORKER",
            scheduler_port=self.port,
            node_id=node_id,
            wished_rank=int(node_id) if node_id.isdigit() else None,
            security=security or self.settings.security,
        )
        abort = AbortSignal()
        member = Member.join(
            settings,
            endpoints={"grpc": endpoint or f"127.0.0.1:{port_of(node_id)}"},
            identity=identity or NodeIdentity(versions={"torch": "2.13.0"}),
            abort=abort,
            log=self.log.append,
        )
        self._members.append(member)
        return Joined(member, abort)

    def join_all(self, *node_ids: str) -> list[Joined]:
        futures = [self.submit(self.join, node_id) for node_id in node_ids]
        joined = [future.result(DEADLINE_S) for future in futures]
        return sorted(joined, key=lambda one: one.member.rank)

    def start_process(self, mode: str, node_id: str) -> Process:
        process = Process(
            mode,
            role="MS_WORKER",
            num_workers=self.settings.num_workers,
            port=self.port,
            node_id=node_id,
        )
        self._processes.append(process)
        return process

    def wait_status(self) -> int:
        return self._status.result(DEADLINE_S)

    def close(self) -> None:
        for process in self._processes:
            process.end()
        for member in self._members:
            member.close()
        # With all members gone, the scheduler of a formed job ends by itself.
        try:
            self._status.result(DEADLINE_S)
        finally:
            self._pool.shutdown(wait=False)


class Process:
    """One real process, and the lines it prints."""

    def __init__(
        self,
        mode: str,
        *,
        role: str,
        num_workers: int,
        port: int,
        node_id: str,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        variables = {
            **os.environ,
            "MS_ROLE": role,
            "MS_WORKER_NUM": str(num_workers),
            "MS_SCHED_PORT": str(port),
            "MS_NODE_ID": node_id,
            "MS_TOPO_TIMEOUT": str(DEADLINE_S),
            **(environ or {}),
        }
        self._process = subprocess.Popen(
            [sys.executable, str(PROCESS), str(PACKAGE), mode],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.pid = self._process.pid
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def wait_line(self, start: str) -> str:
        """The rest of the first line that begins so."""
        deadline = time.monotonic() + DEADLINE_S
        while (line := self._queue.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
            self.lines.append(line)
            if line.startswith(start):
                return line.removeprefix(start).strip()
        raise AssertionError(f"no line began with {start!r}: {self.lines}")

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        return self._process.wait(DEADLINE_S)

    def rest(self) -> list[str]:
        """All that was printed, once the process has ended."""
        self._reader.join(DEADLINE_S)
        while (line := self._queue.get(timeout=DEADLINE_S)) is not None:
            self.lines.append(line)
        return self.lines

    def end(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
