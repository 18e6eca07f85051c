"""``gs.launch`` without workers: what is refused, what travels, how outcomes come back."""

from __future__ import annotations

import linecache
import random
import sys
import threading
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

import graphsplit as gs
from graphsplit.cli.call import cause_of
from graphsplit.cli.launch.request import CallAnswer
from graphsplit.cli.launch.verdict import JobVerdict
from graphsplit.encoding import memory_files as files
from graphsplit.errors import ConfigurationError, JobFailedError
from graphsplit.launching import call, launch, outcome, process
from graphsplit.launching.call import LaunchedCall
from graphsplit.launching.outcome import Raised, Returned
from graphsplit.root_cause import FailureCause

CONSTANT = 3


class Colour(Enum):
    RED = 1


class Known(Exception):
    pass


class Odd(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(first + second)


def double(x: int, y: int = 2) -> int:
    return x * y + CONSTANT


def there_and_back(pieces: list[torch.Tensor]) -> Any:
    with files.memory_files(1) as (file,):
        files.write(file, [torch.ones(10_000, dtype=torch.uint8)])  # of one that was started before
        files.write(file, pieces)
        return outcome.read(files.read(file))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"workers": 0}, r"workers=0\): expected a whole number, at least 1"),
        ({"workers": 1.5}, "workers=1.5"),
        ({"workers": True}, "workers=True"),
        ({"restarts": -1}, "restarts=-1"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"fn": 3}, r"given 3, which is no function\n  Fix: pass the function"),
        ({"args": (threading.Lock(),)}, r"argument 0 \(_thread.lock\) is at fault"),
        ({"kwargs": {"y": sys._getframe()}}, r"argument 'y' \(builtins.frame\) is at fault"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        gs.launch(**{"fn": double, "workers": 2, **options})


def test_what_a_function_uses_and_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigurationError, match=r"variable 'lock' that it uses \(_thread\.lock\)"):
        gs.launch(lambda: lock.locked(), workers=2)


def test_a_process_of_a_job_cannot_start_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    with pytest.raises(ConfigurationError, match=r"in a process of a job.*\n  Fix: call the"):
        gs.launch(double, workers=2)


def test_a_call_brings_its_sources_and_generators() -> None:
    linecache.cache["<cell 1>"] = (1, None, ["a line\n"], "<cell 1>")
    argv, paths = list(sys.argv), list(sys.path)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    sent = call.pickled(LaunchedCall(lambda x: double(x, y=5), (torch.arange(3),), {}))
    expected = random.random(), np.random.rand(), torch.rand(1)
    del linecache.cache["<cell 1>"]
    sys.argv.append("other")
    sys.path.append("/other")
    found = call.received(torch.frombuffer(bytearray(sent), dtype=torch.uint8))
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected
    assert linecache.getline("<cell 1>", 1) == "a line\n"
    assert (sys.argv, sys.path) == (argv, paths)
    assert torch.equal(found.fn(*found.args), torch.tensor([3, 8, 13]))
    del linecache.cache["<cell 1>"]


def test_a_function_may_name_what_graphsplit_has_for_it() -> None:
    """`graphsplit.distribute` is a package, too; so are several others of these names."""

    def uses() -> Any:
        return gs.distribute, gs.loop, gs.launch, gs.metrics, gs.errors

    sent = call.pickled(LaunchedCall(uses, (), {}))
    found = call.received(torch.frombuffer(bytearray(sent), dtype=torch.uint8)).fn()
    assert found == uses() and found[0](torch.nn.Linear(1, 1)).weight.shape == (1, 1)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": [1, 2.5, (True, "x")], 3: {"s", "t"}, (1, 2): b"\0", Colour.RED: float("inf")},
        [torch.arange(6).reshape(2, 3).t(), torch.tensor(float("nan")), torch.empty(0)],
        torch.randn(3, requires_grad=True).bfloat16(),
    ],
)
def test_values_come_back_bit_for_bit(value: Any) -> None:
    found = there_and_back(outcome.returned(value, function="fn"))
    assert isinstance(found, Returned)
    mine, theirs = ([v] if isinstance(v, torch.Tensor) else v for v in (value, found.value))
    assert type(mine) is type(theirs)
    if not isinstance(mine, list):
        assert mine == theirs
        return
    for one, other in zip(mine, theirs, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        as_bytes = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other)]
        assert torch.equal(*as_bytes) and not other.requires_grad


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            {"net": torch.nn.Linear(1, 1)},
            "the result of fn/net is a torch.nn.modules.linear.Linear",
        ),
        (np.zeros(3, object), "the result of fn is a numpy.ndarray and has no safe form"),
    ],
)
def test_a_result_without_a_safe_form_is_named_with_the_way_out(value: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text + r".*\n  Fix: return net\.state_dict\(\)"):
        outcome.returned(value, function="fn")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        KeyError("k"),
        FileNotFoundError(2, "No such file or directory", "x.txt"),
        Known("text", 3),
        gs.errors.StepFailedError("it failed"),
    ],
)
def test_an_error_comes_back_as_itself(error: Exception) -> None:
    found = there_and_back(outcome.raised(error))
    assert isinstance(found, Raised) and type(found.error) is type(error)
    assert (found.error.args, str(found.error)) == (error.args, str(error))


