"""Python state that changes, in real processes: the bits of the plain loop, or a named error."""

from __future__ import annotations

import re

import pytest

from system.helpers import run_job

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(240)]


def test_globals_closures_modes_and_layers_count() -> None:
    job = run_job("python_values.py", "follow", workers=2)
    assert job.status == 0, job.output
    assert "equal" in job.said_by("worker 0")
    assert "equal" in job.said_by("worker 1")


def test_a_worker_that_alone_changes_a_value_is_named_with_both_values() -> None:
    job = run_job("python_values.py", "disagree", workers=2)
    assert job.status != 0
    for process in ("scheduler", "worker 0", "worker 1"):
        said = "\n".join(job.lines_of(process))
        assert "net.bn.eps is 0.25 on worker 1, 1e-05 on worker 0" in said, job.output
    (changed,) = (float(found) for found in re.findall(r"changed at ([\d.]+)", job.output))
    ended = [float(found) for found in re.findall(r"ended at ([\d.]+)", job.output)]
    assert len(ended) == 2
    assert max(ended) - changed < 2
