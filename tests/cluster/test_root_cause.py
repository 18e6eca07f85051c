"""What people read when a job fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphsplit.errors import JobFailedError, MembershipChangedError
from graphsplit.failure import AbortSignal
from graphsplit.root_cause import FailureCause, Location

RAISED = FailureCause(
    "exception",
    "IndexError: index out of range in self",
    rank=0,
    host="alpha",
    pid=17,
    position="train step 20, FORWARD mb0 seg0 (table)",
    traceback="Traceback (most recent call last):\n  ...\nIndexError: index out of range in self\n",
    location=Location(step=20, operation="embedding", module="table", source="train.py:28"),
)
KILLED = FailureCause(
    "lost",
    "lost: its connection broke, so its process was killed or crashed",
    rank=1,
    host="beta",
    pid=18,
    position="train step 13, RECEIVE mb0 edge5 (gradient of linear, worker 2 -> worker 1)",
    location=Location(step=13, operation="linear", edge=5, waits_for=2),
)
APART = FailureCause(
    "disagreement",
    "workers 0 and 1 disagree about 'plan 0': line 3 is the first that differs\n"
    "  worker 0: SGD lr=0.1\n  worker 1: SGD lr=0.2\n"
    "  Fix: every worker must run the same script, on the same model, placement and schedule",
)
REFUSED = FailureCause(
    "exception",
    "PlacementError: a placement cannot be honoured:\n"
    "  module 'head' is placed on MS_WORKER 7 at train.py:53, but the job has workers 0 to 2\n"
    "  Fix: start 8 workers (graphsplit run -n 8, or MS_WORKER_NUM=8), or choose ranks below 3.",
    rank=2,
    traceback="Traceback ...",
    location=Location(source="train.py:64, in main"),
)
CAUSES = {
    "the script is at fault": REFUSED,
    "a worker raised": RAISED,
    "a worker was killed": KILLED,
    "the workers disagree": APART,
    "a value did not come": FailureCause(
        "timeout",
        "ReceiveTimeoutError: relu (conv1): worker 0 -> worker 1 (plan 0, edge 7): nothing for "
        "300 s, and worker 0 made no progress",
        rank=1,
        host="beta",
        pid=18,
        position="train step 3, RECEIVE mb0 edge7 (value of relu, conv1, worker 0 -> worker 1)",
        traceback="Traceback ...",
        location=Location(step=3, edge=7, source="train.py:31"),
    ),
    "the job was interrupted": FailureCause("interrupted", "the job was interrupted by SIGTERM"),
    "the scheduler is gone": FailureCause(
        "scheduler_lost", "lost: the connection to the scheduler at 10.0.0.1:8118 ended (reset)"
    ),
}


def test_what_each_process_says_of_a_cause(golden):
    lines = []
    for name, cause in CAUSES.items():
        said = (("heard", cause.heard()), ("error", cause.describe()), ("place", cause.story()))
        lines += [f"# {name}", *(f"{where}: {text}" for where, text in said), ""]
    golden("root_causes.txt", "\n".join(lines))


def test_everybody_is_told_what_to_do_unless_it_is_a_long_story():
    for cause in CAUSES.values():
        short = replace(cause, message=f"{cause.message}\nmore\n  Fix: x")
        assert short.describe().endswith("\nmore\n  Fix: x")
        long = replace(cause, message=cause.message + "\nmore" * 9)
        assert "\n" not in long.describe()
        assert "\n" not in long.summary()
        assert "\n" not in short.heard()
    assert FailureCause("lost", "").summary() == "lost"


def test_the_error_of_another_worker_carries_everything():
    abort = AbortSignal()
    abort.set(RAISED)
    with pytest.raises(JobFailedError, match=r"index out of range in self; train\.py:28") as caught:
        abort.raise_if_set()
    cause = caught.value.cause
    assert cause is RAISED
    assert (cause.rank, cause.host, cause.location.step) == (0, "alpha", 20)
    assert (cause.location.operation, cause.location.module) == ("embedding", "table")
    assert not cause.is_retryable
    assert "Traceback" not in str(caught.value)


def test_the_error_of_a_generation_carries_its_cause_too():
    abort = AbortSignal(4)
    abort.set(KILLED, recovers=True)
    with pytest.raises(MembershipChangedError, match="generation 4 is over") as caught:
        abort.raise_if_set()
    assert caught.value.cause is KILLED
    assert caught.value.cause.is_retryable
