"""The calls of a user's script that concern all workers, one after the other.

Every worker makes the same calls in the same order. ``Script`` leaves them alone; where lost
workers may come back, another kind of script stands around them, and remembers what they returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from graphsplit.cluster.member.calls import CallHistory

T = TypeVar("T")


@dataclass(frozen=True)
class ModelCall:
    """One call.

    Attributes:
        name: What the user wrote: ``"train_step"``.
        run: Does it, given the arguments.
        arguments: Its arguments.
        engine: That of the Model that was called; None for a call such as ``barrier``.
    """

    name: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    engine: Any = None

    def __call__(self) -> Any:
        """Do it."""
        return self.run(*self.arguments)


class Script:
    """Runs every call as it comes.

    Args:
        calls: Notes the calls that all workers make; None where there is nobody else.

    Attributes:
        gives_again: Whether calls are remembered, for a process that comes back to the job.
    """

    gives_again = False

    def __init__(self, calls: CallHistory | None = None) -> None:
        self._calls = calls

    def add_engine(self, task: Any, engine: Any, states: Any) -> None:
        """A Model was built, of a task, an engine and states."""

    def number_of(self, engine: Any) -> int | None:
        """Which of the Models an engine is of, in a script of which all workers build the same."""
        return None

    def around(self, engine: Any, calls: T, *, changes_nothing: bool = False) -> T:
        """The calls of a Model, as this script makes them: with the same methods.

        Args:
            engine: The Model's engine.
            calls: Its methods are the calls; arguments are passed by position.
            changes_nothing: Each worker makes them for itself, and they change nothing; else all
                workers make them.
        """
        if self._calls is None or changes_nothing:
            return calls
        return self._calls.around(calls, engine)

    def collective(self, call: ModelCall) -> Any:
        """Run a call that all workers make."""
        if self._calls is None:
            return call()
        self._calls.begin(call.name)
        try:
            return call()
        finally:
            self._calls.end()

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether calls are remembered, and a tensor is of a Model: its values are, too."""
        return False

    def begin_own_loop(self) -> None:
        """A network is distributed: loops of the script's own will train it.

        Raises:
            ConfigurationError: Such a loop could not go on where workers were lost.
        """

    @property
    def stops_own_loop(self) -> bool:
        """Whether it ends the own loop that runs, where the job was asked to end.

        Else the next call of the network does.
        """
        return False

    def check_own_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step what lives here, in a loop of the script's own.

        Raises:
            ConfigurationError: Its state would not be brought back.
        """

    def leave_generation(self) -> None:
        """A worker was lost, and the job goes on. Where all start their scripts anew, no return."""

    def step_done(self) -> None:
        """A training step inside a call is over, callbacks included."""

    def stop(self) -> None:
        """The script ends early, in order: keep what is needed to go on another time."""

    def finished(self) -> None:
        """All workers have come to the end of the script."""

    def close(self) -> None:
        """This worker leaves, however the job has ended."""
