"""Whatever goes wrong is named in every process, and nothing is left behind."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from system.helpers import JOBS, Finished, read_logs, run_command, run_job

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(240)]
TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"


def times(job: Finished, what: str) -> list[float]:
    return [float(found) for found in re.findall(rf"{what} at ([\d.]+)", job.output)]


def assert_named_everywhere(job: Finished, *texts: str) -> None:
    """Each process names the root cause once, and the launcher at last."""
    assert job.status != 0
    told = [line for line in job.output.splitlines() if line.startswith("graphsplit: ")]
    assert told[-1].endswith(f"; exit status {job.status}")
    for process in ("scheduler", "worker 0", "worker 1", "worker 2"):
        said = "\n".join(job.lines_of(process))
        for text in texts:
            assert re.search(text, said), f"{process} does not say {text!r}:\n{job.output}"
            assert re.search(text, told[-1]), f"the last line does not say {text!r}: {told[-1]}"


def assert_told_whole_once(job: Finished, worker: int, *texts: str) -> None:
    """One worker prints everything, without frames of graphsplit; the others one line each."""
    whole = "\n".join(job.lines_of(f"worker {worker}"))
    for text in texts:
        assert re.search(text, whole), f"worker {worker} does not say {text!r}:\n{job.output}"
    assert job.output.count("Traceback (most recent call last)") == 1, job.output
    assert "graphsplit/runtime" not in job.output
    assert len(job.output.splitlines()) < 50, job.output


def test_an_error_in_a_callback_ends_all_workers_within_two_seconds():
    job = run_job("failing.py", "raises", workers=3)
    assert_named_everywhere(job, "RuntimeError: a user's bug", "in on_step_end")
    assert_told_whole_once(job, 1, r"model\.train\(1, batches", "RuntimeError: a user's bug")
    assert max(times(job, "ends")) - times(job, "trouble")[0] < 2


def test_an_error_in_an_operation_names_step_module_operation_and_line():
    job = run_job("failing.py", "bad index", workers=3)
    assert_named_everywhere(
        job, "IndexError", "train step 21, FORWARD", "operation embedding", "module table",
        r"failing\.py:\d+",
    )  # fmt: skip
    assert_told_whole_once(job, 0, "its operands: float32", "StepFailedError: IndexError")


def test_a_killed_worker_is_named_with_rank_host_pid_and_position_within_three_seconds(
    tmp_path: Path,
):
    """Killed as the tutorial does it."""
    tutorial = TUTORIAL.read_text()
    (kill,) = re.findall(r"^\$ (kill -9 .*)$", tutorial, re.MULTILINE)
    kill = kill.replace("'2'", "'1'")
    command = f"until {kill} 2>/dev/null; do :; done"  # the log may lag behind
    logs = tmp_path / "logs"
    options = ["-n", "3", "--log-dir", str(logs), "--"]
    job = run_command(["run", *options, str(JOBS / "failing.py"), "killed", command, str(tmp_path)])
    job = replace(job, logs=read_logs(logs))
    assert job.status != 0
    for process in ("scheduler", "worker 0", "worker 2"):  # worker 2 was asleep in user code
        said = "\n".join(job.lines_of(process))
        assert re.search(r"worker 1 \(host \S+, pid \d+\) was lost", said), job.output
    assert "graphsplit: worker 1 was killed by SIGKILL; last reported: " in job.output
    assert job.status == 137
    assert max(times(job, "ends")) - times(job, "trouble")[0] < 3
    lost = r"\(host \S+, pid \d+\) was lost: its process was killed by SIGKILL; last reported: "
    last = job.lines_of("worker 2")[-1]
    assert re.match(rf"\[graphsplit\] worker 2 ended because worker 1 {lost}", last), job.output
    assert re.search(rf"^\[graphsplit\] worker 4 ended because worker 2 {lost}", tutorial, re.M)


def test_a_worker_whose_connection_to_the_scheduler_broke_is_named_with_that():
    """It ends, with a status that says nothing; what it knows of its end is told everywhere."""
    job = run_job("failing.py", "cut off", workers=3)
    broke = r"the connection to the scheduler at \S+ ended \(UNAVAILABLE: "
    lost = rf"worker 1 \(host \S+, pid \d+\) was lost: its process ended with status 1: {broke}"
    assert re.search(rf"^graphsplit: {lost}", job.output, re.MULTILINE), job.output
    for process in ("scheduler", "worker 0", "worker 2"):
        assert re.search(lost, "\n".join(job.lines_of(process))), job.output
    assert max(times(job, "ends")) - times(job, "trouble")[0] < 3


def test_children_that_the_script_forks_end_and_a_module_that_nobody_was_given_is_named():
    job = run_job("failing.py", "forks", workers=3)
    assert job.status == 0, job.output
    assert {"child: -15", "pool: [1, 2]"} <= set(job.lines_of("worker 1")), job.output
    told = r"never given to a gs\.Model or .*: Linear at .*failing\.py:\d+$"
    assert re.search(told, "\n".join(job.lines_of("worker 0")), re.M), job.output


def test_loaders_that_disagree_are_named_with_the_step():
    job = run_job("failing.py", "loaders", workers=3)
    assert_named_everywhere(job, "disagree at train step 21")
    assert_told_whole_once(job, 2, "its batch has other values", "Fix: ")


def test_workers_with_other_settings_are_refused_before_step_0():
    job = run_job("failing.py", "settings", workers=3)
    found = r"lr of the optimizer's group 0 is 0\.[23]\d* on worker [12], 0\.1 on worker 0"
    assert_named_everywhere(job, found)
    assert "Traceback (most recent call last)" in job.output
    assert "graphsplit/train" not in job.output
    assert not times(job, "trouble")


def test_a_rank_that_the_job_does_not_have_is_refused_with_the_users_line():
    job = run_job("failing.py", "out of range", workers=3)
    assert_named_everywhere(job, "PlacementError", r"failing\.py:\d+")
    assert re.search(r"MS_WORKER 7 at .*, but the job has workers 0 to 2", job.output)
    assert job.output.count("Traceback (most recent call last)") == 1, job.output
    assert "Fix: " in job.output


def test_a_model_that_cannot_be_captured_is_refused_with_the_users_line():
    job = run_job("failing.py", "mask", workers=3)
    assert_named_everywhere(job, "CaptureError", r"failing\.py:\d+")
    assert job.output.count("Traceback (most recent call last)") == 1, job.output
    assert "torch.where" in job.output


def test_reading_a_value_that_lives_elsewhere_names_its_owner_and_placing_late_is_refused():
    job = run_job("failing.py", "reads, then places late", workers=3)
    assert job.status != 0
    for process in ("worker 0", "worker 2"):
        said = "\n".join(job.lines_of(process))
        assert re.search("reading: .*'hidden.weight' lives on worker 1", said), job.output
    assert "already planned" in job.output
