"""Whatever goes wrong is named in every process, and nothing is left behind."""

from __future__ import annotations

import re

import pytest

from system.helpers import Finished, run_job

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(120)]


def times(job: Finished, what: str) -> list[float]:
    return [float(found) for found in re.findall(rf"{what} at ([\d.]+)", job.output)]


def assert_named_everywhere(job: Finished, *texts: str) -> None:
    assert job.status != 0
    for process in ("scheduler", "worker 0", "worker 1", "worker 2"):
        said = "\n".join(job.lines_of(process))
        for text in texts:
            assert re.search(text, said), f"{process} does not say {text!r}:\n{job.output}"


def test_an_error_in_a_callback_ends_all_workers_within_two_seconds():
    job = run_job("failing.py", "raises", workers=3)
    assert_named_everywhere(job, "a user's bug", "on_step_end", "failing.py")
    assert max(times(job, "ends")) - times(job, "trouble")[0] < 2


def test_an_error_in_an_operation_names_step_module_operation_and_line():
    job = run_job("failing.py", "bad index", workers=3)
    assert_named_everywhere(
        job, "IndexError", "train step 20, FORWARD", "operation embedding", "module table",
        r"failing\.py:\d+",
    )  # fmt: skip


def test_a_killed_worker_is_named_with_rank_host_pid_and_position_within_three_seconds():
    job = run_job("failing.py", "killed", workers=3)
    assert job.status != 0
    for process in ("scheduler", "worker 0", "worker 2"):  # worker 2 was asleep in user code
        said = "\n".join(job.lines_of(process))
        assert re.search(r"worker 1 \(host \S+, pid \d+\): lost", said), job.output
    assert max(times(job, "ends")) - times(job, "trouble")[0] < 3


def test_a_worker_that_leaves_early_ends_the_job():
    job = run_job("failing.py", "leaves", workers=3)
    assert job.status != 0
    assert "SystemExit" in job.output


def test_loaders_that_disagree_are_named_with_the_step():
    job = run_job("failing.py", "loaders", workers=3)
    assert_named_everywhere(job, "disagree at train step 20", "other values")


def test_workers_with_other_settings_are_refused_before_step_0():
    job = run_job("failing.py", "settings", workers=3)
    assert_named_everywhere(job, "disagree", "lr")
    assert not times(job, "trouble")


def test_a_rank_that_the_job_does_not_have_is_refused_with_the_users_line():
    job = run_job("failing.py", "out of range", workers=3)
    assert_named_everywhere(job, "MS_WORKER 7", "workers 0 to 2", r"failing\.py:\d+", "Fix")


def test_a_model_that_cannot_be_captured_is_refused_with_the_users_line():
    job = run_job("failing.py", "branch", workers=3)
    assert_named_everywhere(job, "depends on the values", r"failing\.py:\d+", "torch.where")


def test_reading_a_value_that_lives_elsewhere_names_its_owner():
    job = run_job("failing.py", "reads", workers=3)
    assert job.status != 0
    assert "'hidden.weight' lives on worker 1" in job.output


def test_placing_after_planning_is_refused():
    job = run_job("failing.py", "places late", workers=3)
    assert job.status != 0
    assert "already planned" in job.output
