"""A long run in which a process is killed every so often, and must end in the right bits.

    python benchmarks/soak.py [--minutes 30] [--every 20] [--seed 0] [--workers 4] [--json FILE]

The job (``soak_job.py``) is started as users start one, by ``graphsplit run --restarts N`` under
``GS_RECOVERY=wait_rejoin`` with ``MS_RECOVERY_PATH``. Its number of steps is fixed, and each step
has its time, so that it lasts about as long as is asked for. Every ``--every`` seconds one of its
processes gets SIGKILL, or at times SIGSTOP: mostly a worker, the scheduler now and then. Worker 1
is never the victim, so that one process lives through all recoveries.

Held against one process that trained without any of that: losses, metrics, parameters, optimizer
state and generator, by their digests. Held flat, for every life that lasts more than three minutes
and after its first minute: threads, file descriptors and memory, by a median slope. At the end no
process, and no file, may be left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import environment, parser
from soak_job import STEPS_PER_EPOCH
from soak_samples import (
    JUDGED_S,
    MOST_DESCRIPTORS,
    MOST_MIB,
    MOST_THREADS,
    WARM_UP_S,
    Life,
    children,
    cpu_seconds,
    look,
)

JOB = Path(__file__).resolve().with_name("soak_job.py")
STEP_S = 0.08
STARTUP_S = 30.0
SAMPLE_S = 5.0
LOOK_S = 0.2
SPARED = "worker 1"
SCHEDULER_SHARE = 0.08
# A frozen process is noticed after so long; the default is 30 s.
NODE_TIMEOUT_S = 10
LATE_S = 600.0
PAUSE_S = 3.0
JOINED_THREADS = 4


@dataclass(frozen=True)
class Kill:
    """One blow.

    Attributes:
        at_s: Seconds since the soak began.
        name: The victim.
        signal: What it got.
    """

    at_s: float
    name: str
    signal: str


@dataclass
class Soak:
    """A job under fire, and what was seen of it.

    Attributes:
        arguments: The command line.
        folder: Where its files are.
        lives: All processes so far, by pid.
        kills: All blows so far.
        files: The most files, and bytes, that the job kept on disk.
        pauses: Seconds for which this process itself stood still.
    """

    arguments: Namespace
    folder: Path
    lives: dict[int, Life] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)
    files: Counter[str] = field(default_factory=Counter)
    pauses: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    def run(self, rounds: int) -> int:
        """From the start to the end; the launcher's exit status."""
        chance = random.Random(self.arguments.seed)
        started = time.monotonic()
        launcher = self._start(rounds)
        self._add("launcher", launcher.pid, 0.0)
        next_kill, next_sample = STARTUP_S + self.arguments.every, 0.0
        fire_ends = STARTUP_S + self.arguments.minutes * 60
        try:
            before_s = 0.0
            while launcher.poll() is None:
                now_s = time.monotonic() - started
                if now_s - before_s > PAUSE_S:  # somebody has stopped this process, or starved it
                    self.pauses.append(round(now_s - before_s, 1))
                before_s = now_s
                self._follow(launcher.pid, now_s)
                if now_s >= next_sample:
                    self._sample(now_s)
                    next_sample += SAMPLE_S
                if next_kill <= now_s < fire_ends and not self._has_finished():
                    self._kill(chance, now_s)
                    next_kill = now_s + self.arguments.every
                if now_s > fire_ends + LATE_S:
                    raise SystemExit(f"the job does not end; see {self.folder}")
                time.sleep(LOOK_S)
        finally:
            launcher.terminate()
            launcher.wait()
        return launcher.returncode

    def _start(self, rounds: int) -> subprocess.Popen[bytes]:
        arguments = self.arguments
        restarts = 2 * int(arguments.minutes * 60 / arguments.every) + 5
        command = [sys.executable, "-m", "graphsplit.cli", "run", "-n", str(arguments.workers)]
        command += ["--restarts", str(restarts), "--log-dir", str(self.folder / "logs"), str(JOB)]
        command += ["split", "--rounds", str(rounds), "--interval", str(STEP_S)]
        command += ["--begins", str(time.time() + STARTUP_S)]
        variables = {
            "GS_RECOVERY": "wait_rejoin",
            "MS_RECOVERY_PATH": str(self.folder / "recovery"),
            "GS_SNAPSHOT_DISK_EVERY": "50",
            "MS_NODE_TIMEOUT": str(NODE_TIMEOUT_S),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder / "tmp"),
        }
        (self.folder / "tmp").mkdir()
        with open(self.folder / "launcher.log", "wb") as log:
            return subprocess.Popen(
                command, env={**os.environ, **variables}, stdout=log, stderr=subprocess.STDOUT
            )

    def _has_finished(self) -> bool:
        """A process that is killed after the end is not started again, and decides the status."""
        logs = (self.folder / "logs").glob("worker_*.log")
        return any(b"\nstate " in log.read_bytes()[-4096:] for log in logs)

    def _add(self, name: str, pid: int, now_s: float) -> None:
        self.lives[pid] = Life(name, pid, now_s)

    def _follow(self, launcher: int, now_s: float) -> None:
        found = dict((pid, name) for name, pid in children(launcher))
        for pid, name in found.items():
            if pid not in self.lives:
                self._add(name, pid, now_s)
        for life in self._living():
            if life.pid not in found and life.pid != launcher:
                life.ended = "ended"

    def _living(self) -> list[Life]:
        return [life for life in self.lives.values() if not life.ended]

    def _sample(self, now_s: float) -> None:
        for life in self._living():
            sample = look(life.pid, now_s)
            if sample is not None:
                life.samples.append(sample)
            if life.name == "launcher":
                self.cpu_s = cpu_seconds(life.pid)
        found = [p for p in (self.folder / "recovery").rglob("*") if p.is_file()]
        self.files["most files"] = max(self.files["most files"], len(found))
        journal = self.folder / "recovery" / "scheduler.journal"
        size = journal.stat().st_size if journal.exists() else 0
        self.files["largest journal"] = max(self.files["largest journal"], size)

    def _kill(self, chance: random.Random, now_s: float) -> None:
        """One that lives; later workers are hit more often."""
        weights = {"scheduler": SCHEDULER_SHARE}
        ranks = [rank for rank in range(self.arguments.workers) if f"worker {rank}" != SPARED]
        total = sum(1 + rank for rank in ranks)
        for rank in ranks:
            weights[f"worker {rank}"] = (1 - SCHEDULER_SHARE) * (1 + rank) / total
        (name,) = chance.choices(list(weights), list(weights.values()))
        victim = next((one for one in self._living() if one.name == name), None)
        if victim is None:
            return
        is_stop = chance.random() < self.arguments.stop_share and name != "scheduler"
        # Nobody but the launcher knows of a process that has not joined yet.
        now = look(victim.pid, now_s)
        has_joined = now is not None and now.threads >= JOINED_THREADS
        number = signal.SIGSTOP if is_stop and has_joined else signal.SIGKILL
        try:
            os.kill(victim.pid, number)
        except ProcessLookupError:
            return
        victim.ended = number.name
        for life in self._living():
            life.survived += 1
        self.kills.append(Kill(round(now_s, 1), name, number.name))
        print(f"{now_s:7.1f} s  {name} got {number.name}", flush=True)


