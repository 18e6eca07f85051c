"""Start real jobs and read what they print."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from quiet_time import quiet_time

from system.warm_jobs import warm_launcher, with_defaults

JOBS = Path(__file__).parent / "jobs"
PROGRAMS = {"graphsplit": ("-m", "graphsplit.cli")}


@dataclass(frozen=True)
class Finished:
    """A job that has ended: what its launcher showed, and what its processes printed."""

    status: int
    output: str
    seconds: float
    logs: Mapping[str, str] = field(default_factory=dict)

    def lines_of(self, process: str) -> list[str]:
        """What one process printed; the launcher leaves out what echoes its last line."""
        lines = self.logs[process.replace(" ", "_")].splitlines()
        return [line.removeprefix(f"[{process}] ") for line in lines]

    def said_by(self, process: str) -> list[str]:
        """What one process's script printed, without graphsplit's own lines."""
        return [line for line in self.lines_of(process) if not line.startswith("[graphsplit] ")]


def run_job(
    script: str | Path,
    *arguments: str,
    workers: int,
    timeout_s: float = 240,
    restarts: int = 0,
    imports: tuple[str, ...] = (),
    **environment: str,
) -> Finished:
    """Run a script on a scheduler and some workers, to its end.

    ``imports`` are modules that are imported once for all jobs, and not by each worker.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = ["-n", str(workers), "--restarts", str(restarts), "--log-dir", folder]
        command = ["run", *options, "--", str(JOBS / script), *arguments]
        job = run_command(command, timeout_s=timeout_s, imports=imports, **environment)
        return replace(job, logs=read_logs(Path(folder)))


def read_logs(folder: Path) -> dict[str, str]:
    """What each process printed, from the folder that ``--log-dir`` named."""
    return {path.stem: path.read_text(errors="replace") for path in folder.glob("*.log")}


def run_command(
    command: Sequence[str],
    *,
    timeout_s: float = 240,
    imports: tuple[str, ...] = (),
    **environment: str,
) -> Finished:
    """Run ``graphsplit COMMAND`` to its end."""
    return _run("graphsplit", *command, timeout_s=timeout_s, imports=imports, **environment)


def run_alone(script: str, *arguments: str, timeout_s: float = 240) -> list[str]:
    """Run a script in one process, without a job; the lines that it prints."""
    done = _run(str(JOBS / script), *arguments, timeout_s=timeout_s)
    assert done.status == 0, done.output[-4000:]
    return done.output.splitlines()


def _run(
    *command: str, timeout_s: float, imports: tuple[str, ...] = (), **environment: str
) -> Finished:
    """Run a command to its end, in a process that has imported torch already.

    Where a variable that is read before that differs, in a fresh one.
    """
    environ = with_defaults({**os.environ, "OMP_NUM_THREADS": "1", **environment})
    with tempfile.TemporaryFile() as output:
        start = quiet_time()
        if warm_launcher(imports).serves(environ):
            status = warm_launcher(imports).run(command, environ, output.fileno(), timeout_s)
        else:
            status = subprocess.run(
                [sys.executable, *(PROGRAMS.get(command[0]) or command[:1]), *command[1:]],
                env=environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            ).returncode
        seconds = quiet_time() - start
        output.seek(0)
        return Finished(status, output.read().decode(errors="replace"), seconds)
