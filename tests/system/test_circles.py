"""One worker leaves what the others do: all end at once, and say who, what and where."""

from __future__ import annotations

import re
import time

import pytest

from system.helpers import run_job

pytestmark = [pytest.mark.real_processes, pytest.mark.timeout(120)]

LINE = r"tests/system/jobs/circles.py:\d+, in"
FORMS = {
    "a callback": ("state_dict", "on_step_end", "train"),
    "a full queue": ("state_dict", "on_step_end", "train"),
    "a metric": ("barrier", "metric", "eval"),
    "a loss": ("barrier", "loss_fn", "train"),
    "after training": ("predict", "main", "train"),
    "one state_dict more": ("state_dict", "main", "train"),
    "an own loop": ("state_dict", "own_loop", "backward"),
    "an own loop that asks": ("a value's item", "own_loop", "backward"),
}
ENDS = {
    "before the end": rf"worker 0 is at the end .*; worker 1 is in save\(\) at {LINE} main",
    "sys.exit": rf"worker 1 .* failed: SystemExit: 0: .*; {LINE} on_step_end",
    "os._exit": rf"worker 1 .* was lost: .*; last position: {LINE} main",
    "before the first step": "worker 1 .* was lost: ",
    "an exception": rf"worker 1 .* failed: RuntimeError: a user's bug; {LINE} on_step_end",
    "Ctrl-C": rf"worker 1 was killed by SIGINT; {LINE} on_step_end",
}


def end_of(what: str, workers: int = 2) -> tuple[int, str]:
    """The status and the output of a job all of which has ended within three seconds."""
    job = run_job("circles.py", what, workers=workers)
    ended_at = time.time()
    troubled_at = max(map(float, re.findall(r"trouble at ([\d.]+)", job.output)))
    assert ended_at - troubled_at < 3, job.output
    return job.status, job.output


@pytest.mark.parametrize("what", FORMS)
def test_a_call_that_one_worker_makes_ends_the_job_at_once(what: str):
    call, function, other = FORMS[what]
    status, output = end_of(what)
    assert status == 1
    mine = rf"worker 1 is in {call}\(\) at {LINE} {function}"
    others = rf"{other}\(\) at {LINE} (main|own_loop)"
    for process in ("[scheduler] the job", "[worker 1]", "graphsplit:"):
        told = "\n".join(line for line in output.splitlines() if line.startswith(process))
        assert re.search(mine, told), output
        assert re.search(f"worker 0 is in {others}", told), output
    assert re.search("worker 0 .*" + mine, output)
    fix = "ask for the value" if call.startswith("a value") else f"call {call}()"
    assert f"{fix} on every worker" in output


@pytest.mark.parametrize("what", ["a loss", "a metric", "an own loop"])
def test_a_call_that_one_worker_of_three_makes_ends_the_job_at_once(what: str):
    call, function, _ = FORMS[what]
    status, output = end_of(what, workers=3)
    assert status == 1
    mine = rf"worker 1 is in {call}\(\) at {LINE} {function}"
    for process in ("[scheduler] the job", "[worker 0]", "[worker 1]", "[worker 2]", "graphsplit:"):
        told = "\n".join(line for line in output.splitlines() if line.startswith(process))
        assert re.search(mine, told), output


@pytest.mark.parametrize("what", ENDS)
def test_a_worker_that_leaves_ends_the_job_at_once(what: str):
    status, output = end_of(what)
    assert status == (130 if what == "Ctrl-C" else 1)
    assert re.search(ENDS[what], output.splitlines()[-1]), output
    assert re.search(r"worker 0\] \[graphsplit\] worker 0 ended because .*worker 1", output), output


def test_a_child_that_a_callback_forks_ends_as_any_other_process():
    assert run_job("circles.py", "a fork", workers=2).status == 0