def wrong_lines(folder: Path, workers: int, expected: list[str]) -> list[str]:
    """Lines that the workers should not have printed; the last life of each prints everything."""
    wrong = []
    for rank in range(workers):
        log = (folder / "logs" / f"worker_{rank}.log").read_text(errors="replace").splitlines()
        said = [line for line in log if line.startswith(("round ", "steps ", "state "))]
        if said[-len(expected) :] != expected:
            wrong.append(f"worker {rank} ended with {said[-1:]}, expected {expected[-1:]}")
        # A line may be torn where its process was killed.
        known = set(expected)
        wrong += [f"worker {rank}: {line}" for line in said if line not in known][:5]
    return wrong


def leftovers(soak: Soak) -> list[str]:
    """Processes and files that outlived the job."""
    mine = str(soak.folder).encode()  # stands in the launcher's command line; JOB in the others'
    found = []
    for life in soak.lives.values():
        with contextlib.suppress(OSError):  # another process may have its number by now
            command = Path(f"/proc/{life.pid}/cmdline").read_bytes()
            if mine in command or str(JOB).encode() in command:
                found.append(f"{life.name}, pid {life.pid}, still runs")
    found += [str(path) for path in (soak.folder / "tmp").rglob("*") if path.is_file()]
    snapshots = soak.folder / "recovery" / "snapshots"
    return found + [str(path) for path in (snapshots.iterdir() if snapshots.exists() else ())]


