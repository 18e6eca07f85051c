"""The number of members that one scheduler can serve: they join, beat, meet, and leave.

    python benchmarks/bench_scheduler.py [--sizes 100,300,1000] [--seconds 10] [--json FILE]

One real scheduler in a process of its own; the members are coroutines of this process, each with a
connection of its own, that speak the whole protocol: fences, heartbeats that ask for the progress
of a neighbour, barriers, the finish. They do not import torch. Prints, for each size, how long it
took until all ran, the scheduler's CPU while nothing happens but heartbeats, and the time of a
barrier and of the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import time
import types
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The cluster's modules alone: importing the package itself would import torch.
_package = types.ModuleType("graphsplit")
_package.__path__ = [str(ROOT / "graphsplit")]
sys.modules["graphsplit"] = _package

import grpc  # noqa: E402

from graphsplit.cluster.scheduler.server import serve  # noqa: E402
from graphsplit.cluster.wire.codec import encode_fence, encode_worker  # noqa: E402
from graphsplit.cluster.wire.limits import heartbeat_interval_s  # noqa: E402
from graphsplit.cluster.wire.messages import (  # noqa: E402
    Arrive,
    Fence,
    Heartbeat,
    Leave,
    MeetingKind,
    Ready,
    Register,
    WorkerMessage,
)
from graphsplit.cluster.wire.rpc import METHOD, SERVICE, channel_options  # noqa: E402
from graphsplit.settings import ClusterSettings, silence_within  # noqa: E402

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
DEADLINE_S = 120.0
SILENCE_S = silence_within(ClusterSettings("MS_SCHED", 1, 0).node_timeout_s)


def settings_for(num_workers: int) -> ClusterSettings:
    """A cluster on this machine; the port is chosen by the system."""
    return ClusterSettings(role="MS_SCHED", num_workers=num_workers, scheduler_port=0)


class SimulatedMember:
    """One member, as far as the scheduler can tell."""

    def __init__(self, rank: int, num_workers: int, port: int) -> None:
        self._rank = rank
        self._num_workers = num_workers
        self._incarnation = f"{rank:032x}"
        options = channel_options(silence_s=SILENCE_S)
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
        self._call: Any = None
        self._job = ""
        self._generation = 0
        self._number = 0
        self._num_met = 0
        self._writing = asyncio.Lock()
        self._ended = asyncio.Event()
        self._beats: asyncio.Task[None] | None = None

    async def say(self, message: WorkerMessage) -> None:
        """Send a message with its fence."""
        async with self._writing:
            self._number += 1
            fence = Fence(self._job, self._generation, self._incarnation, self._number)
            try:
                await self._call.write(encode_worker(message) + encode_fence(fence))
            except asyncio.InvalidStateError:
                raise RuntimeError(
                    f"the stream of worker {self._rank} ended: {await self._call.code()}, "
                    f"{await self._call.details()}"
                ) from None

    async def hear(self, kind: str) -> dict[str, Any]:
        """The next message of a kind, unchecked: all members share one process here."""
        while True:
            data = await self._call.read()
            if data is grpc.aio.EOF:
                raise RuntimeError(f"the stream of worker {self._rank} ended before {kind}")
            found = json.loads(data.partition(b"\n")[0])
            if found["kind"] == kind:
                message: dict[str, Any] = found["message"]
                return message
            if found["kind"] in ("Refused", "Abort", "Recovering"):
                raise RuntimeError(f"worker {self._rank} was told {found}")

    async def join(self) -> None:
        """Register, and wait until the generation runs."""
        self._call = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        await self.say(self._registration())
        self._job = (await self.hear("Accepted"))["job"]
        self._generation = (await self.hear("Formed"))["generation"]
        await self.say(Ready(self._generation))
        await self.hear("Started")
        self._beats = asyncio.create_task(self._beat())

    def _registration(self) -> Register:
        return Register(
            node_id=str(self._rank),
            incarnation=self._incarnation,
            role="MS_WORKER",
            num_workers=self._num_workers,
            wished_rank=self._rank,
            host="a-host-with-a-usual-name",
            pid=1000 + self._rank,
            # As long as those of a real worker.
            endpoints={
                "token": self._incarnation,
                "grpc": "127.0.0.1:40123",
                "shm": f"{'0' * 36}.4026531840.1000/graphsplit-{self._incarnation}",
                "generator": "0123456789abcdef",
            },
            versions={"graphsplit": "0.1.0", "torch": "2.13.0", "python": "3.11"},
            script_digest="d" * 64,
            num_threads=1,
            cpu_capability="AVX512",
        )

    async def _beat(self) -> None:
        # Spread over the time between two, as processes are that started at any time.
        interval_s = heartbeat_interval_s(SILENCE_S, self._num_workers)
        pause_s = interval_s * self._rank / self._num_workers
        neighbour = (self._rank + 1) % self._num_workers
        progress = 0
        while not await self._has_ended(pause_s):
            progress, pause_s = progress + 1, interval_s
            position = f"step {progress}, microbatch 0, backward of layers.{self._rank}.attention"
            await self.say(Heartbeat(progress, position, watched=(neighbour,)))

    async def _has_ended(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def meet(self, kind: MeetingKind, name: str = "") -> None:
        """Come to the next meeting, and wait for all others."""
        self._num_met += 1
        await self.say(Arrive(kind, name, number=self._num_met))
        await self.hear("Departed")

    async def leave(self) -> None:
        """Come to the end of the job, and close the stream."""
        await self.meet(MeetingKind.FINISH)
        if self._beats is not None:
            self._ended.set()
            await self._beats
        await self.say(Leave())
        await self._call.done_writing()
        await self._channel.close()


class RealScheduler:
    """A scheduler in a process of its own."""

    def __init__(self, num_workers: int) -> None:
        command = [sys.executable, __file__, "--serve", str(num_workers)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def cpu_s(self) -> float:
        """CPU seconds of all its threads so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def rss_mb(self) -> float:
        """Memory it holds."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def end(self) -> None:
        """Whatever happened, it must not stay."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


