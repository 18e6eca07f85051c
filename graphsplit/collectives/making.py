"""One call of a script that some workers make together: who takes part, and how it is made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from graphsplit.collectives.exchange import CallOfMany, PartOfJob, agree, pass_on
from graphsplit.collectives.reductions import described, is_number
from graphsplit.errors import ConfigurationError, StateError
from graphsplit.frames import line_now
from graphsplit.job import joined
from graphsplit.job.job import Job
from graphsplit.job.script import ModelCall
from graphsplit.text import need


@dataclass(frozen=True)
class Making:
    """A call that this process makes.

    Attributes:
        name: What was called.
        line: The script's line.
        job: The job; None in one process.
        members: The ranks that take part, in order.
        root: The place among them of the one that values come from, or go to.
    """

    name: str
    line: str
    job: Job | None
    members: tuple[int, ...]
    root: int

    @classmethod
    def of(cls, name: str, ranks: Iterable[int] | None, root: int | None) -> Making:
        """A call of the script.

        Args:
            name: What was called.
            ranks: The workers that take part; None for all.
            root: The rank of the one that values come from, or go to; None for the first.

        Raises:
            ConfigurationError: There is no such worker, or it does not take part.
        """
        job, line = joined.current(), line_now(sys._getframe(1))
        if ranks is not None:
            is_several = isinstance(ranks, Iterable) and not isinstance(ranks, str)
            need(
                name, "ranks", ranks, is_several, "the ranks that take part, as in [0, 2], or None"
            )
            ranks = list(ranks)
            need(name, "ranks", ranks, ranks, "at least one rank, or None for all workers")
        for rank in ranks or ():
            _check_kind(name, "ranks=[...]: one", rank)
        if root is not None:
            _check_kind(name, _of_root(name), root)
        if job is None:
            return cls(name, line, None, (0,), 0)
        members = tuple(job.ranks) if ranks is None else tuple(sorted(set(ranks)))
        for rank in (*members, *(() if root is None else (root,))):
            _check_rank(name, rank, job)
        if not members or (root is not None and root not in members):
            raise ConfigurationError(
                f"{name}: ranks={list(members)} is without {'anybody' if root is None else root}\n"
                f"  Fix: name every worker that takes part."
            )
        return cls(name, line, job, members, 0 if root is None else members.index(root))

    @property
    def num_members(self) -> int:
        """How many take part."""
        return len(self.members)

    @property
    def is_root(self) -> bool:
        """Whether values come from here, or go here."""
        return self.job is None or self.members[self.root] == self.job.rank

    def make(self, argument: Any, alike: str, move: Callable[[PartOfJob, Any], Any]) -> Any:
        """Make the call, where this process takes part in it.

        Args:
            argument: The script's argument, which is returned where nothing is to be done.
            alike: What all must pass alike, in words.
            move: Moves the values, given the workers that take part and the argument.
        """
        job = self.job
        if job is None:
            return argument
        if job.goes_on:
            raise ConfigurationError(
                f"{self.name} in a job with GS_RECOVERY=go_on: some of the workers that it names "
                f"may be away\n  Fix: GS_RECOVERY=wait_rejoin, where all are waited for."
            )
        is_of_all = self.num_members == job.num_workers
        call = CallOfMany(
            self.name, alike if is_of_all else f"{alike}, ranks={list(self.members)}", self.line
        )

        def run(argument: Any) -> Any:
            with job.reporting(), _naming(call):
                if not is_of_all and job.script.gives_again:
                    # Calls are counted: a worker that left this one out would be out of step.
                    job.num_barriers += 1
                    job.member.agree(f"collective {job.num_barriers}", call.text)
                if job.rank not in self.members:
                    return argument
                part = PartOfJob(job.control, self.members)
                agree(part, call)
                return move(part, argument)

        if is_of_all or job.script.gives_again:
            return job.script.collective(ModelCall(self.name, run, (argument,)))
        if self.num_members > 1:
            job.member.position.calls.check(self.name)
        return run(argument)  # the others need not make it


def pass_value(name: str, peer: int, values: Sequence[Any]) -> Any:
    """Send a value to another worker, or, without one, receive what it sends.

    Raises:
        ConfigurationError: There is no such worker; or lost workers may come back.
    """
    job, line = joined.current(), line_now(sys._getframe(1))
    _check_kind(name, _of_root(name), peer)
    if job is None:
        raise ConfigurationError(
            f"{name}: there is one process, and no worker {peer}\n"
            f"  Fix: call it where gs.get_world_size() > 1, or start the script by graphsplit run."
        )
    _check_rank(name, peer, job)
    if peer == job.rank:
        raise ConfigurationError(
            f"{name}: worker {peer} is this one\n  Fix: name another worker, or use the value."
        )
    if job.script.gives_again:
        raise ConfigurationError(
            f"{name} is a call of two workers; where lost workers may come back, only calls of all "
            f"are remembered for them\n  Fix: gs.broadcast(value, src=...), or start the job with "
            f"fail_fast."
        )
    with job.reporting(), _naming(CallOfMany(name, "", line)):
        ends = (job.rank, peer) if values else (peer, job.rank)
        return pass_on(PartOfJob(job.sent, ends), values)


def _of_root(name: str) -> str:
    """How the argument is called that names one worker."""
    return "dst" if name in ("reduce", "gather", "send") else "src"


def _check_kind(name: str, argument: str, rank: Any) -> None:
    """Refuse a rank that no job has; in one process nobody knows how many workers there are."""
    need(name, argument, rank, type(rank) is int and rank >= 0, "a worker's rank, an int from 0 on")


def _check_rank(name: str, rank: int, job: Job) -> None:
    if rank >= job.num_workers:
        raise ConfigurationError(
            f"{name}: there is no worker {rank}; the job has workers 0 to {job.num_workers - 1}\n"
            f"  Fix: name one of these, or start the job with more workers."
        )


def check_value(name: str, value: Any) -> None:
    """Refuse what is neither a tensor nor a number.

    Raises:
        ConfigurationError: It is something else, or a gradient would get lost.
    """
    if not (is_number(value) or isinstance(value, torch.Tensor)):
        raise ConfigurationError(
            f"{name} was given {described(value)}; expected a tensor or a number\n"
            f"  Fix: gs.broadcast_object takes other values."
        )
    if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise ConfigurationError(
            f"{name} was given a tensor that requires a gradient, and gives none\n"
            f"  Fix: pass {name}(value.detach()); what a network moves between workers, with its "
            f"gradients, follows from .place()."
        )


@contextmanager
def _naming(call: CallOfMany) -> Iterator[None]:
    """Say which call could not send its value."""
    try:
        yield
    except StateError as error:
        what, _, fix = str(error).partition("\n")
        told = what.replace("cannot be saved", "cannot be sent")
        raise ConfigurationError(f"{call.name}, at {call.line}: {told}\n{fix}") from None
