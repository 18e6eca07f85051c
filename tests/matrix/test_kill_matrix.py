"""Six runs of the matrix, started as users do, and the rules of its table."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from matrix.kill_matrix import all_cases, fault_of, run_all
from matrix.runs import FAIL_FAST, GO_ON, JOURNAL, LOOP, NEWCOMER, WAIT_REJOIN, Case
from matrix.table import MARK, PHASES, Row, cell, read, table, to_line, with_table

ROW = Row("worker 1", "forward", "SIGKILL", FAIL_FAST, 0, 137, 0.4, ok=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """One with a short name: sockets of a loader's processes are in there, of 107 characters."""
    with tempfile.TemporaryDirectory(prefix="km-") as made:
        yield Path(made)


@pytest.mark.real_processes
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("victim", "phase", "how", "policy", "seed"),
    [
        ("worker 1", "registering", "SIGKILL", FAIL_FAST, 0),
        ("worker 2", "backward", "SIGSTOP", WAIT_REJOIN, 0),
        ("worker 0", "finishing", "SIGKILL", WAIT_REJOIN, 1),
        ("scheduler", "optimizer", "SIGSTOP", JOURNAL, 0),
        ("worker 0", "eval", "SIGSTOP", LOOP, 1),
        ("worker 1", "backward", "SIGKILL", GO_ON, 0),
    ],
)
def test_a_fault_ends_the_job_as_its_policy_says(
    folder: Path, victim: str, phase: str, how: str, policy: str, seed: int
) -> None:
    fault = fault_of(victim, phase, how, seed, policy)
    case = Case(phase, policy, seed, fault, is_real=True)
    out = folder / "rows"
    run_all([case], folder, jobs=1, limit_s=1.0, out=out)
    [row] = read(out)
    output = (folder / case.name / "output").read_text()
    assert row.ok, f"{row.why}\n{output[-6000:]}"


def test_every_process_is_hit_in_every_phase_in_every_way() -> None:
    found = {(c.fault.victim, c.phase, c.fault.how, c.policy) for c in all_cases()}
    processes = ("scheduler", "worker 0", "worker 1", "worker 2")
    for policy in (FAIL_FAST, WAIT_REJOIN, LOOP, GO_ON):
        for process in processes:
            for how in ("SIGKILL", "SIGSTOP", "exception"):
                assert {p for v, p, h, at in found if (v, h, at) == (process, how, policy)} == set(
                    PHASES
                )
    assert len(list(all_cases())) >= 450
    assert len({case.name for case in all_cases()}) == len(list(all_cases()))


def test_a_run_reads_back_from_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text(to_line(ROW) + "\n")
    assert list(read(path)) == [ROW]


def test_a_cell_counts_what_was_as_it_must_be_and_names_the_longest_time() -> None:
    bad = Row("worker 1", "forward", "SIGKILL", FAIL_FAST, 1, 0, 2.25, ok=False, why="status 0")
    assert cell([ROW, bad]) == "1/2, 2.2 s"
    assert cell([]) == "-"
    assert "| worker 1, SIGKILL | 1/2, 2.2 s |" in table([ROW, bad])
    cut = Row("link 1-2", "forward", "cut", FAIL_FAST, 0, 1, 3.5, ok=True)
    document = with_table(f"# Kill matrix\n\n{MARK}\n\nof yesterday\n", [ROW, bad, cut], "abc1234")
    processes, network = document.split("## Faults of the network")
    assert "2 runs at commit `abc1234`, of which 1 ended as they must." in processes
    assert (
        "1 runs at commit `abc1234`, of which 1 ended as they must." in network
        and "link 1-2, cut" in network
    )
    assert "of yesterday" not in document
    loop = Row("worker 1", "forward", "SIGKILL", LOOP, 0, 0, 0.4, ok=True)
    again = with_table(document, [loop], "def5678")
    assert "1 runs at commit `def5678`" in again and "in own loops" in again
    assert processes in again and network in again
    replica = Row("worker 1", "forward", "SIGKILL", NEWCOMER, 1, 0, 0.4, ok=True)
    assert "among replicas" in with_table(again, [replica], "def5678")
