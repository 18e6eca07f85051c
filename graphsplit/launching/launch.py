"""``gs.launch`` and ``gs.launcher``: a function on workers of this machine."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch

from graphsplit.cli.launch.request import CallAnswer, CallRequest, JobOptions
from graphsplit.encoding import memory_files as files
from graphsplit.errors import ConfigurationError, JobFailedError
from graphsplit.launching import call, outcome, process
from graphsplit.launching.outcome import Raised, Returned
from graphsplit.root_cause import FailureCause
from graphsplit.text import called, need

WORKER = "graphsplit.launching.worker"
_FEWEST = 2  # fewer cut nothing
_Fn = Callable[..., Any]
_Launched = Callable[..., list[Any]]


@called("gs.launch")
def launch(
    fn: Callable[..., Any],
    workers: int | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout_s: float | None = None,
    restarts: int = 0,
    log_dir: str | Path | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on workers of this machine, and wait for their results.

    Starts a scheduler and the workers as ``graphsplit run`` does, from a script, a notebook or a
    prompt. Each worker has joined the job when ``fn`` begins (``gs.init()`` in it does nothing),
    and begins with the caller's random generators. What workers print is shown, prefixed by
    worker. Ctrl-C, or a notebook's interrupt, ends all.

    Args:
        fn: The function. It reaches the workers with all that it uses, by ``cloudpickle``; of what
            it changes there the caller sees nothing.
        workers: How many. None: ``MS_WORKER_NUM``, else one for each GPU of this machine, and 2
            at least.
        args: Its arguments, the same on every worker.
        kwargs: Its arguments by name.
        timeout_s: End the job after this time.
        restarts: How often to start again what was lost, as ``graphsplit run --restarts``.
        log_dir: A folder where each process's output is written as well.

    Returns:
        What ``fn`` returned on each worker, in the order of ranks: tensors, numbers, texts, bytes,
        None, and lists, tuples, sets and mappings of them.

    Raises:
        ConfigurationError: An argument is wrong, ``fn`` cannot be sent, or its result be returned;
            or this process is itself part of a job.
        Exception: The root cause, where ``fn`` raised on a worker; its ``__cause__`` is a
            ``JobFailedError`` with the worker's traceback.
        JobFailedError: A worker was lost, it took too long, or its error is of a class that this
            process does not know.
    """
    workers = _number_of(workers)
    check_options("gs.launch", workers, timeout_s, restarts, log_dir)
    check_call(fn, workers, timeout_s, restarts)
    _check_given(args, kwargs)
    wanted = call.LaunchedCall(fn, tuple(args), dict(kwargs or {}))
    body = bytearray(call.pickled(wanted))
    with files.memory_files(2 + workers) as (first, answer_file, *results):
        files.write(first, [torch.frombuffer(body, dtype=torch.uint8)])
        job = JobOptions(
            num_workers=workers,
            script=Path((sys.argv[0] if sys.argv else "") or "-c"),
            arguments=tuple(map(str, (first, *results))),
            host="127.0.0.1",
            log_dir=None if log_dir is None else Path(os.path.abspath(log_dir)),
            restarts=restarts,
            called=WORKER,
            kept=(first, *results),
        )
        answer = process.run(CallRequest(job, os.getpid(), answer_file, timeout_s))
        return results_of(answer, [outcome.read(files.read(file)) for file in results], wanted)


@overload
def launcher(fn: _Fn, /) -> _Launched: ...
@overload
def launcher(
    *,
    workers: int | None = None,
    timeout_s: float | None = None,
    restarts: int = 0,
    log_dir: str | Path | None = None,
) -> Callable[[_Fn], _Launched]: ...
@called("gs.launcher")
def launcher(
    fn: Any = None,
    /,
    *,
    workers: int | None = None,
    timeout_s: float | None = None,
    restarts: int = 0,
    log_dir: str | Path | None = None,
) -> Any:
    """Decorate a function: each call of it is a ``launch``, and returns the list of results.

    ``@gs.launcher`` and ``@gs.launcher(workers=4)`` both work; options are those of ``launch``. The
    function itself is ``fn.__wrapped__``.
    """
    options: dict[str, Any] = {"timeout_s": timeout_s, "restarts": restarts, "log_dir": log_dir}
    check_options("gs.launcher", _FEWEST if workers is None else workers, **options)

    def decorate(fn: _Fn) -> _Launched:
        example = "a function: @gs.launcher, or @gs.launcher(workers=4), above it"
        need("gs.launcher", "fn", fn, callable(fn), example)

        @functools.wraps(fn)
        def launched(*args: Any, **kwargs: Any) -> list[Any]:
            return launch(fn, workers, args, kwargs, **options)

        return launched

    return decorate if fn is None else decorate(fn)