def unknown() -> Exception:
    class Hidden(Exception):
        pass

    return Hidden("no")


@pytest.mark.parametrize("error", [Odd(1, 2), ValueError(object()), unknown()])
def test_an_error_that_cannot_be_made_again_is_text(error: Exception) -> None:
    found = there_and_back(outcome.raised(error))
    assert isinstance(found, Raised) and found.error is None
    assert found.text == f"{type(error).__name__}: {error}"


def test_half_a_result_is_none() -> None:
    (header, memory) = outcome.returned(torch.ones(100), function="fn")
    assert there_and_back([header, memory[:100]]) is None
    assert there_and_back([header[:5]]) is None
    assert there_and_back([]) is None


class Launcher:
    """Answers in place of the launcher; each worker leaves what it is told to."""

    def __init__(self, cause: FailureCause | None, *left: list[torch.Tensor], mistake: str = ""):
        self._answer, self._left = CallAnswer(cause, mistake), left

    def run(self, request: Any) -> CallAnswer:
        self.request = request
        for file, pieces in zip(request.job.kept[1:], self._left, strict=True):
            files.write(file, pieces)
        return self._answer


def results(monkeypatch: pytest.MonkeyPatch, launcher: Launcher, **options: Any) -> list[Any]:
    monkeypatch.setattr(process, "run", launcher.run)
    return gs.launch(double, 2, (1,), **options)


ONE = outcome.returned(1, function="double")


def test_results_stand_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    two = outcome.returned([2], function="double")
    assert results(monkeypatch, Launcher(None, ONE, two)) == [1, [2]]


@pytest.mark.parametrize(
    ("ended", "kind", "rank"),
    [
        (JobVerdict(137, "worker 1 was killed by SIGKILL", 1), "lost", 1),
        (JobVerdict(124, "not over after 3 s"), "timeout", -1),
        (JobVerdict(143, "interrupted by SIGTERM"), "interrupted", -1),
        (JobVerdict(3, "worker 0 ended with status 3", 0), "exception", 0),
    ],
)
def test_a_job_that_fails_raises_its_cause(
    monkeypatch: pytest.MonkeyPatch, ended: JobVerdict, kind: str, rank: int
) -> None:
    with pytest.raises(JobFailedError, match=ended.reason) as caught:
        results(monkeypatch, Launcher(cause_of(ended), ONE, []))
    assert (caught.value.cause.kind, caught.value.cause.rank) == (kind, rank)


def test_the_error_of_the_worker_to_blame_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    left = outcome.raised(JobFailedError("an echo")), outcome.raised(Known("the cause"))
    cause = cause_of(JobVerdict(1, "worker 1 failed: Known: the cause", 1))
    with pytest.raises(Known, match="the cause") as caught:
        results(monkeypatch, Launcher(cause, *left))
    assert isinstance(caught.value.__cause__, JobFailedError)
    with pytest.raises(JobFailedError, match=r"on worker 1:\n.*\.Odd: 3"):
        results(monkeypatch, Launcher(cause, left[0], outcome.raised(Odd(1, 2))))


def test_a_function_that_leaves_by_sys_exit_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobFailedError, match="double left worker 1 without a result"):
        results(monkeypatch, Launcher(None, ONE, []))


def test_a_job_that_cannot_be_started_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="fails fast"):
        results(monkeypatch, Launcher(None, [], [], mistake="a job that fails fast"), restarts=1)


def test_a_decorated_function_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(None, ONE, ONE)
    monkeypatch.setattr(process, "run", launcher.run)
    monkeypatch.delenv("MS_WORKER_NUM", raising=False)
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 0)

    bare = gs.launcher(double)
    assert (bare(1, y=4), bare.__name__, bare.__wrapped__) == ([1, 1], "double", double)
    assert launcher.request.job.num_workers == 2 and launcher.request.limit_s is None
    assert gs.launcher(workers=2, timeout_s=9.0)(double)(1) == [1, 1]
    assert launcher.request.limit_s == 9.0
    monkeypatch.setenv("MS_WORKER_NUM", "5")
    with pytest.raises(ValueError, match="zip"):
        bare(1)  # two have left something here
    assert launcher.request.job.num_workers == 5
    with pytest.raises(ConfigurationError, match="fn=3"):
        gs.launcher(3)
    with pytest.raises(TypeError, match="worker"):
        gs.launcher(worker=3)(double)
