"""Run cases of the network matrix, each on hosts and a switch of its own.

One case after the other, one line of JSON each::

    python tests/matrix/network/run.py --out RESULTS.jsonl --select 'cut|half-open' --seeds 0
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from graphsplit.cli.launch.environment import ChildSpec, job_children
from graphsplit.cluster.wire.limits import MAX_UNEXPLAINED_RECOVERIES
from matrix.forked import warm_up
from matrix.network.cases import cases
from matrix.network.cluster import Processes
from matrix.network.faults import (
    FOR_GOOD,
    SCHEDULER,
    VANISHED,
    Case,
    asker_of,
    host_of,
    links_of,
)
from matrix.network.judge import Run, judge
from matrix.network.namespaces import Hosts, remove_stale, why_not
from matrix.network.switch import Switch, ask
from matrix.table import Row, to_line

JOB = Path(__file__).with_name("job.py")
NUM_WORKERS = 3
PORT = 8118
NODE_TIMEOUT_S = 6.0
TOPO_TIMEOUT_S = 30.0
DEADLINE_S = 150.0

MOMENTS = {
    "joining": "JOIN:0",
    "registering": "REGISTERED:0",
    "planning": "AGREE:0",
    "first step": "FORWARD:0",
    "forward": "FORWARD:5",
    "backward": "BACKWARD:5",
    "optimizer": "OPTIMIZER:5",
    "snapshot": "SNAPSHOT:2",
    "eval": "EVAL:0",
    "finishing": "FINISH:0",
}
"""When each phase begins for the worker that asks the switch; see ``job.Moment``."""

_GIVEN_UP = r"recovering to generation|was lost"


class _OneRun:
    """One case, from its first process to its last."""

    def __init__(self, case: Case, hosts: Hosts, folder: Path) -> None:
        self._case = case
        self._hosts = hosts
        self._switch = folder / "switch"
        self._certificates = folder / "certificates"
        self._processes = Processes(self._see)
        self._has_healed = False
        self._vanish = case.fault == VANISHED

    def run(self, node_timeout_s: float) -> Run:
        if self._case.uses_tls:
            _make_certificates(self._certificates)
        self._node_timeout_s = node_timeout_s
        self._specs = self._make_specs()
        for name in self._specs:
            self._start(name)
        in_time = self._processes.run(DEADLINE_S)
        answer = ask(self._switch, {})
        return Run(
            case=self._case,
            processes=self._processes.all,
            in_time=in_time,
            fault_at=answer["first_at"],
            bound_s=_bound_s(self._case, node_timeout_s),
        )

    def _start(self, name: str, *, again: bool = False) -> None:
        asks = name == f"worker {asker_of(self._case.victim)}"
        moment = MOMENTS[self._case.phase] if asks else ""
        request = {"links": links_of(self._case, 1 + NUM_WORKERS), "vanish": self._vanish}
        self._processes.start(
            f"{name} again" if again else name,
            self._specs[name],
            self._hosts.names[host_of(name)],
            JOB,
            ["--switch", str(self._switch), "--moment", moment, "--request", json.dumps(request)],
        )

    def _make_specs(self) -> dict[str, ChildSpec]:
        """The processes; Gloo is what ``auto`` takes where nothing has to be encrypted."""
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("MS_", "GS_"))}
        job = {
            "MS_NODE_TIMEOUT": f"{self._node_timeout_s:g}",
            "MS_TOPO_TIMEOUT": f"{TOPO_TIMEOUT_S:g}",
            "GS_RECOVERY": self._case.policy,
            "GS_SNAPSHOT_EVERY": "2",
            "GS_TRANSPORT": "grpc" if self._case.uses_tls else "auto",
        }
        specs = job_children(
            {**kept, **job},
            num_workers=NUM_WORKERS,
            host=Hosts.address(0),
            port=PORT,
            certificates=self._certificates if self._case.uses_tls else None,
        )
        return {
            spec.name: replace(
                spec,
                variables={**spec.variables, "MS_WORKER_IP": Hosts.address(host_of(spec.name))},
            )
            for spec in specs
        }

    def _see(self, name: str, line: str) -> None:
        """A process has said something: mend the network once the victim was given up."""
        if name != SCHEDULER or self._has_healed or not re.search(_GIVEN_UP, line):
            return
        if not self._case.heals or ask(self._switch, {})["first_at"] is None:
            return
        self._has_healed = True
        ask(self._switch, {"heal": True})
        if self._case.is_replaced:
            self._start(self._case.victim, again=True)


def _bound_s(case: Case, node_timeout_s: float) -> float:
    """How long it may take until all know. A link that stays cut is recovered from in vain."""
    tries = 1 + MAX_UNEXPLAINED_RECOVERIES if case.fault == FOR_GOOD else 1
    return tries * node_timeout_s


def _make_certificates(folder: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "graphsplit.cli", "certs", "--out", folder, "-n", str(NUM_WORKERS)],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def run_case(
    case: Case, plain: Sequence[str], *, logs: Path | None = None, node_timeout_s: float
) -> Row:
    """Run one case and judge it."""
    shared_memory = set(os.listdir("/dev/shm"))
    folder = Path(tempfile.mkdtemp(prefix="gs-net-"))
    try:
        with Hosts(1 + NUM_WORKERS) as hosts, Switch(hosts, folder / "switch", seed=case.seed):
            run = _OneRun(case, hosts, folder).run(node_timeout_s)
    finally:
        shutil.rmtree(folder)
    run = Run(
        **{
            **vars(run),
            "left_behind": [
                *hosts.left_behind(),
                *(f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - shared_memory),
            ],
        }
    )
    row = judge(run, plain)
    if logs is not None:
        _keep(logs / f"{case.name}.log", run, row)
    return row


def _keep(path: Path, run: Run, row: Row) -> None:
    start = min((one.lines[0][0] for one in run.processes if one.lines), default=0.0)
    fault = "never" if run.fault_at is None else f"{run.fault_at - start:.2f}"
    told = [(moment, one.name, line) for one in run.processes for moment, line in one.lines]
    lines = sorted(told, key=lambda found: found[0])
    ends = [
        f"{(one.ended or start) - start:8.2f} {one.name} ended with status {one.status}"
        for one in run.processes
    ]
    text = [f"{row}", f"fault at {fault}"]
    text += [f"{moment - start:8.2f} [{name}] {line}" for moment, name, line in lines]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*text, *ends, ""]))


def plain_lines() -> list[str]:
    """What one process prints."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("MS_", "GS_"))}
    done = subprocess.run(
        [sys.executable, str(JOB)], env=kept, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.splitlines()


def main() -> None:
    """Run what was selected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--select", default="", help="a pattern for names of cases")
    parser.add_argument("--seeds", default="0", help="numbers with commas between")
    parser.add_argument("--node-timeout", type=float, default=NODE_TIMEOUT_S)
    parser.add_argument("--seconds", type=float, default=7200.0, help="begin no case after these")
    parser.add_argument("--plain", type=Path, help="a file that holds what one process prints")
    found = parser.parse_args()
    if why_not():
        raise SystemExit(f"left out: {why_not()}")
    remove_stale()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through what removes the hosts
    warm_up()
    plain = found.plain.read_text().splitlines() if found.plain else plain_lines()
    seeds = [int(seed) for seed in found.seeds.split(",")]
    chosen = [c for seed in seeds for c in cases(seed) if re.search(found.select, c.name)]
    done = _names_in(found.out)
    start = time.monotonic()
    for case in chosen:
        if case.name in done or time.monotonic() - start > found.seconds:
            continue
        row = run_case(case, plain, logs=found.logs, node_timeout_s=found.node_timeout)
        print(to_line(row), flush=True)
        if found.out:
            with found.out.open("a") as file:
                file.write(to_line(row) + "\n")


def _names_in(path: Path | None) -> set[str]:
    if path is None or not path.exists():
        return set()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {Case(r["process"], r["phase"], r["fault"], r["policy"], r["seed"]).name for r in rows}


if __name__ == "__main__":
    main()
