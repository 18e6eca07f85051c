"""Python state that changes, in real processes: the bits of the plain loop, or a named error."""

from __future__ import annotations

import re

import pytest

from system.helpers import Finished, run_job

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def job() -> Finished:
    """First what changes on both workers, captured again now and then; then on one alone."""
    again = {"GS_RECAPTURE_EVERY": "3"}
    return run_job("python_values.py", "follow", "disagree", workers=2, **again)


def test_globals_closures_modes_and_layers_count(job: Finished) -> None:
    assert "equal" in job.said_by("worker 0"), job.output
    assert "equal" in job.said_by("worker 1")


def test_a_worker_that_alone_changes_a_value_is_named_with_both_values(job: Finished) -> None:
    assert job.status != 0
    for process in ("scheduler", "worker 0", "worker 1"):
        said = "\n".join(job.lines_of(process))
        assert "net.bn.eps is 0.25 on worker 1, 1e-05 on worker 0" in said, job.output
    (changed,) = (float(found) for found in re.findall(r"changed at ([\d.]+)", job.output))
    ended = [float(found) for found in re.findall(r"ended at ([\d.]+)", job.output)]
    assert len(ended) == 2
    assert max(ended) - changed < 2
