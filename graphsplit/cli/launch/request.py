"""A job as its launchers and agents are told of it; and what ``gs.launch`` and its launcher say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graphsplit.cli.launch.hosts import HostPart
from graphsplit.root_cause import FailureCause


@dataclass(frozen=True)
class JobOptions:
    """The options of a job: on the command line, or of whoever starts one.

    Attributes:
        num_workers: How many workers to start.
        script: The script of every process.
        arguments: The script's own arguments.
        port: The scheduler's port; None for a free one.
        host: The address that the scheduler listens on.
        log_dir: Where each process's output is also written.
        certificates: A folder with certificates, for mutual TLS.
        restarts: How often to start again what was lost.
        as_module: Whether the script is the name of a module.
        fresh: Whether each process imports everything itself.
        called: The module that each worker runs in place of the script, which is only looked at
            for what it imports; empty if it is the script itself.
        kept: Open files that every worker keeps.
        part: The processes that are started here; None: all of them.
        bind: Whether to keep each worker on its part of its host's cores.
    """

    num_workers: int
    script: Path
    arguments: tuple[str, ...] = ()
    port: int | None = None
    host: str = ""
    log_dir: Path | None = None
    certificates: Path | None = None
    restarts: int = 0
    as_module: bool = False
    fresh: bool = False
    called: str = ""
    kept: tuple[int, ...] = ()
    part: HostPart | None = None
    bind: bool = False


@dataclass(frozen=True)
class CallRequest:
    """A function to call on workers of this machine.

    Attributes:
        job: Their job; its ``kept`` are the open files with the function, and for what it returns,
            by rank.
        caller: The process that asks; the job ends when it does.
        answer: The open file for the launcher's own answer.
        limit_s: How long the job may take; None: for ever.
    """

    job: JobOptions
    caller: int
    answer: int
    limit_s: float | None


@dataclass(frozen=True)
class CallAnswer:
    """How the job ended.

    Attributes:
        cause: Why it failed; None if it did not.
        mistake: Why no job was started; empty if one was.
    """

    cause: FailureCause | None = None
    mistake: str = ""