async def _all(calls: list[Awaitable[None]]) -> float:
    """Seconds until all are done."""
    started = time.perf_counter()
    await asyncio.wait_for(asyncio.gather(*calls), DEADLINE_S)
    return time.perf_counter() - started


async def measure(num_workers: int, seconds: float) -> dict[str, float]:
    """One job from the first registration to the scheduler's exit."""
    scheduler = RealScheduler(num_workers)
    try:
        idle_s = scheduler.cpu_s()
        members = [SimulatedMember(n, num_workers, scheduler.port) for n in range(num_workers)]
        formed_s = await _all([member.join() for member in members])
        formed_cpu_s = scheduler.cpu_s() - idle_s
        before, at = scheduler.cpu_s(), time.perf_counter()
        await asyncio.sleep(seconds)
        steady = (scheduler.cpu_s() - before) / (time.perf_counter() - at)
        barrier_s = await _all([member.meet(MeetingKind.BARRIER, "all") for member in members])
        rss_mb = scheduler.rss_mb()
        left_s = await _all([member.leave() for member in members])
        status = await asyncio.to_thread(scheduler.process.wait, DEADLINE_S)
        assert status == 0, f"the scheduler ended with status {status}"
    finally:
        scheduler.end()
    return {
        "members": num_workers,
        "formation_s": formed_s,
        "formation_cpu_s": formed_cpu_s,
        "steady_cores": steady,
        "barrier_s": barrier_s,
        "end_s": left_s,
        "rss_mb": rss_mb,
    }


def run_scheduler(num_workers: int) -> int:
    """The other process."""

    def tell(host: str, port: int) -> None:
        print(port, flush=True)

    return serve(settings_for(num_workers), on_listening=tell, log=_log)


def _log(line: str) -> None:
    """Print what went wrong; the usual lines would be thousands."""
    if "refused" in line or "failed" in line or "lost" in line:
        print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Measure all sizes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="100,300,1000")
    parser.add_argument("--seconds", type=float, default=10.0, help="of heartbeats alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        sys.exit(run_scheduler(options.serve))
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = []
    print("members  formation  its CPU  CPU at rest  barrier     end  memory")
    for size in (int(part) for part in options.sizes.split(",")):
        row = asyncio.run(measure(size, options.seconds))
        found.append(row)
        print(
            f"{size:7d}  {row['formation_s']:7.2f} s  {row['formation_cpu_s']:5.2f} s  "
            f"{row['steady_cores']:6.3f} cores  {row['barrier_s']:5.2f} s  {row['end_s']:4.2f} s  "
            f"{row['rss_mb']:4.0f} MB",
            flush=True,
        )
    if options.json:
        machine = {"python": platform.python_version(), "cpus": os.cpu_count()}
        machine["grpc"] = grpc.__version__
        options.json.write_text(json.dumps({"machine": machine, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