def rows(soak: Soak) -> list[dict[str, Any]]:
    """The lives that were judged, longest first."""
    judged = [life for life in soak.lives.values() if life.judged()]
    found = [life.summary() for life in judged]
    return sorted(found, key=lambda row: (-row["seconds"], row["name"]))


def show(found: dict[str, Any]) -> None:
    """The table, for people."""
    print(f"{'process':12}{'lived':>8}{'losses':>8}   memory MiB        threads      descriptors")
    for row in found["lives"]:
        memory, threads, files = (row[name] for name in ("rss_mib", "threads", "descriptors"))
        grown = row["growth"]
        print(
            f"{row['name']:12}{row['seconds']:7.0f}s{row['survived']:8}"
            f"   {memory['first']:6.1f} {grown['rss_mib']:+6.2f}"
            f"   {threads['median']:4.0f} {grown['threads']:+5.2f}"
            f"   {files['median']:5.0f} {grown['descriptors']:+5.2f}"
            f"   {'flat' if row['is_flat'] else 'GROWS'}"
        )
    for name in ("kills", "files", "pauses_s", "cpu_share", "status", "bits", "left", "verdict"):
        print(f"{name}: {found[name]}")


def main() -> None:
    """Read the command line."""
    made = parser(__doc__)
    made.add_argument("--minutes", type=float, default=30.0)
    made.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--workers", type=int, default=4)
    made.add_argument("--stop-share", type=float, default=0.2, help="kills by SIGSTOP")
    made.add_argument("--keep", help="a new folder for logs, which is kept")
    arguments = made.parse_args()
    conditions = environment()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and end the job
    with tempfile.TemporaryDirectory() as made_folder:
        folder = Path(arguments.keep or made_folder)
        folder.mkdir(parents=True, exist_ok=True)
        rounds = max(1, round(arguments.minutes * 60 / STEP_S / STEPS_PER_EPOCH))
        soak = Soak(arguments, folder)
        status = soak.run(rounds)
        plain = [sys.executable, str(JOB), "plain", "--rounds", str(rounds)]
        expected = subprocess.run(plain, check=True, capture_output=True, text=True).stdout
        found = judged(soak, status, expected.splitlines(), conditions)
    show(found)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(found["verdict"] != "held")


def judged(
    soak: Soak, status: int, expected: list[str], conditions: dict[str, Any]
) -> dict[str, Any]:
    """Everything that was found out."""
    arguments = soak.arguments
    wrong = wrong_lines(soak.folder, arguments.workers, expected)
    lives, left = rows(soak), leftovers(soak)
    is_held = not (status or wrong or left) and all(row["is_flat"] for row in lives)
    kinds = Counter(f"{kill.name} {kill.signal}" for kill in soak.kills)
    launcher = next(life for life in soak.lives.values() if life.name == "launcher")
    seconds = launcher.samples[-1].at_s
    return {
        **conditions,
        "notes": arguments.notes,
        "minutes": arguments.minutes,
        "every_s": arguments.every,
        "seed": arguments.seed,
        "workers": arguments.workers,
        "lasted_s": seconds,
        "steps": len([line for line in expected if line.startswith("round")]) * STEPS_PER_EPOCH,
        "bounds": {
            "warm_up_s": WARM_UP_S,
            "shortest_judged_s": JUDGED_S,
            "threads": MOST_THREADS,
            "descriptors": MOST_DESCRIPTORS,
            "rss_mib": MOST_MIB,
        },
        "kills": {"all": len(soak.kills), **dict(sorted(kinds.items()))},
        "files": dict(soak.files),
        "pauses_s": soak.pauses,
        # Of those that have ended; who still ran at the last sample is not in it.
        "cpu_share": round(soak.cpu_s / max(1.0, seconds), 3),
        "status": status,
        "bits": wrong or "equal",
        "left": left,
        "lives": lives,
        "verdict": "held" if is_held else "MISSED",
    }


if __name__ == "__main__":
    main()
