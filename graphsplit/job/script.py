"""The calls of a user's script that concern all workers, one after the other.

Every worker makes the same calls in the same order. ``Script`` runs each as it comes; where a job
recovers from lost workers, another kind of script remembers them, and what they returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graphsplit.cluster.member.calls import CallHistory


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        name: What the user wrote: ``"train_step"``.
        run: Does it, given the arguments.
        arguments: Its arguments.
        subject: The Model that was called; None for a call of the module, such as ``barrier``.
    """

    name: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    subject: Any = None

    def __call__(self) -> Any:
        """Do it."""
        return self.run(*self.arguments)


class Script:
    """Runs every call as it comes.

    Args:
        calls: Notes the calls that all workers make; None where there is nobody else.
    """

    def __init__(self, calls: CallHistory | None = None) -> None:
        self._calls = calls

    def add_subject(self, subject: Any, *parts: Any) -> None:
        """A Model was built of some parts."""

    def collective(self, call: Call) -> Any:
        """Run a call that all workers make."""
        if self._calls is None:
            return call()
        self._calls.begin(call.name)
        try:
            return call()
        finally:
            self._calls.end()

    def local(self, call: Call) -> Any:
        """Run a call that each worker makes for itself, and that changes nothing."""
        return call()

    def step_done(self) -> None:
        """A training step inside a call is over, callbacks included."""

    def stop(self) -> None:
        """The script ends early, in order: keep what is needed to go on another time."""

    def finished(self) -> None:
        """All workers have come to the end of the script."""

    def close(self) -> None:
        """This worker leaves, however the job has ended."""
