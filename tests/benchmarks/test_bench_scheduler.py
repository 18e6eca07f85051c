"""The benchmark of the scheduler speaks its protocol by hand, so it can fall behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_scheduler.py"


@pytest.mark.real_processes
def test_members_join_meet_and_leave(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    subprocess.run(
        [sys.executable, str(SCRIPT), "--sizes", "5", "--seconds", "1", "--json", str(found)],
        check=True,
        timeout=120,
    )
    (row,) = json.loads(found.read_text())["rows"]
    assert row["members"] == 5 and row["formation_s"] > 0
