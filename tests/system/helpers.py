"""Start real jobs and read what they print."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from system.warm_jobs import warm_launcher, with_defaults

JOBS = Path(__file__).parent / "jobs"


@dataclass(frozen=True)
class Finished:
    """A job that has ended."""

    status: int
    output: str
    seconds: float

    def lines_of(self, process: str) -> list[str]:
        """What one process printed."""
        prefix = f"[{process}] "
        return [line.removeprefix(prefix) for line in self.output.splitlines()
                if line.startswith(prefix)]  # fmt: skip

    def said_by(self, process: str) -> list[str]:
        """What one process's script printed, without graphsplit's own lines."""
        return [line for line in self.lines_of(process) if not line.startswith("[graphsplit] ")]


def run_job(
    script: str | Path,
    *arguments: str,
    workers: int,
    timeout_s: float = 240,
    restarts: int = 0,
    **environment: str,
) -> Finished:
    """Run a script on a scheduler and some workers, to its end."""
    command = ["run", "-n", str(workers), "--restarts", str(restarts), "--",
               str(JOBS / script), *arguments]  # fmt: skip
    return run_command(command, timeout_s=timeout_s, **environment)


def run_command(command: Sequence[str], *, timeout_s: float = 240, **environment: str) -> Finished:
    """Run ``graphsplit COMMAND`` to its end, in a process that has imported torch already.

    Where a variable that is read before that differs, in a fresh one.
    """
    environ = with_defaults({**os.environ, "OMP_NUM_THREADS": "1", **environment})
    with tempfile.TemporaryFile() as output:
        start = time.monotonic()
        if warm_launcher().serves(environ):
            status = warm_launcher().run(command, environ, output.fileno(), timeout_s)
        else:
            status = subprocess.run(
                [sys.executable, "-m", "graphsplit.cli", *command],
                env=environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            ).returncode
        seconds = time.monotonic() - start
        output.seek(0)
        return Finished(status, output.read().decode(errors="replace"), seconds)
