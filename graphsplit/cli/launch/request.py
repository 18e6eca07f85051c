"""Request and answer between ``gs.launch`` and the launcher that it starts, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from graphsplit.root_cause import FailureCause


@dataclass(frozen=True)
class CallRequest:
    """A function to call on workers of this machine.

    Attributes:
        num_workers: How many workers there are.
        caller: The process that asks; the job ends when it does.
        script: The file that it runs, if any; what that imports first is imported once.
        worker: The module that each worker runs.
        call: The open file with the function.
        results: The open files for what it returns, by rank.
        answer: The open file for the launcher's own answer.
        restarts: How often to start again what was lost.
        limit_s: How long the job may take; None: for ever.
        log_dir: Where each process's output is also written.
    """

    num_workers: int
    caller: int
    script: str
    worker: str
    call: int
    results: tuple[int, ...]
    answer: int
    restarts: int
    limit_s: float | None
    log_dir: str | None


@dataclass(frozen=True)
class CallAnswer:
    """How the job ended.

    Attributes:
        cause: Why it failed; None if it did not.
        mistake: Why no job was started; empty if one was.
    """

    cause: FailureCause | None = None
    mistake: str = ""
