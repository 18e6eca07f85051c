"""One run of the matrix: start a job, let it be hit, and look whether all is as it must be."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from graphsplit.cli.launch.console import Console, Sink
from graphsplit.cli.launch.environment import job_children
from graphsplit.cli.launch.supervise import Restarts, say, supervise
from graphsplit.launchers.ports import find_free_port
from matrix.faults import HIT, TOLD, Fault
from matrix.forked import start_forked
from matrix.table import OF_REPLICAS, Row

JOB, LOOP_JOB, REPLICA_JOB = (
    Path(__file__).parent / name for name in ("job.py", "loop_job.py", "replica_job.py")
)
NUM_WORKERS = 3
NODE_TIMEOUT_S = 6.0
TOPO_TIMEOUT_S = 8.0
LIMIT_S = 90.0
RESTARTS = 2
PROMPT_S = 1.5
"""At once: 0.3 s for a better explanation, the rest for waking everybody up on a busy machine."""

FAIL_FAST, WAIT_REJOIN, JOURNAL = "fail_fast", "wait_rejoin", "wait_rejoin + journal"
LOOP = "wait_rejoin + gs.loop"
GO_ON, NEWCOMER = OF_REPLICAS


@dataclass(frozen=True)
class Case:
    """One run of the matrix."""

    phase: str
    policy: str
    seed: int
    fault: Fault
    is_real: bool = False

    @property
    def job(self) -> Path:
        """The script that its processes run."""
        if self.policy in OF_REPLICAS:
            return REPLICA_JOB
        return LOOP_JOB if self.policy == LOOP else JOB

    @property
    def recovery(self) -> str:
        """The value of ``GS_RECOVERY``."""
        return self.policy.split(" + ", maxsplit=1)[0]

    @property
    def restarts(self) -> int:
        """How many processes the launcher may start again."""
        return 0 if self.policy in (FAIL_FAST, GO_ON) else RESTARTS

    @property
    def carries_on(self) -> bool:
        """Whether the job must end as if nothing had happened."""
        if self.fault.how == "exception" or self.policy == FAIL_FAST:
            return False
        if self.fault.what == "JOIN" and self.fault.how == "SIGSTOP":
            return False  # nobody has heard of it yet
        if self.policy == GO_ON and self.phase == "registering":
            return False  # there is no job yet that could go on
        return self.policy == JOURNAL or self.fault.victim != "scheduler"

    @property
    def bound_s(self) -> float:
        """How long it may take until the others know."""
        if self.fault.how != "SIGSTOP":
            return PROMPT_S
        is_unknown = self.fault.what == "JOIN"
        return PROMPT_S + TOPO_TIMEOUT_S if is_unknown else NODE_TIMEOUT_S

    @property
    def name(self) -> str:
        """For folders and logs."""
        at = f"{self.fault.victim}-{self.phase}-{self.fault.how}-{self.policy}-{self.seed}"
        return re.sub(r"[^a-zA-Z0-9]+", "_", at) + ("_real" if self.is_real else "")


class Run:
    """A job that is under way.

    Args:
        case: What is to happen.
        folder: For all that this run writes.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "tmp").mkdir(parents=True)
        case.fault.write(folder)
        self.port = find_free_port("127.0.0.1")
        self.began = time.monotonic()
        self.pid = self._start()
        self.status: int | None = None

    def poll(self) -> bool:
        """Whether the launcher has ended. One that takes too long is killed."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.status = os.waitstatus_to_exitcode(status)
        elif time.monotonic() - self.began > LIMIT_S:
            os.kill(self.pid, signal.SIGKILL)
        return bool(pid)

    def _environ(self) -> dict[str, str]:
        variables = {
            **{name: value for name, value in os.environ.items() if name[:3] not in ("MS_", "GS_")},
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder / "tmp"),
            "GS_RECOVERY": self.case.recovery,
            "GS_SNAPSHOT_EVERY": "2",
        }
        if self.case.fault.how == "SIGSTOP":
            # Only where they are what notices; a busy machine must not look like a frozen one.
            variables["MS_NODE_TIMEOUT"] = f"{NODE_TIMEOUT_S:g}"
        if (self.case.fault.what, self.case.fault.how) == ("JOIN", "SIGSTOP"):
            variables["MS_TOPO_TIMEOUT"] = f"{TOPO_TIMEOUT_S:g}"
        if self.case.policy == JOURNAL:
            variables["MS_RECOVERY_PATH"] = str(self.folder / "recovery")
        return variables

    def _start(self) -> int:
        if self.case.is_real:
            return self._start_real()
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                status = self._launch()
            finally:
                os._exit(status)
        return pid

    def _launch(self) -> int:
        """What ``graphsplit run`` does, but that processes are forked."""
        os.environ["TMPDIR"] = str(self.folder / "tmp")
        with (self.folder / "output").open("wb", buffering=0) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sink = Sink(output, is_terminal=False)  # type: ignore[arg-type]
            console = Console(sink, sink, clock=time.monotonic)
            specs = job_children(
                self._environ(), num_workers=NUM_WORKERS, host="127.0.0.1", port=self.port
            )
            ended = supervise(
                specs,
                [sys.executable, str(self.case.job), str(self.folder)],
                console=console,
                log_dir=self.folder / "logs",
                restarts=Restarts(
                    processes=self.case.restarts,
                    with_scheduler=self.case.policy == JOURNAL,
                    goes_on=self.case.recovery == GO_ON,
                ),
                start=start_forked,
            )
            return say(console, ended)

    def _start_real(self) -> int:
        command = [sys.executable, "-m", "graphsplit.cli", "run", "-n", str(NUM_WORKERS),
                   "--port", str(self.port), "--restarts", str(self.case.restarts),
                   "--log-dir", str(self.folder / "logs"), "--",
                   str(self.case.job), str(self.folder)]  # fmt: skip
        with (self.folder / "output").open("wb") as output:
            child = subprocess.Popen(
                command, env=self._environ(), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        child.returncode = 0  # ``poll`` waits for it, as for those that were forked
        return child.pid

    def row(self, reference: list[str]) -> Row:
        """What is to be said of it, once it has ended."""
        assert self.status is not None
        verdicts = Verdicts(self, reference)
        fault = self.case.fault
        return Row(
            process=fault.victim,
            phase=self.case.phase,
            fault=fault.how,
            policy=self.case.policy,
            seed=self.case.seed,
            status=self.status,
            detected_s=verdicts.detected_s,
            ok=not verdicts.wrong,
            why="; ".join(verdicts.wrong),
        )


class Verdicts:
    """All that is wrong with a run that has ended."""

    def __init__(self, run: Run, reference: list[str]) -> None:
        self._run, self._case, self._fault = run, run.case, run.case.fault
        self._output = (run.folder / "output").read_text(errors="replace")
        self.detected_s: float | None = None
        self.wrong: list[str] = []
        if not (run.folder / HIT).exists():
            self.wrong.append("the moment did not come")
            return
        self._judge_detection()
        if self._case.carries_on:
            self._judge_same_bits(reference)
        else:
            self._judge_names()
        self._judge_leftovers()

    def _judge_detection(self) -> None:
        hit_at, quiet_hit_at = map(float, (self._run.folder / HIT).read_text().split())
        path = self._run.folder / TOLD
        lines = path.read_text().splitlines() if path.exists() else []
        first: dict[str, tuple[float, float]] = {}
        for line in lines:
            name, _, at = line.rpartition(": ")
            if name != self._fault.victim:
                told_at, quiet_at = map(float, at.split())
                first.setdefault(name, (told_at - hit_at, quiet_at - quiet_hit_at))
        if first:
            is_unknown = self._fault.victim == "scheduler" and self._case.phase == "registering"
            which = min if is_unknown else max
            self.detected_s = round(which(seconds for seconds, _ in first.values()), 3)
            if which(quiet for _, quiet in first.values()) > self._case.bound_s:
                self.wrong.append(f"known everywhere only after {self.detected_s:.1f} s: {first}")

    def _judge_same_bits(self, reference: list[str]) -> None:
        if self._run.status != 0:
            self.wrong.append(f"status {self._run.status}: {self._last_line()}")
            return
        for rank in range(NUM_WORKERS):
            if self._case.policy == GO_ON and f"worker {rank}" == self._fault.victim:
                continue  # the others went on without it
            said = [s for s in self._lines_of(f"worker {rank}") if not s.startswith("[graphsplit]")]
            if said[-len(reference) :] != reference:
                self.wrong.append(f"worker {rank} said {said[-len(reference) :]}")

    def _judge_names(self) -> None:
        if self._run.status in (0, None) or (self._run.status or 0) < 0:
            self.wrong.append(f"status {self._run.status}: {self._last_line()}")
        pattern = self._root_cause()
        names = ["scheduler", *(f"worker {rank}" for rank in range(NUM_WORKERS))]
        for name in names:
            is_silenced = name == self._fault.victim and self._fault.how != "exception"
            said = "\n".join(self._lines_of(name))
            if not (is_silenced or self._is_early(name)) and not re.search(pattern, said):
                self.wrong.append(f"{name} does not say {pattern!r}")
        if not re.search(pattern, self._last_line()):
            self.wrong.append(f"the last line does not say {pattern!r}: {self._last_line()}")

    def _is_early(self, name: str) -> bool:
        """Whether a process was not in the job yet: the launcher ends it, maybe unheard."""
        if self._case.phase != "registering":
            return False
        in_job = "listening" if name == "scheduler" else rf"worker '{name[-1]}' \(.*\) registered"
        return not re.search(in_job, "\n".join(self._lines_of("scheduler")))

    def _root_cause(self) -> str:
        victim = self._fault.victim
        if self._fault.how == "exception":
            told = rf"{victim}.* failed: RuntimeError: injected|(?m:^RuntimeError: injected)"
            is_unknown = victim == "scheduler" and self._case.phase == "registering"
            return f"{told}|no scheduler at" if is_unknown else told
        if victim == "scheduler":
            # A worker that has not had an answer yet goes on looking for one, until it is ended.
            return (
                "the connection to the scheduler at .* ended|no scheduler at|"
                "scheduler was killed by SIGKILL|scheduler was given up: nothing was heard from it"
            )
        if self._fault.how == "SIGKILL":
            return rf"{victim} (\(.*\) )?was (lost|killed)"
        if self._fault.what == "JOIN":
            return f"missing ranks {victim[-1]}"
        return rf"{victim} \(.*\) was lost: nothing was heard from it for"

    def _judge_leftovers(self) -> None:
        pids = {
            int(line.rpartition(": ")[2])
            for line in (self._run.folder / "pids").read_text().splitlines()
        }
        orphans = [pid for pid in _pids_of_sessions(pids)]
        if orphans:
            self.wrong.append(f"still there: {orphans}")
        left = [str(p) for p in (self._run.folder / "tmp").iterdir() if not _is_of_others(p)]
        left += [
            str(p) for p in Path("/dev/shm").iterdir() if any(str(pid) in p.name for pid in pids)
        ]
        if left:
            self.wrong.append(f"left over: {left}")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self._run.port))
            except OSError as error:
                self.wrong.append(f"the port is still in use: {error}")

    def _lines_of(self, process: str) -> list[str]:
        log = self._run.folder / "logs" / f"{process.replace(' ', '_')}.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        return [line.removeprefix(f"[{process}] ") for line in text.splitlines()]

    def _last_line(self) -> str:
        told = [line for line in self._output.splitlines() if line.startswith("graphsplit: ")]
        return told[-1] if told else ""


def _is_of_others(path: Path) -> bool:
    """Whether this outlives processes on purpose, or Python's own, where a process was killed.

    A cache of the compiler's; the sockets by which a loader's processes hand over their tensors.
    """
    return path.name.startswith(("torchinductor_", "pymp-"))


def _pids_of_sessions(sessions: set[int]) -> list[int]:
    """Processes that live, and belong to one of these sessions."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(session) in sessions and state != "Z":
            found.append(int(entry.name))
    return found
