"""Run every benchmark of the table, and write all rows into one JSON file.

    python benchmarks/run_all.py [--rounds 5] [--only NAME ...] [--json FILE] [--notes TEXT]

The file is written after each of them, so that a run that is stopped keeps what it found.
Each is also a script of its own. `python benchmarks/compare.py A.json B.json` compares two files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import environment, parser

HERE = Path(__file__).resolve().parent
DEFAULT = HERE / "results" / "local" / "all.json"
# In the order of the table.
TABLE = (
    *("bench_pipeline", "bench_steps", "bench_lenet_step", "bench_hop", "bench_tls"),
    *("bench_memory", "bench_planning", "bench_prediction", "bench_startup"),
    *("bench_own_loop", "bench_replicas", "bench_slow_piece"),
)
# Growth with size, and memory, hardly differ from round to round, and take their time.
FEWER_ROUNDS = {"bench_planning": 1, "bench_memory": 3, "bench_tls": 3}
# By itself the pipeline's gives its first rows only; the table's time is short.
MORE = {
    "bench_pipeline": (
        *("--launches", "2", "--schedule", "auto", "1f1b"),
        *("--against", "torch 1F1B", "torch interleaved", "torch zero bubble", "torch ZBV"),
        "floor",
    ),
    "bench_replicas": ("--launches", "1"),
}


def run(name: str, rounds: int, folder: Path) -> tuple[dict[str, Any], bool]:
    """Run one benchmark, whose output is shown; what it wrote, and whether it got to its end."""
    written = folder / f"{name}.json"
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(written)]
    command += MORE.get(name, ())
    command += ["--rounds", str(min(rounds, FEWER_ROUNDS.get(name, rounds)))]
    print(f"== {name}", flush=True)
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found = json.loads(written.read_text()) if written.exists() else {}
    is_whole = done.returncode == 0 and written.exists()
    if not is_whole:
        print(f"{name} FAILED with status {done.returncode}", flush=True)
    return (found if isinstance(found, dict) else {"other": found}), is_whole


def main() -> None:
    """Read the command line."""
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", choices=TABLE, default=list(TABLE))
    arguments = made.parse_args()
    path = Path(arguments.json or DEFAULT)
    content = environment() | {"rounds": arguments.rounds, "notes": arguments.notes}
    rows: list[Any] = []
    others: dict[str, Any] = {}  # what they wrote besides, in forms of their own
    failed: list[str] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            found, is_whole = run(name, arguments.rounds, Path(folder))
            if not is_whole:
                failed.append(name)
            rows += [{"benchmark": name, **row} for row in found.pop("rows", ())]
            others[name] = {key: value for key, value in found.items() if key not in content}
            whole = {**content, "rows": rows, "others": others, "failed": failed}
            path.write_text(json.dumps(whole, indent=1) + "\n")
    print(f"{len(rows)} rows in {path}" + (f"; FAILED: {', '.join(failed)}" if failed else ""))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
