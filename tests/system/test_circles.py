"""One worker leaves what the others do: all end at once, and say who, what and where."""

from __future__ import annotations

import re

import pytest
from quiet_time import quiet_time

from system.helpers import Finished, run_job

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(240)]

LINE = r"tests/system/jobs/circles.py:\d+, in"
FORMS = {
    "a callback": ("state_dict", "on_step_end", "train", 2),
    "a full queue": ("state_dict", "on_step_end", "train", 2),
    "batches that look other": ("predict", "on_step_end", "train", 2),
    "after training": ("predict", "main", "train", 2),
    "one state_dict more": ("state_dict", "main", "train", 2),
    "an own loop": ("state_dict", "own_loop", "backward", 3),
    "an own loop that asks": ("a value's item", "own_loop", "backward", 2),
    "an own loop of two": ("a call of network 2, Sequential", "own_loop", "a value's item", 2),
}
ENDS = {
    "before the end": rf"worker 0 is at the end .*; worker 1 is in save\(\) at {LINE} main",
    "sys.exit": rf"worker 1 .* failed: SystemExit: 0: .*; {LINE} on_step_end",
    "os._exit": rf"worker 1 .* was lost: .*; last reported: os\._exit\(0\) at {LINE} on_step_end, "
    r"from .*, in main, ",
    "before the first step": rf"worker 1 .* was lost: .*; last reported: os\._exit\(0\) at {LINE} "
    r"main, .*before its first step",
    "an exception": rf"worker 1 .* failed: RuntimeError: a user's bug; {LINE} on_step_end",
    "Ctrl-C": rf"worker 1 was killed by SIGINT; {LINE} on_step_end",
}


def end_of(what: str, workers: int) -> Finished:
    """A job all of which has ended within three seconds."""
    job = run_job("circles.py", what, workers=workers)
    ended_at = quiet_time()
    troubled_at = max(map(float, re.findall(r"trouble at ([\d.]+)", job.output)))
    assert ended_at - troubled_at < 3, job.output
    return job


def assert_told(job: Finished, pattern: str, workers: int) -> None:
    """Each process says in its log why the job ended; one line for all is shown, the last."""
    processes = ["scheduler", *(f"worker {rank}" for rank in range(workers))]
    for told in (*map(job.lines_of, processes), job.output.splitlines()[-1:]):
        assert re.search(pattern, "\n".join(told)), (told, job.output)
    assert " ended because " not in job.output


@pytest.mark.parametrize("what", FORMS)
def test_a_call_that_one_worker_makes_ends_the_job_at_once(what: str):
    call, function, other, workers = FORMS[what]
    job = end_of(what, workers)
    assert job.status == 1
    mine = rf"worker 1 is in {call}\(\)( of .* from worker \d)? at {LINE} {function}"
    assert_told(job, mine, workers)
    # Two calls that cannot meet are proof enough: a third worker may not have made its first one.
    others = "worker 0 is" if workers == 2 else "(workers 0, 2 are|worker [02] is)"
    there = rf"{others} in {other}\(\)( of .* from worker \d)? at {LINE} (main|own_loop)"
    assert_told(job, there, workers)
    is_asked = "a value's item" in (call, other)
    fix = "ask for the value" if is_asked else f"call {call}()"
    assert f"{fix} on every worker" in job.output


@pytest.mark.parametrize(
    ("what", "function", "why"),
    [
        ("a metric", "metric", "a metric: metrics run on one worker alone"),
        ("a loss", "loss_fn", "forward or a loss: they are recorded once"),
    ],
)
def test_a_call_where_the_others_do_not_make_it_ends_the_job_at_once(
    what: str, function: str, why: str
):
    job = end_of(what, workers=3)
    assert job.status == 1
    told = rf"worker 1 .* failed: ConfigurationError: barrier\(\) cannot be called in {why}"
    assert re.search(rf"{told}.*; {LINE} {function}", job.output.splitlines()[-1]), job.output
    assert "or in a callback" in job.output


@pytest.mark.parametrize("what", ENDS)
def test_a_worker_that_leaves_ends_the_job_at_once(what: str):
    job = end_of(what, workers=2)
    assert job.status == (130 if what == "Ctrl-C" else 1)
    assert re.search(ENDS[what], job.output.splitlines()[-1]), job.output
    heard = "\n".join(job.lines_of("worker 0"))
    assert re.search(r"\[graphsplit\] worker 0 ended because .*worker 1", heard), heard
    assert "worker 0 ended because" not in job.output


def test_a_call_in_a_thread_is_told_once():
    job = end_of("a thread", workers=2)
    told = [line for line in job.lines_of("worker 1") if "is called while another thread" in line]
    assert len(told) == 2, job.output  # that it ended, and the error as Python prints it
    assert "ended because of an error in a thread" in told[0]
    assert "another thread is in train() at tests/system/jobs/circles.py:" in told[1]


def test_a_child_that_a_callback_forks_ends_as_any_other_process():
    assert run_job("circles.py", "a fork", workers=2).status == 0


def test_a_child_that_a_callback_forks_calls_nothing_of_the_job():
    job = run_job("circles.py", "a call in a fork", workers=2)
    assert job.status == 0, job.output
    assert "a child process that this worker has forked makes a call of the whole job" in job.output
    assert "circles.py:" in job.output and "context.model.state_dict()" in job.output
