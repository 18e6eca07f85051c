"""Start real jobs and read what they print."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

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
        """What one process printed, but that its scheduler is late, as on a busy machine."""
        late = "[graphsplit] no scheduler at "
        return [line for line in self.lines_of(process) if not line.startswith(late)]


def run_job(
    script: str | Path,
    *arguments: str,
    workers: int,
    timeout_s: float = 240,
    restarts: int = 0,
    **environment: str,
) -> Finished:
    """Run a script on a scheduler and some workers, to its end."""
    command = [sys.executable, "-m", "graphsplit.cli", "run", "-n", str(workers),
               "--restarts", str(restarts), "--",
               str(JOBS / script), *arguments]  # fmt: skip
    start = time.monotonic()
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    return Finished(done.returncode, done.stdout, time.monotonic() - start)