def _number_of(workers: int | None) -> int:
    if workers is not None:
        return workers
    wanted = os.environ.get("MS_WORKER_NUM", "").strip()
    if wanted.isdecimal():
        return int(wanted)
    return max(_FEWEST, torch.cuda.device_count())


def check_call(
    fn: Any, workers: Any, timeout_s: Any, restarts: Any, *, called: str = "gs.launch"
) -> None:
    """Refuse what cannot be called on workers; ``called`` names the user's call.

    Raises:
        ConfigurationError: An argument is wrong, or this process is part of a job.
    """
    if not callable(fn):
        raise ConfigurationError(
            f"gs.launch was given {fn!r:.80}, which is no function\n  Fix: pass the function, its "
            f"arguments apart: gs.launch(train, workers=4, args=(10,))"
        )
    check_options(called, workers, timeout_s, restarts)
    if os.environ.get("MS_ROLE", "").strip():
        raise ConfigurationError(
            f"{called}({call.name_of(fn)}) was called in a process of a job (MS_ROLE is "
            f"{os.environ['MS_ROLE']}), which cannot start another\n"
            f"  Fix: call the function itself here, or start the script by `python` instead of "
            f"`graphsplit run`."
        )


def check_options(
    called: str, workers: Any, timeout_s: Any, restarts: Any, log_dir: Any = None
) -> None:
    """Refuse options of a call on workers that are of a wrong kind.

    Raises:
        ConfigurationError: One is.
    """
    for name, value, least in (("workers", workers, 1), ("restarts", restarts, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(
                f"{called}(..., {name}={value!r}): expected a whole number, at least {least}\n"
                f"  Fix: {called}(fn, {name}={max(least, _FEWEST)})"
            )
    is_time = isinstance(timeout_s, (int, float)) and timeout_s > 0
    need(called, "timeout_s", timeout_s, timeout_s is None or is_time, "seconds, or None")
    is_path = log_dir is None or isinstance(log_dir, (str, os.PathLike))
    need(called, "log_dir", log_dir, is_path, "the path of a folder, or None")


def _check_given(args: Any, kwargs: Any) -> None:
    is_several = isinstance(args, Sequence) and not isinstance(args, (str, bytes))
    need("gs.launch", "args", args, is_several, "the function's arguments, as in args=(10,)")
    is_named = kwargs is None or (
        isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    )
    need("gs.launch", "kwargs", kwargs, is_named, "a dictionary, as in kwargs={'rate': 0.1}")


def results_of(
    answer: CallAnswer, found: Sequence[Returned | Raised | None], wanted: call.LaunchedCall
) -> list[Any]:
    """The values that all have returned, in the order of ranks.

    Raises:
        Exception: The root cause, where the job has failed.
    """
    if answer.mistake:
        raise ConfigurationError(answer.mistake)
    if answer.cause is not None:
        _raise(answer.cause, found)
    missing = [rank for rank, one in enumerate(found) if not isinstance(one, Returned)]
    if missing:
        name = call.name_of(wanted.fn)
        raise JobFailedError(
            f"{name} left worker {missing[0]} without a result, by sys.exit()\n"
            f"  Fix: return from {name}, None if there is nothing to tell."
        )
    return [one.value for one in found if isinstance(one, Returned)]


def _raise(cause: FailureCause, found: Sequence[Returned | Raised | None]) -> None:
    own = found[cause.rank] if 0 <= cause.rank < len(found) else None
    if not isinstance(own, Raised) or cause.kind != "exception":
        raise JobFailedError(cause.message, cause=cause)
    told = FailureCause("exception", own.text, cause.rank, traceback=own.traceback)
    text = f"{cause.message}\n\non worker {cause.rank}:\n{own.traceback.rstrip()}"
    failed = JobFailedError(text, cause=told)
    if own.error is None:
        raise failed
    raise own.error from failed
